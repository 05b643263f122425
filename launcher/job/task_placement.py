"""Places tasks on a job's equal nodes (pure packing; independent of Slurm).

`place` uses as few nodes as it can and fills GPU nodes densely, with CPU groups on their spare cores. It
never exceeds a node's resources. Up to six nodes the number is minimal unless the search exceeds its
budget; the same holds for a single group, and for mixes limited by one resource. The search is in
launcher/job/fewest_nodes.py, the changes that would fit in launcher/job/misfit_fixes.py.
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
    """

    names: tuple[str, ...]
    patterns: tuple[tuple[int, Pattern], ...]

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
    runs = fewest_nodes(Patterns(groups, node))
    needed = num_nodes(runs)
    if max_nodes is not None and needed > max_nodes:
        tasks = " and ".join(f"{d.count} {d.name}" for d in groups if d.count)
        noun = "node" if needed == 1 else "nodes"
        why = f"{tasks} need {needed} {noun}, {_there_are(max_nodes)}"
        return Misfit(why=why, fix=fewer_nodes_fix(groups, node, max_nodes, needed), needed=needed)
    return Packing(names=tuple(d.name for d in groups), patterns=_in_order(groups, runs))


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
