"""Splits the rows of a batch into buckets by the cache width that they need.

The rows of a bucket are computed to the width of its longest. If a few rows are much longer than
the others, that dominates a step's attention unless the long ones are adjacent. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketCosts:
    """Cost model of buckets on a device.

    Attributes:
        block: number of rows that always share a bucket.
        cells_per_bucket: cells (row times position) that cost as much as one more bucket's calls, roughly.
    """

    block: int
    cells_per_bucket: int


ON_CPU = BucketCosts(8, 256)
# Estimated, not measured: one more bucket is some 200 calls of 6 µs in the 28 layers of a model of
# 7 billion weights, and in these 1.2 ms an H200 reads 100 000 cells of 57 kB.
ON_GPU = BucketCosts(64, 100_000)


@dataclass(frozen=True)
class LengthBucket:
    """Rows ``begin`` … ``end - 1``, which attend up to position ``width``."""

    begin: int
    end: int
    width: int

    @property
    def cells(self) -> int:
        """Rows times positions."""
        return (self.end - self.begin) * self.width


def split_into_buckets(widths: Sequence[int], cutting: BucketCosts = ON_CPU) -> list[LengthBucket]:
    """Splits all rows, in order, into buckets that cost no more than one for all of them.

    Args:
        widths: cache width that each row needs; few cells are wasted if long rows are adjacent.
    """
    buckets: list[LengthBucket] = []
    for begin in range(0, len(widths), cutting.block):
        own = widths[begin : begin + cutting.block]
        block = LengthBucket(begin, begin + len(own), max(own))
        if buckets:
            last = buckets[-1]
            both = LengthBucket(last.begin, block.end, max(last.width, block.width))
            if both.cells <= last.cells + block.cells + cutting.cells_per_bucket:
                buckets[-1] = both
                continue
        buckets.append(block)
    if len(buckets) > 1:  # block by block, what pays only for all together is not seen
        whole = [LengthBucket(0, len(widths), max(widths))]
        return min(buckets, whole, key=lambda found: cost(found, cutting))
    return buckets


def cost(buckets: Sequence[LengthBucket], cutting: BucketCosts = ON_CPU) -> int:
    """Cost of the buckets, in cells."""
    return sum(bucket.cells + cutting.cells_per_bucket for bucket in buckets)


class ReorderPolicy:
    """Decides when to sort rows by length: when the waste so far equals the cost of sorting.

    So it never costs more than twice the optimum, without predicting future lengths.
    """

    def __init__(self, cutting: BucketCosts = ON_CPU) -> None:
        self._wasted, self._cutting = 0, cutting

    def note(self, widths: Sequence[int], buckets: Sequence[LengthBucket]) -> None:
        """Records that a step was computed in these buckets."""
        if len(buckets) > 1 or buckets[0].width > min(widths):
            best = split_into_buckets(sorted(widths, reverse=True), self._cutting)
            self._wasted += cost(buckets, self._cutting) - cost(best, self._cutting)

    def due(self, widths: Sequence[int]) -> bool:
        """True if sorting pays: it copies about as many cells as the rows have."""
        return self._wasted > len(widths) * max(widths, default=0)

    def ordered(self) -> None:
        """Resets the recorded waste after sorting."""
        self._wasted = 0
