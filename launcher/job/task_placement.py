"""Places tasks on a job's equal nodes (pure packing; independent of Slurm).

`place` takes as few nodes as it can and fills GPU nodes densely, with CPU groups on their spare cores.
It never puts more on a node than the node has. Up to six nodes the number is the least there is, if
the search is not cut off by its size; the same holds for one group, and for sizes that divide a node. Of
others it is told how many nodes might do. The search is launcher/job/fewest_nodes.py. Where the tasks
don't fit, changes are found with which they would: smaller tasks, fewer of them, or more nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from launcher.job.fewest_nodes import fewest_nodes, lower_bound, num_nodes
from launcher.job.node_patterns import NodeShape, Pattern, Patterns, TaskDemand

MAX_FIX_SEARCH_PATTERNS = 2_000  # some hundred changes are tried, so each search must be short

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
    if found := _oversized(groups, node):
        return Misfit(why=found[0], fix=found[1])
    runs, least = fewest_nodes(Patterns(groups, node))
    needed = num_nodes(runs)
    if max_nodes is not None and needed > max_nodes:
        tasks = " and ".join(f"{d.count} {d.name}" for d in groups if d.count)
        noun, there = "node" if needed == 1 else "nodes", "is" if max_nodes == 1 else "are"
        unproven = f" as we place them ({least} at the least)" if least < needed else ""
        why = f"{tasks} need {needed} {noun}{unproven}, there {there} {max_nodes}"
        return Misfit(why=why, fix=_fewer_nodes_fix(groups, node, max_nodes, needed), needed=needed)
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


# ---- what would fit instead -----------------------------------------------------------------

_WAYS = {
    "count": "{most} tasks of {name} (now {now})",
    "cpus": "{name}.cpu={most} (now {now})",
    "memory_mib": "{name}.mem={most} (now {now})",
}


def _oversized(groups: Sequence[TaskDemand], node: NodeShape) -> tuple[str, str] | None:
    """Returns (why, fix) if a single task is larger than a node."""
    why, fix = [], []
    for d in groups:
        wanted = (
            (d.gpus, node.gpus, "GPUs", "gpu"),
            (d.cpus, node.cpus, "CPUs", "cpu"),
            (d.memory_mib, node.memory_mib, "MiB", "mem"),
        )
        for need, has, unit, field in wanted:
            if d.count and need > has:
                noun = "GPU" if unit == "GPUs" and need <= 1 else unit
                why.append(
                    f"{d.name}: one task needs {need if need < 1 else int(need)} {noun}, a node has {has}"
                )
                fix.append(f"{d.name}.{field} at most {has}")
    return ("; ".join(why), "; ".join(fix) + ", or larger nodes") if why else None


def _fewer_nodes_fix(
    groups: Sequence[TaskDemand], node: NodeShape, max_nodes: int, needed: int
) -> str:
    """Describes the smallest changes that would fit, one of each kind: fewer tasks, or smaller ones."""
    ways = [f"allow {needed} node" + "s" * (needed > 1)]
    for changes in (("count",), ("cpus", "memory_mib")) if max_nodes else ():
        found = [
            (1 - most / now, _WAYS[field].format(name=d.name, most=most, now=now))
            for at, d in enumerate(groups)
            for field in changes
            if d.count
            and (now := getattr(d, field))
            and (most := _largest(groups, at, field, node, max_nodes))
        ]
        ways += [min(found)[1]] if found else []
    return ", or ".join(ways)


def _largest(
    groups: Sequence[TaskDemand], at: int, field: str, node: NodeShape, max_nodes: int
) -> int:
    """Finds the largest value of a group's field, below its present one, with which all tasks fit; 0 if 1
    is too large.
    """
    low, high = 0, getattr(groups[at], field)  # low fits or is 0, high does not
    while high - low > 1:
        middle = (low + high) // 2 if low else 1
        value = node.whole(middle) if field == "cpus" else middle
        changed = replace(groups[at], **{field: value})  # type: ignore[arg-type]
        if _fits([*groups[:at], changed, *groups[at + 1 :]], node, max_nodes):
            low = middle
        elif middle == 1:
            return 0
        else:
            high = middle
    return low


def _fits(groups: Sequence[TaskDemand], node: NodeShape, max_nodes: int) -> bool:
    patterns = Patterns(groups, node)
    if lower_bound(patterns, tuple(d.count for d in groups)) > max_nodes:
        return False
    return num_nodes(fewest_nodes(patterns, MAX_FIX_SEARCH_PATTERNS)[0]) <= max_nodes
