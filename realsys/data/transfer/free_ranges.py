"""First-fit allocator of byte ranges in a memory segment (pure).

The lowest free range is used first, because pages that were used before already exist.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator


class FreeRanges:
    """Free ranges of ``[0, size)``, in bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)] if size else []  # (start, end), ascending, never adjacent

    def allocate(self, num_bytes: int) -> int | None:
        """Allocates ``num_bytes`` (1 or more) and returns their start; None if no free range is
        large enough.
        """
        for i, (start, end) in enumerate(self._free):
            if end - start >= num_bytes:
                rest = (start + num_bytes, end)
                self._free[i : i + 1] = [rest] if rest[0] < end else []
                return start
        return None

    def free(self, start: int, num_bytes: int) -> None:
        """Frees a range that ``allocate`` allocated."""
        insort(self._free, (start, start + num_bytes))
        self._free = list(_joined(self._free))

    @property
    def all_free(self) -> bool:
        """True if nothing is allocated."""
        return self._free == [(0, self.size)]


def _joined(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    (start, end), *others = ranges
    for next_start, next_end in others:
        if next_start > end:
            yield start, end
            start = next_start
        end = next_end
    yield start, end
