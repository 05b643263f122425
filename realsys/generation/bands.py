"""How much of the cache each row of a batch needs looked at, in a few cuts.

The rows of a band are computed to the width of its longest. Where a few rows are much longer than the
others, that is most of a step's attention; with the long ones side by side it is little. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 8  # rows that always share a band
# Cells (row times position) that cost as much as one more band's calls, roughly.
_CELLS_OF_A_BAND = 256


@dataclass(frozen=True)
class Band:
    """Rows ``begin`` … ``end - 1``, looked at up to position ``width``."""

    begin: int
    end: int
    width: int

    @property
    def cells(self) -> int:
        """Rows times positions."""
        return (self.end - self.begin) * self.width


def bands_of(widths: Sequence[int]) -> list[Band]:
    """Bands that cover all rows in order.

    Args:
        widths: how much each row needs; few cells are wasted if long rows stand together.
    """
    bands: list[Band] = []
    for begin in range(0, len(widths), BLOCK):
        block = Band(begin, min(begin + BLOCK, len(widths)), max(widths[begin : begin + BLOCK]))
        if bands:
            last = bands[-1]
            both = Band(last.begin, block.end, max(last.width, block.width))
            if both.cells <= last.cells + block.cells + _CELLS_OF_A_BAND:
                bands[-1] = both
                continue
        bands.append(block)
    return bands


def cost(bands: Sequence[Band]) -> int:
    """In cells."""
    return sum(band.cells + _CELLS_OF_A_BAND for band in bands)


class Disorder:
    """When to put rows in order of length: when as much has been wasted as that costs.

    So it never costs more than twice what the best choice would have, without a guess at what comes.
    """

    def __init__(self) -> None:
        self._wasted = 0

    def note(self, widths: Sequence[int], bands: Sequence[Band]) -> None:
        """A step was computed in these bands."""
        if len(bands) > 1 or bands[0].width > min(widths):
            self._wasted += cost(bands) - cost(bands_of(sorted(widths, reverse=True)))

    def due(self, widths: Sequence[int]) -> bool:
        """Whether ordering pays: it copies about as many cells as the rows have."""
        return self._wasted > len(widths) * max(widths, default=0)

    def ordered(self) -> None:
        """It was done."""
        self._wasted = 0
