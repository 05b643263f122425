"""Regions of one weight that target ranks need, with all workers that hold them (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from realsys.weights.layouts.boxes import Box

Workers = tuple[int, ...]  # ascending


class Region(NamedTuple):
    """A region of a weight that the same workers hold and the same workers need."""

    box: Box
    holders: Workers
    receivers: Workers


def regions_of(
    source: Iterable[tuple[int, Sequence[Box]]], target: Iterable[tuple[int, Sequence[Box]]]
) -> list[Region]:
    """Splits the target's boxes wherever the set of holders changes; unheld regions have no holders.

    Args:
        source, target: (worker, its boxes of this weight).
    """
    holders, receivers = _by_box(source), _by_box(target)
    cut = _cut_by_disjoint if _are_disjoint(list(holders)) else _cut_by_any
    return [
        Region(region, held_by, workers)
        for box, workers in sorted(receivers.items())
        for region, held_by in cut(box, holders)
    ]


def subtract(box: Box, hole: Box) -> list[Box]:
    """Returns ``box`` without ``hole`` as disjoint boxes. The two must intersect."""
    found = []
    for dim in range(len(box.start)):
        for start, stop in ((box.start[dim], hole.start[dim]), (hole.stop[dim], box.stop[dim])):
            if start < stop:
                found.append(box.with_range(dim, start, stop))
        start, stop = max(box.start[dim], hole.start[dim]), min(box.stop[dim], hole.stop[dim])
        box = box.with_range(dim, start, stop)
    return found


def _by_box(held: Iterable[tuple[int, Sequence[Box]]]) -> dict[Box, Workers]:
    found: dict[Box, list[int]] = {}
    for worker, boxes in held:
        for box in boxes:
            found.setdefault(box, []).append(worker)
    return {box: tuple(sorted(set(workers))) for box, workers in found.items()}


def _are_disjoint(boxes: Sequence[Box]) -> bool:
    return not any(a.intersection(b) for i, a in enumerate(boxes) for b in boxes[:i])


def _cut_by_disjoint(box: Box, holders: Mapping[Box, Workers]) -> list[tuple[Box, Workers]]:
    """Splits for disjoint source boxes, the usual case: at most one intersects a region."""
    found = [
        (intersection, workers)
        for held, workers in holders.items()
        if (intersection := box.intersection(held))
    ]
    if sum(region.numel for region, _ in found) == box.numel:
        return found
    return _cut_by_any(box, holders)


def _cut_by_any(box: Box, holders: Mapping[Box, Workers]) -> list[tuple[Box, Workers]]:
    """Splits for overlapping source boxes: each divides the regions into its part and the rest."""
    regions: list[tuple[Box, Workers]] = [(box, ())]
    for held, workers in holders.items():
        cut: list[tuple[Box, Workers]] = []
        for region, so_far in regions:
            intersection = region.intersection(held)
            if intersection is None:
                cut.append((region, so_far))
                continue
            cut.append((intersection, tuple(sorted({*so_far, *workers}))))
            cut += [(rest, so_far) for rest in subtract(region, held)]
        regions = cut
    return regions
