"""Packs few groups of many tasks on as few equal nodes as possible (pure; vector bin packing).

Tries three methods; the first result that is proven minimal wins:

1. Dense packing: GPU groups first, the others on what those leave. Wins whenever it meets the lower
bound,
   so GPU nodes are filled completely and CPU groups use their spare cores.
2. Few nodes (up to 6): exhaustive depth-first search over maximal patterns, with memoised failures. 3.
Many nodes: the linear relaxation over patterns (Gilmore and Gomory, Operations Research 9(6), 1961);
   its integer part is used, and the remaining tasks, which need fewer nodes than there are groups, are
   packed by 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.job.node_patterns import Pattern, Patterns, SearchBudget, SearchBudgetExhausted

FEW_NODES = 6
MAX_SEARCH_PATTERNS = 60_000  # patterns examined by one exact search, about 0.2 s
PRICING_SHARE = 20  # one iteration of the relaxation may examine 1/20 of that
Runs = list[tuple[int, Pattern]]  # (nodes, the pattern on each of them)


def fewest_nodes(patterns: Patterns, search_work: int = MAX_SEARCH_PATTERNS) -> Runs:
    """Packs all groups' tasks on the fewest nodes found. Each task must fit on an empty node.

    Args:
        search_work: number of patterns a search may examine; a larger one may find fewer nodes.
    """
    left = tuple(d.count for d in patterns.demands)
    return _packed(patterns, left, search_work, relaxed=True)


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


def _packed(patterns: Patterns, left: Pattern, search_work: int, *, relaxed: bool) -> Runs:
    dense, least = _dense(patterns, left), lower_bound(patterns, left)
    work = SearchBudget(search_work)
    while least < num_nodes(dense) and least <= FEW_NODES:
        try:
            found = _on_few(patterns, left, least, work, set())
        except SearchBudgetExhausted:
            break
        if found is not None:
            return [(1, pattern) for pattern in found]
        least += 1
    if relaxed and least < num_nodes(dense):
        other = _by_relaxation(patterns, left, search_work)
        if num_nodes(other) < num_nodes(dense):
            return other
    return dense


def _dense(patterns: Patterns, left: Pattern) -> Runs:
    """Packs GPU groups first and large tasks before small ones, each as densely as possible."""
    node = patterns.node

    def rank(group: int) -> tuple[float, float, int]:
        d = patterns.demands[group]
        return -d.gpus, -max(d.cpus / node.cpus, d.memory_mib / node.memory_mib), group

    order, runs = sorted(range(len(left)), key=rank), []
    while any(left):
        pattern = patterns.filled(left, order)
        nodes, left = _repeated(pattern, left)
        runs.append((nodes, pattern))
    return runs


def _repeated(pattern: Pattern, left: Pattern, most: int | None = None) -> tuple[int, Pattern]:
    """Computes how many nodes can have the pattern (at most ``most``) and the tasks then left."""
    nodes = min(has // tasks for has, tasks in zip(left, pattern, strict=True) if tasks)
    nodes = nodes if most is None else min(nodes, most)
    return nodes, tuple(has - nodes * tasks for has, tasks in zip(left, pattern, strict=True))


def _on_few(
    patterns: Patterns,
    left: Pattern,
    nodes: int,
    work: SearchBudget,
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


def _by_relaxation(patterns: Patterns, left: Pattern, search_work: int) -> Runs:
    """Uses the integer part of the relaxation's solution and packs the remaining tasks separately."""
    runs: Runs = []
    for amount, pattern in sorted(
        _relaxation(patterns, left, search_work // PRICING_SHARE), reverse=True
    ):
        whole = int(amount + 1e-9)
        while whole and any(pattern := tuple(map(min, pattern, left))):
            nodes, left = _repeated(pattern, left, whole)
            runs.append((nodes, pattern))
            whole -= nodes
    return runs + _packed(patterns, left, search_work, relaxed=False)


def _relaxation(
    patterns: Patterns, left: Pattern, pricing_work: int
) -> list[tuple[float, Pattern]]:
    """Solves the relaxation: (amount, pattern) with the least total of fractional nodes for all tasks.

    The simplex method with a basis of one column per group, and column generation: the pattern with the
    highest value at the current prices enters while its value exceeds the cost of its node.
    """
    groups = [g for g in range(len(left)) if left[g]]
    size = len(groups)
    columns: list[Pattern] = [patterns.filled(left, [g]) for g in groups]
    costs = [1.0] * size
    inverse = [
        [1 / columns[i][groups[i]] if i == j else 0.0 for j in range(size)] for i in range(size)
    ]
    amounts = [left[g] * inverse[i][i] for i, g in enumerate(groups)]
    for _ in range(50 * size):
        prices = [sum(costs[i] * inverse[i][j] for i in range(size)) for j in range(size)]
        entering, cost = _entering(patterns, left, groups, prices, SearchBudget(pricing_work))
        if entering is None:
            break
        step = [sum(inverse[i][j] * entering[g] for j, g in enumerate(groups)) for i in range(size)]
        ratios = [(amounts[i] / step[i], i) for i in range(size) if step[i] > 1e-9]
        if not ratios:
            break
        ratio, leaving = min(ratios)
        _pivot(inverse, amounts, step, leaving, ratio)
        columns[leaving], costs[leaving] = entering, cost
    return [(a, c) for a, c, cost in zip(amounts, columns, costs, strict=True) if cost]


def _entering(
    patterns: Patterns,
    left: Pattern,
    groups: Sequence[int],
    prices: Sequence[float],
    work: SearchBudget,
) -> tuple[Pattern | None, float]:
    """Finds the column that lowers the cost, and its cost; None if there is none."""
    values = [0.0] * len(left)
    for price, group in zip(prices, groups, strict=True):
        values[group] = price
    if min(prices) < -1e-9:  # a surplus task of that group is free
        group = groups[min(range(len(groups)), key=lambda j: prices[j])]
        return tuple(-1 if g == group else 0 for g in range(len(left))), 0.0
    pattern = patterns.best(values, left, work)
    worth = sum(v * tasks for v, tasks in zip(values, pattern, strict=True))
    return (pattern, 1.0) if worth > 1 + 1e-7 else (None, 0.0)


def _pivot(
    inverse: list[list[float]], amounts: list[float], step: list[float], leaving: int, ratio: float
) -> None:
    pivot_row = [value / step[leaving] for value in inverse[leaving]]
    for i, row in enumerate(inverse):
        if i != leaving:
            amounts[i] = max(0.0, amounts[i] - ratio * step[i])
            inverse[i] = [v - step[i] * p for v, p in zip(row, pivot_row, strict=True)]
    inverse[leaving], amounts[leaving] = pivot_row, ratio


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
