"""Splits the rows of a batch into bands by the cache width that they need.

The rows of a band are computed to the width of its longest. If a few rows are much longer than the others,
that dominates a step's attention unless the long ones are adjacent. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cutting:
    """Cost model of bands on a device.

    Attributes:
        block: number of rows that always share a band.
        cells_of_a_band: cells (row times position) that cost as much as one more band's calls, roughly.
    """

    block: int
    cells_of_a_band: int


ON_CPU = Cutting(8, 256)
# Estimated, not measured: one more band is some 200 calls of 6 µs in the 28 layers of a model of 7 billion
# weights, and in these 1.2 ms an H200 reads 100 000 cells of 57 kB.
ON_GPU = Cutting(64, 100_000)


@dataclass(frozen=True)
class Band:
    """Rows ``begin`` … ``end - 1``, which attend up to position ``width``."""

    begin: int
    end: int
    width: int

    @property
    def cells(self) -> int:
        """Rows times positions."""
        return (self.end - self.begin) * self.width


def bands_of(widths: Sequence[int], cutting: Cutting = ON_CPU) -> list[Band]:
    """Splits all rows, in order, into bands.

    Args:
        widths: cache width that each row needs; few cells are wasted if long rows are adjacent.
    """
    bands: list[Band] = []
    for begin in range(0, len(widths), cutting.block):
        own = widths[begin : begin + cutting.block]
        block = Band(begin, begin + len(own), max(own))
        if bands:
            last = bands[-1]
            both = Band(last.begin, block.end, max(last.width, block.width))
            if both.cells <= last.cells + block.cells + cutting.cells_of_a_band:
                bands[-1] = both
                continue
        bands.append(block)
    return bands


def cost(bands: Sequence[Band], cutting: Cutting = ON_CPU) -> int:
    """Cost of the bands, in cells."""
    return sum(band.cells + cutting.cells_of_a_band for band in bands)


class ReorderPolicy:
    """Decides when to sort rows by length: when the waste so far equals the cost of sorting.

    So it never costs more than twice the optimum, without predicting future lengths.
    """

    def __init__(self, cutting: Cutting = ON_CPU) -> None:
        self._wasted, self._cutting = 0, cutting

    def note(self, widths: Sequence[int], bands: Sequence[Band]) -> None:
        """Records that a step was computed in these bands."""
        if len(bands) > 1 or bands[0].width > min(widths):
            best = bands_of(sorted(widths, reverse=True), self._cutting)
            self._wasted += cost(bands, self._cutting) - cost(best, self._cutting)

    def due(self, widths: Sequence[int]) -> bool:
        """True if sorting pays: it copies about as many cells as the rows have."""
        return self._wasted > len(widths) * max(widths, default=0)

    def ordered(self) -> None:
        """Resets the recorded waste after sorting."""
        self._wasted = 0
