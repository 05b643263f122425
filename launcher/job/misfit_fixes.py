"""Finds changes with which tasks would fit: smaller tasks, fewer of them, or more nodes (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from launcher.job.fewest_nodes import fewest_nodes, lower_bound, num_nodes
from launcher.job.node_patterns import NodeShape, Patterns, TaskDemand

QUICK_WORK = 2_000  # some hundred changes are tried, so each search must be short


def oversized(groups: Sequence[TaskDemand], node: NodeShape) -> tuple[str, str] | None:
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


def fewer_nodes_fix(
    groups: Sequence[TaskDemand], node: NodeShape, max_nodes: int, needed: int
) -> str:
    """Describes the smallest changes that would fit, one of each kind."""
    ways = [f"allow {needed} node" + "s" * (needed > 1)]
    if max_nodes:
        ways += _first(_fewer_tasks(groups, node, max_nodes))
        ways += _first(_smaller_tasks(groups, node, max_nodes))
    return ", or ".join(ways)


def _first(ways: Iterator[tuple[float, str]]) -> list[str]:
    """Selects the smallest change, if there is any."""
    return [min(found)[1]] if (found := list(ways)) else []


def _fewer_tasks(
    groups: Sequence[TaskDemand], node: NodeShape, max_nodes: int
) -> Iterator[tuple[float, str]]:
    for at, d in enumerate(groups):

        def with_count(count: int, at: int = at) -> Sequence[TaskDemand]:
            return _changed(groups, at, count=count)

        if d.count > 1 and (most := _largest(d.count, with_count, node, max_nodes)):
            yield 1 - most / d.count, f"{most} tasks of {d.name} (now {d.count})"


def _smaller_tasks(
    groups: Sequence[TaskDemand], node: NodeShape, max_nodes: int
) -> Iterator[tuple[float, str]]:
    for at, d in enumerate(groups):

        def with_cpus(cpus: int, at: int = at) -> Sequence[TaskDemand]:
            return _changed(groups, at, cpus=node.whole(cpus))

        def with_memory(mib: int, at: int = at) -> Sequence[TaskDemand]:
            return _changed(groups, at, memory_mib=mib)

        if not d.count:
            continue
        if most := _largest(d.cpus, with_cpus, node, max_nodes):
            yield 1 - most / d.cpus, f"{d.name}.cpu={most} (now {d.cpus})"
        if most := _largest(d.memory_mib, with_memory, node, max_nodes):
            yield 1 - most / d.memory_mib, f"{d.name}.mem={most} (now {d.memory_mib})"


def _largest(
    now: int, groups_with: Callable[[int], Sequence[TaskDemand]], node: NodeShape, max_nodes: int
) -> int:
    """Finds the largest number below ``now`` with which all tasks fit; 0 if 1 is too large."""
    low, high = 0, now  # low fits or is 0, high does not
    while high - low > 1:
        middle = (low + high) // 2 if low else 1
        if _fits(groups_with(middle), node, max_nodes):
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
    return num_nodes(fewest_nodes(patterns, QUICK_WORK)[0]) <= max_nodes


def _changed(groups: Sequence[TaskDemand], at: int, **changes: int) -> list[TaskDemand]:
    return [replace(d, **changes) if i == at else d for i, d in enumerate(groups)]  # type: ignore[arg-type]
