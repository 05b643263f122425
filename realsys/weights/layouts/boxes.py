"""Rectangular parts of tensors, which describe what the processes of a parallel layout hold (pure,
no torch).

A *holding* is one process's part of a model: weight name → disjoint boxes of that weight. A *layout*
lists the holding of every process, by parallelism rank. Names and indices are always those of the whole
Hugging Face tensor, so that any two layouts of one model can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Box:
    """A box of half-open index ranges, one per dimension: ``start[i] <= index < stop[i]``."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        """Returns the box of a whole tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent in each dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements; 0 if empty."""
        return math.prod(max(n, 0) for n in self.shape)

    def intersection(self, other: Box) -> Box | None:
        """Returns the intersection, or None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        box = Box(start, stop)
        return box if all(b > a for a, b in zip(start, stop, strict=True)) else None

    def with_range(self, dim: int, start: int, stop: int) -> Box:
        """Returns the box with another range in one dimension."""
        return Box(
            (*self.start[:dim], start, *self.start[dim + 1 :]),
            (*self.stop[:dim], stop, *self.stop[dim + 1 :]),
        )

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Returns the index of this box in a tensor that holds ``outer``, which must contain it."""
        return tuple(
            slice(a - base, b - base)
            for a, b, base in zip(self.start, self.stop, outer.start, strict=True)
        )


Holding = Mapping[str, tuple[Box, ...]]
Layout = tuple[Holding, ...]  # by parallelism rank
