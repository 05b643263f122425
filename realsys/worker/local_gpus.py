"""Which GPU each worker on this machine computes on: none has another's unless both ask for parts of one.

Pure. On Slurm each step has its own GPUs of a node (realsys/slurm/gpus.py); here all workers of a phase
share the machine, and parts of GPUs are dealt out among all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from realsys.api.errors import ClusterError
from realsys.api.scheduling import ExperimentScheduling
from realsys.slurm.gpus import tasks_per_gpu

Places = dict[str, tuple[int, ...]]


def places(scheduling: ExperimentScheduling) -> Places:
    """Worker → positions of its GPUs among the machine's, however many it has.

    Whole GPUs first, in the order in which workers start; then the parts, each on the first GPU that was
    begun for parts of its size.
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
    """How many GPUs the workers of a phase need together."""
    return 1 + max((p for positions in places(scheduling).values() for p in positions), default=-1)


def deal(scheduling: ExperimentScheduling, entries: Sequence[str]) -> dict[str, str]:
    """Worker → its CUDA_VISIBLE_DEVICES; "" for one without a GPU.

    Args:
        entries: of CUDA_VISIBLE_DEVICES, for the machine's GPUs.
    Raises:
        ClusterError: they are too few.
    """
    needed = gpus_needed(scheduling)
    if needed > len(entries):
        raise ClusterError(
            f"the workers need {needed} GPUs together, and {len(entries)} can be used here",
            where="this machine (device files, nvidia-smi -L, CUDA_VISIBLE_DEVICES)",
            fix="plan with fewer, or with parts of one where several servers may share it",
        )
    return {
        worker: ",".join(entries[p] for p in positions)
        for worker, positions in places(scheduling).items()
    }


def devices_of_one_more(
    worker: str,
    gpus: float,
    *,
    dealt: Mapping[str, str],
    gone: Iterable[str],
    entries: Sequence[str],
) -> str:
    """CUDA_VISIBLE_DEVICES of a worker that the plan does not have: GPUs that nobody has, else those of
    one that has left.

    Args:
        dealt: worker → what it got, those that were added included.
        gone: workers of the same kind that have left for good.
        entries: as for ``deal``.
    Raises:
        ClusterError: none is free.
    """
    if not gpus:
        return ""
    left = set(gone)
    used = [e for who, own in dealt.items() if who not in left for e in own.split(",")]
    for own in (dealt[who] for who in dealt if who in left):
        if own and all(used.count(entry) < tasks_per_gpu(gpus) for entry in own.split(",")):
            return own
    free = [entry for entry in entries if entry not in used]
    if len(free) < max(1, int(gpus)):
        raise ClusterError(
            f"{worker} needs {gpus:g} GPU{'' if gpus == 1 else 's'}, and of the {len(entries)} here "
            f"{len(free)} {'is' if len(free) == 1 else 'are'} free",
            where="this machine",
            fix="let one of its kind go first (realsys scale --drain), or launch with more of them",
        )
    return ",".join(free[: max(1, int(gpus))])
