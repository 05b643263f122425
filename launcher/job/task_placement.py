"""Places tasks on a job's equal nodes (pure packing; independent of Slurm).

`place` takes as few nodes as it can and fills GPU nodes densely, with CPU groups on their spare cores.
It never puts more on a node than the node has. Up to six nodes the number is the least there is, if
the search is not cut off by its size; the same holds for one group, and for sizes that divide a node. Of
others it is told how many nodes might do. The search is launcher/job/fewest_nodes.py; what would fit
instead, launcher/job/misfit_fixes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from launcher.job.fewest_nodes import fewest_nodes, num_nodes
from launcher.job.misfit_fixes import fewer_nodes_fix, oversized
from launcher.job.node_patterns import NodeShape, Pattern, Patterns, TaskDemand

__all__ = ["Misfit", "NodeShape", "Packing", "TaskDemand", "place"]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A placement of all tasks.

    Attributes:
        names: the groups.
        patterns: (nodes, tasks of each group on each of them), in order of the nodes.
        least_nodes: no placement has fewer; below ``num_nodes`` where that is not proven the best.
    """

    names: tuple[str, ...]
    patterns: tuple[tuple[int, Pattern], ...]
    least_nodes: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes that have a task."""
        return num_nodes(list(self.patterns))

    def runs(self, name: str) -> tuple[tuple[int, int], ...]:
        """Lists (nodes, tasks of the group on each of them) for all nodes."""
        group = self.names.index(name)
        tasks = [(pattern[group], nodes) for nodes, pattern in self.patterns]
        merged = groupby(tasks, key=lambda run: run[0])
        return tuple((sum(nodes for _, nodes in same), count) for count, same in merged)

    @property
    def counts(self) -> dict[str, tuple[int, ...]]:
        """Tasks of each group on node 0, 1, 2 …"""
        return {
            name: tuple(tasks for nodes, tasks in self.runs(name) for _ in range(nodes))
            for name in self.names
        }


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """Why the tasks can't be placed, and the smallest changes with which they could.

    Attributes:
        needed: number of nodes that would suffice; None if no number does.
    """

    why: str
    fix: str
    needed: int | None = None


def place(
    groups: Sequence[TaskDemand], node: NodeShape, *, max_nodes: int | None
) -> Packing | Misfit:
    """Places all tasks of all groups on as few nodes as possible.

    Args:
        max_nodes: number of nodes available; None: unlimited.
    """
    if found := oversized(groups, node):
        return Misfit(why=found[0], fix=found[1])
    runs, least = fewest_nodes(Patterns(groups, node))
    needed = num_nodes(runs)
    if max_nodes is not None and needed > max_nodes:
        tasks = " and ".join(f"{d.count} {d.name}" for d in groups if d.count)
        noun = "node" if needed == 1 else "nodes"
        unproven = f" as we place them ({least} at the least)" if least < needed else ""
        why = f"{tasks} need {needed} {noun}{unproven}, {_there_are(max_nodes)}"
        return Misfit(why=why, fix=fewer_nodes_fix(groups, node, max_nodes, needed), needed=needed)
    names = tuple(d.name for d in groups)
    return Packing(names=names, patterns=_in_order(groups, runs), least_nodes=least)


def _in_order(
    groups: Sequence[TaskDemand], runs: Sequence[tuple[int, Pattern]]
) -> tuple[tuple[int, Pattern], ...]:
    """Orders nodes so that equal ones are adjacent, those with the most GPU tasks first: runs are then
    few.
    """
    by_gpus = sorted(range(len(groups)), key=lambda g: (-groups[g].gpus, g))
    ordered = sorted(runs, key=lambda run: [run[1][g] for g in by_gpus], reverse=True)
    merged = groupby(ordered, key=lambda run: run[1])
    return tuple((sum(nodes for nodes, _ in same), pattern) for pattern, same in merged)


def _there_are(nodes: int) -> str:
    return "there is 1" if nodes == 1 else f"there are {nodes}"
