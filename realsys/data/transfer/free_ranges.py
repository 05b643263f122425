"""Which parts of a segment of memory are free (pure).

First fit at the lowest place: what was used before is used again, and its pages are there already.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator


class FreeRanges:
    """The free bytes of ``[0, size)``. Numbers are bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)] if size else []  # (start, end), ascending, never adjacent

    def take(self, num_bytes: int) -> int | None:
        """Start of ``num_bytes`` (1 or more) that are not free any more; None where none fit."""
        for i, (start, end) in enumerate(self._free):
            if end - start >= num_bytes:
                rest = (start + num_bytes, end)
                self._free[i : i + 1] = [rest] if rest[0] < end else []
                return start
        return None

    def give_back(self, start: int, num_bytes: int) -> None:
        """Frees what ``take`` gave."""
        insort(self._free, (start, start + num_bytes))
        self._free = list(_joined(self._free))

    @property
    def all_free(self) -> bool:
        """Nothing is taken."""
        return self._free == [(0, self.size)]


def _joined(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    (start, end), *others = ranges
    for next_start, next_end in others:
        if next_start > end:
            yield start, end
            start = next_start
        end = next_end
    yield start, end
