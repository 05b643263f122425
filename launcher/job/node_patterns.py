"""Patterns of tasks that fit on one node: the number of tasks of each group there (pure).

CPUs and memory add up. Whole GPUs belong to one task each; with a fraction below 1, as many tasks of the
SAME group share a GPU as fit into it (realsys/slurm/gpus.py). launcher/job/fewest_nodes.py assigns
patterns to nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from realsys.slurm.gpus import gpus_for, tasks_per_gpu

Pattern = tuple[int, ...]  # tasks of each group on a node
Free = tuple[int, int, int]  # CPUs, MiB, GPUs


class OutOfWork(Exception):
    """The search has used up its budget."""


@dataclass
class PackingProblem:
    """The number of patterns a search may still examine; bounds the time of planning."""

    left: int

    def spend(self) -> None:
        """Counts one pattern. Raises OutOfWork if the budget is used up."""
        self.left -= 1
        if self.left < 0:
            raise OutOfWork


@dataclass(frozen=True, kw_only=True)
class NodeShape:
    """The resources of a node.

    Attributes:
        core: CPUs per core: Slurm allocates whole cores to a step, with all their threads.
    """

    cpus: int
    memory_mib: int
    gpus: int = 0
    core: int = 1

    def whole(self, cpus: int) -> int:
        """Rounds a task's CPUs up to whole cores."""
        return -(-cpus // self.core) * self.core


@dataclass(frozen=True, kw_only=True)
class TaskDemand:
    """``count`` equal tasks and the resources each of them needs.

    Attributes:
        gpus: 0, a fraction below 1 (tasks of this group share a GPU), or a whole number.
    """

    name: str
    count: int
    cpus: int
    memory_mib: int
    gpus: float = 0.0


class Patterns:
    """The patterns of groups on one kind of node; groups are identified by their index in ``demands``."""

    def __init__(self, demands: Sequence[TaskDemand], node: NodeShape) -> None:
        self.demands, self.node = tuple(demands), node
        self.empty: Free = (node.cpus, node.memory_mib, node.gpus)

    def gpus(self, group: int, tasks: int) -> int:
        """Counts the GPUs used by ``tasks`` tasks of a group on a node."""
        return gpus_for(tasks, self.demands[group].gpus)

    def most(self, group: int, free: Free) -> int:
        """Counts the tasks of a group that fit into ``free`` on a node without any of them."""
        d = self.demands[group]
        fit = min(free[0] // d.cpus, free[1] // d.memory_mib)
        if d.gpus >= 1:
            return min(fit, free[2] // int(d.gpus))
        return min(fit, free[2] * tasks_per_gpu(d.gpus)) if d.gpus else fit

    def without(self, free: Free, group: int, tasks: int) -> Free:
        """Computes what remains free after placing ``tasks`` tasks of a group."""
        d = self.demands[group]
        return (
            free[0] - tasks * d.cpus,
            free[1] - tasks * d.memory_mib,
            free[2] - self.gpus(group, tasks),
        )

    def is_full(self, pattern: Pattern, free: Free, left: Pattern) -> bool:
        """Whether no group with further tasks in ``left`` can place another one there."""
        for group, d in enumerate(self.demands):
            tasks = pattern[group]
            if tasks < left[group] and d.cpus <= free[0] and d.memory_mib <= free[1]:
                more = self.gpus(group, tasks + 1) - self.gpus(group, tasks)
                if more <= free[2]:
                    return False
        return True

    def filled(self, left: Pattern, order: Sequence[int]) -> Pattern:
        """Fills one node group by group, each with as many tasks as fit."""
        pattern, free = [0] * len(left), self.empty
        for group in order:
            pattern[group] = min(left[group], self.most(group, free))
            free = self.without(free, group, pattern[group])
        return tuple(pattern)

    def full(
        self, left: Pattern, first: int, at_least: int, work: PackingProblem
    ) -> Iterator[Pattern]:
        """Yields every maximal pattern with ``at_least`` tasks of ``first``, those with most tasks first.

        If tasks fit on n nodes at all, they also fit with the first node full, because tasks of the others
        can move there. A search therefore needs no other patterns.
        """
        order = [first, *(g for g in range(len(left)) if g != first and left[g])]

        def from_group(at: int, free: Free, pattern: list[int]) -> Iterator[Pattern]:
            work.spend()
            group = order[at]
            most = min(left[group], self.most(group, free))
            last = at == len(order) - 1
            least = at_least if at == 0 else most if last else 0
            for tasks in range(most, least - 1, -1):
                pattern[group] = tasks
                rest = self.without(free, group, tasks)
                if not last:
                    yield from from_group(at + 1, rest, pattern)
                elif self.is_full(found := tuple(pattern), rest, left):
                    yield found
            pattern[group] = 0

        return from_group(0, self.empty, [0] * len(left))
