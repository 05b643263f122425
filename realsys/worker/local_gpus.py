"""Assigns this machine's GPUs to its workers: no GPU is shared unless its workers ask for parts of one.

Pure. On Slurm each step has its own GPUs of a node (realsys/slurm/gpus.py); here all workers of a phase
share the machine, and parts of GPUs are assigned across all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from realsys.api.errors import ClusterError
from realsys.api.scheduling import ExperimentScheduling
from realsys.slurm.gpus import tasks_per_gpu

Places = dict[str, tuple[int, ...]]


def places(scheduling: ExperimentScheduling) -> Places:
    """Returns for each worker the positions of its GPUs among the machine's, however many it has.

    Whole GPUs first, in the order in which workers start; then the parts, each on the first GPU with
    enough room.
    """
    tasks = [
        (f"{kind}/{index}", group.scheduling.gpu)
        for kind, group in scheduling.groups().items()
        for index in range(group.count)
    ]
    found: Places = {}
    taken = 0
    for worker, gpus in tasks:
        if gpus >= 1 or not gpus:
            found[worker] = tuple(range(taken, taken + int(gpus)))
            taken += int(gpus)
    free: dict[int, float] = {}  # of those that are shared
    for worker, gpus in tasks:
        if 0 < gpus < 1:
            part = 1 / tasks_per_gpu(gpus)
            fitting = (position for position, left in free.items() if left > part - 1e-9)
            position = next(fitting, taken)
            if position == taken:
                taken += 1
            free[position] = free.get(position, 1.0) - part
            found[worker] = (position,)
    return found


def gpus_needed(scheduling: ExperimentScheduling) -> int:
    """Returns how many GPUs the workers of a phase need together."""
    return 1 + max((p for positions in places(scheduling).values() for p in positions), default=-1)


def assign_gpus(scheduling: ExperimentScheduling, entries: Sequence[str]) -> dict[str, str]:
    """Returns for each worker its CUDA_VISIBLE_DEVICES; "" for one without a GPU.

    Args:
        entries: of CUDA_VISIBLE_DEVICES, for the machine's GPUs.
    Raises:
        ClusterError: there are too few.
    """
    needed = gpus_needed(scheduling)
    if needed > len(entries):
        raise ClusterError(
            f"the workers need {needed} GPUs together, but {len(entries)} can be used here",
            where="this machine (device files, nvidia-smi -L, CUDA_VISIBLE_DEVICES)",
            fix="plan with fewer, or with parts of one where several servers may share it",
        )
    return {
        worker: ",".join(entries[p] for p in positions)
        for worker, positions in places(scheduling).items()
    }


def devices_for_added_worker(
    worker: str,
    gpus: float,
    *,
    assigned: Mapping[str, str],
    gone: Iterable[str],
    entries: Sequence[str],
) -> str:
    """Returns CUDA_VISIBLE_DEVICES of a worker that is not in the plan: unused GPUs, else those of a
    worker that has left.

    Args:
        dealt: worker → its GPUs, added workers included.
        gone: workers of the same type that have left for good.
        entries: as for ``assign_gpus``.
    Raises:
        ClusterError: none is free.
    """
    if not gpus:
        return ""
    left = set(gone)
    used = [e for who, own in assigned.items() if who not in left for e in own.split(",")]
    for own in (assigned[who] for who in assigned if who in left):
        if own and all(used.count(entry) < tasks_per_gpu(gpus) for entry in own.split(",")):
            return own
    free = [entry for entry in entries if entry not in used]
    if len(free) < max(1, int(gpus)):
        raise ClusterError(
            f"{worker} needs {gpus:g} GPU{'' if gpus == 1 else 's'}, but of the {len(entries)} here "
            f"{len(free)} {'is' if len(free) == 1 else 'are'} free",
            where="this machine",
            fix="drain a worker of its type first (realsys scale --drain), or launch with more",
        )
    return ",".join(free[: max(1, int(gpus))])
