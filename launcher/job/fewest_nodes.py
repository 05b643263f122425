"""Few equal nodes for a few groups of many tasks (pure; vector bin packing).

First fit decreasing: large tasks before small ones, each node as full as it goes, in three orders of
which the best counts. GPU groups come first in one of them, so GPU nodes are filled whole and CPU groups
use their spare cores. Where that misses the lower bound and up to 6 nodes may do, every way that matters
is tried, depth first, with failures remembered. What is proven, and not more, is told with the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from launcher.job.node_patterns import OutOfWork, PackingProblem, Pattern, Patterns

FEW_NODES = 6
SEARCH_WORK = 60_000  # patterns of one exact search, about 0.2 s
Runs = list[tuple[int, Pattern]]  # (nodes, the pattern on each of them)


def fewest_nodes(patterns: Patterns, search_work: int = SEARCH_WORK) -> tuple[Runs, int]:
    """The tasks of all groups on as few nodes as were found, and nodes below which no way can go.

    Args:
        patterns: each task must fit on an empty node.
        search_work: patterns that a search may look at; with more of it, nodes may become fewer.
    """
    left = tuple(d.count for d in patterns.demands)
    runs = min((_filled_up(patterns, left, order) for order in _orders(patterns)), key=num_nodes)
    least, work = lower_bound(patterns, left), PackingProblem(search_work)
    while least < num_nodes(runs) and least <= FEW_NODES:
        try:
            found = _on_few(patterns, left, least, work, set())
        except OutOfWork:
            break
        if found is not None:
            return [(1, pattern) for pattern in found], least
        least += 1
    return runs, least


def lower_bound(patterns: Patterns, left: Pattern) -> int:
    """Computes a lower bound on the nodes: from each group alone, and from each resource's sum."""
    node, used, found = patterns.empty, [0, 0, 0], 0
    for group, tasks in enumerate(left):
        if not tasks:
            continue
        d = patterns.demands[group]
        found = max(found, _ceil_div(tasks, patterns.most(group, node)))
        used[0] += tasks * d.cpus
        used[1] += tasks * d.memory_mib
        used[2] += patterns.gpus(group, tasks)
    return max(found, 0, *(_ceil_div(u, n) for u, n in zip(used, node, strict=True) if u))


def num_nodes(runs: Runs) -> int:
    """Sums the nodes of all runs."""
    return sum(nodes for nodes, _ in runs)


def _orders(patterns: Patterns) -> Iterator[list[int]]:
    """Groups, large tasks first: by GPUs, by the largest share of a node, by the sum of shares."""
    node, demands = patterns.node, patterns.demands
    shares = [
        (d.gpus / max(node.gpus, 1), d.cpus / node.cpus, d.memory_mib / node.memory_mib)
        for d in demands
    ]
    sizes: tuple[Callable[[int], tuple[float, ...]], ...] = (
        lambda group: (demands[group].gpus, max(shares[group][1:])),
        lambda group: (max(shares[group]),),
        lambda group: (sum(shares[group]),),
    )
    for size in sizes:
        yield sorted(range(len(demands)), key=lambda group: (*(-n for n in size(group)), group))


def _filled_up(patterns: Patterns, left: Pattern, order: Sequence[int]) -> Runs:
    """Node after node, each with as many tasks of each group as fit, in this order of groups."""
    runs = []
    while any(left):
        pattern = patterns.filled(left, order)
        nodes, left = _repeated(pattern, left)
        runs.append((nodes, pattern))
    return runs


def _repeated(pattern: Pattern, left: Pattern) -> tuple[int, Pattern]:
    """How many nodes can have the pattern, and the tasks left then."""
    nodes = min(has // tasks for has, tasks in zip(left, pattern, strict=True) if tasks)
    return nodes, tuple(has - nodes * tasks for has, tasks in zip(left, pattern, strict=True))


def _on_few(
    patterns: Patterns,
    left: Pattern,
    nodes: int,
    work: PackingProblem,
    failed: set[tuple[int, Pattern]],
) -> list[Pattern] | None:
    """Searches for a pattern per node such that ``nodes`` nodes hold all tasks; None if there is none."""
    if not any(left):
        return []
    if (nodes, left) in failed or lower_bound(patterns, left) > nodes:
        return None
    # Without loss of generality the first node has the most tasks of the tightest group.
    groups = [g for g, tasks in enumerate(left) if tasks]
    first = max(groups, key=lambda g: (left[g] / patterns.most(g, patterns.empty), -g))
    for pattern in patterns.full(left, first, _ceil_div(left[first], nodes), work):
        rest = tuple(has - tasks for has, tasks in zip(left, pattern, strict=True))
        if (found := _on_few(patterns, rest, nodes - 1, work, failed)) is not None:
            return [pattern, *found]
    failed.add((nodes, left))
    return None


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
