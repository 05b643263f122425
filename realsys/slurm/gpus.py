"""Determines which of a node's GPUs a task uses, from CUDA_VISIBLE_DEVICES (pure).

For ``gpu_binding: visible``: srun gives a step K GPUs on each of its nodes and lists them in
CUDA_VISIBLE_DEVICES, the same for all tasks of the node; each task keeps its own entries. An entry is
opaque: an index (``0``), a UUID (``GPU-8932f937-…``) or a MIG instance (``MIG-…``), see the CUDA C
Programming Guide, CUDA Environment Variables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from realsys.api.errors import ClusterError


def tasks_per_gpu(gpus_per_task: float) -> int:
    """Returns how many tasks share one GPU: 1 for whole GPUs, 3 for a third or for 0.3."""
    return 1 if gpus_per_task >= 1 else math.floor(1 / gpus_per_task + 1e-9)


def gpus_for(tasks: int, gpus_per_task: float) -> int:
    """Returns how many GPUs that number of tasks of one group use on a node."""
    if gpus_per_task >= 1 or gpus_per_task == 0:
        return tasks * int(gpus_per_task)
    return math.ceil(tasks / tasks_per_gpu(gpus_per_task))


def gpu_positions(local_task: int, gpus_per_task: float) -> range:
    """Returns the positions, among the step's GPUs of the node, that its ``local_task``-th task uses."""
    if gpus_per_task == 0:
        return range(0)
    if gpus_per_task < 1:
        position = local_task // tasks_per_gpu(gpus_per_task)
        return range(position, position + 1)
    width = int(gpus_per_task)
    return range(local_task * width, (local_task + 1) * width)


def gpu_ids(step_gpus: str | None, local_task: int, gpus_per_task: float) -> tuple[str, ...]:
    """Returns Slurm's own numbers of a task's GPUs; empty if Slurm does not report them.

    Args:
        step_gpus: SLURM_STEP_GPUS: numbers on the node, in the order of CUDA_VISIBLE_DEVICES, of the
            step's GPUs, or of the task's where Slurm does the binding.
    """
    ids = [n.strip() for n in (step_gpus or "").split(",") if n.strip()]
    if len(ids) == gpus_per_task:  # the task's own, or it is alone
        return tuple(ids)
    wanted = gpu_positions(local_task, gpus_per_task)
    return tuple(ids[i] for i in wanted) if wanted.stop <= len(ids) else ()


def same_devices(ids: Sequence[str], *, step_gpus: str | None, visible: str | None) -> str | None:
    """Returns the entries of CUDA_VISIBLE_DEVICES for these GPUs, in another step on the node.

    None if they can't be determined, or the step does not have them all.
    """
    numbers = [n.strip() for n in (step_gpus or "").split(",") if n.strip()]
    entries = [e.strip() for e in (visible or "").split(",") if e.strip()]
    if not ids or len(numbers) != len(entries) or not set(ids) <= set(numbers):
        return None
    return ",".join(entries[numbers.index(n)] for n in ids)


def own_devices(visible: str | None, local_task: int, gpus_per_task: float) -> str:
    """Returns CUDA_VISIBLE_DEVICES of a task, from that of its node.

    Args:
        visible: the step's value set by Slurm; None if it set none.
        local_task: SLURM_LOCALID.
    Raises:
        ClusterError: the step has fewer GPUs here than the plan says.
    """
    wanted = gpu_positions(local_task, gpus_per_task)
    entries = [e.strip() for e in (visible or "").split(",") if e.strip()]
    if wanted.stop > len(entries):
        raise ClusterError(
            f"task {local_task} of this node should use GPU {wanted.stop} of the step's, but Slurm "
            f"gave {len(entries)}",
            where=f"CUDA_VISIBLE_DEVICES={visible or '(not set)'}",
            fix="check GresTypes and gres.conf with `realsys doctor`, or set slurm.gpu_binding: "
            "per_task in the cluster spec",
        )
    return ",".join(entries[i] for i in wanted)
