"""Chooses which holder sends which region to whom, balancing the senders' loads (pure).

Demands are grouped by the set of workers that can serve them. Groups are assigned from small sets to
large, each so that its members' totals become as equal as possible. If the sets are nested or disjoint, as
in regular layouts, no other choice has a smaller maximum (up to one row, or one slice too small to split).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from realsys.weights.layouts.boxes import Box

Workers = tuple[int, ...]


class RegionDemand(NamedTuple):
    """A worker's need of a region that it does not hold. Sorts by needer, then in the weights' order."""

    receiver: int
    order: int  # position of the weight in the model
    box: Box
    num_bytes: int


def assign_senders(
    groups: Mapping[Workers, list[RegionDemand]], *, min_cut_bytes: int
) -> Iterator[tuple[int, RegionDemand]]:
    """Yields every demand exactly once, whole or in parts, each with a sender of its group.

    Args:
        groups: workers that hold a region (ascending) → the demands they can serve.
        min_cut_bytes: smaller demands are not split between senders.
    """
    load: dict[int, int] = {}
    for holders in sorted(groups, key=lambda h: (len(h), h)):
        # By needer, so that each receives from few senders.
        demands = sorted(groups[holders])
        quotas = _even_quotas(holders, load, sum(d.num_bytes for d in demands))
        for sender, demand in _assign_group(demands, quotas, min_cut_bytes):
            load[sender] = load.get(sender, 0) + demand.num_bytes
            yield sender, demand


def busiest_bound(totals: Mapping[Workers, int]) -> int:
    """Lower bound on the bytes of the busiest sender under any choice of senders.

    Demands that only the members of a set can serve are at best shared evenly among them.

    Args:
        totals: workers that hold regions → bytes of the demands that they can serve.
    """
    sets = {frozenset(holders): num_bytes for holders, num_bytes in totals.items()}
    bounds = (
        -(-sum(n for inner, n in sets.items() if inner <= outer) // len(outer)) for outer in sets
    )
    return max(bounds, default=0)


def _even_quotas(
    holders: Workers, load: Mapping[int, int], num_bytes: int
) -> list[tuple[int, int]]:
    """Quotas (sender, bytes to add) that raise the least busy senders to a common level."""
    by_load = sorted(load.get(h, 0) for h in holders)
    level, left = by_load[0], num_bytes
    for count, upper in enumerate([*by_load[1:], None], 1):
        step = left if upper is None else (upper - level) * count
        if step >= left:
            level += -(-left // count)  # rounded up: the last one may get a little less
            break
        level, left = upper or 0, left - step
    return [(h, level - load.get(h, 0)) for h in holders if level > load.get(h, 0)]


def _assign_group(
    demands: Sequence[RegionDemand], quotas: Sequence[tuple[int, int]], min_cut_bytes: int
) -> Iterator[tuple[int, RegionDemand]]:
    """Assigns runs of demands to each sender until its quota is full; splits a demand at the boundary."""
    senders = iter(quotas)
    sender, left = next(senders)
    num_later = len(quotas) - 1
    for demand in demands:
        rest: RegionDemand | None = demand
        while rest is not None:
            if num_later and rest.num_bytes > left:
                head, rest = _split(rest, left, min_cut_bytes)
            else:
                head, rest = rest, None
            if head is not None:
                yield sender, head
                left -= head.num_bytes
            if rest is not None:
                sender, quota = next(senders)
                left, num_later = left + quota, num_later - 1  # the difference carries over


def _split(
    demand: RegionDemand, num_bytes: int, min_cut_bytes: int
) -> tuple[RegionDemand | None, RegionDemand | None]:
    """Splits a demand by rows after about ``num_bytes``; returns both parts."""
    rows = demand.box.shape[0] if demand.box.shape else 1
    row_bytes = demand.num_bytes // rows
    count = max(0, min(rows, num_bytes // row_bytes))
    if demand.num_bytes < min_cut_bytes:
        count = rows if 2 * num_bytes >= demand.num_bytes else 0
    if count in (0, rows):
        return (demand, None) if count else (None, demand)
    start, stop = demand.box.start[0], demand.box.stop[0]
    head = demand.box.with_range(0, start, start + count)
    tail = demand.box.with_range(0, start + count, stop)
    return (
        demand._replace(box=head, num_bytes=count * row_bytes),
        demand._replace(box=tail, num_bytes=(rows - count) * row_bytes),
    )
