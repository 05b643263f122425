"""Views of records: several sources as one, a range of one, lists. No torch, no file.

``RecordSource`` is what every source of records is to its readers: a length, any record by its number, and
a name for it in messages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol


class RecordSource(Protocol):
    """Records by number, from 0. Reading one costs bounded time and memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a record. Raises DataError: it can't be read; IndexError: there is none."""
        ...

    def where(self, index: int) -> str:
        """Returns where the record stands, e.g. ``train.jsonl:17``."""
        ...


@dataclass(frozen=True)
class ListedRecords:
    """Records that were made, and are all held."""

    records: Sequence[dict[str, Any]]
    name: str

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.records[index]

    def where(self, index: int) -> str:
        """Returns their name and the record's number, from 1."""
        return f"record {index + 1} of {self.name}"


@dataclass(frozen=True)
class PartOfRecords:
    """The records at ``numbers`` of another source, in their order."""

    records: RecordSource
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.records[self.numbers[index]]

    def where(self, index: int) -> str:
        """Returns where the record stands in its source."""
        return self.records.where(self.numbers[index])


class JoinedRecords:
    """The records of several sources, one source after another."""

    def __init__(self, parts: Sequence[RecordSource]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, row = locate(self._ends, index)
        return self._parts[part][row]

    def where(self, index: int) -> str:
        """Returns where the record stands in its source."""
        part, row = locate(self._ends, index)
        return self._parts[part].where(row)


def locate(ends: Sequence[int], index: int) -> tuple[int, int]:
    """Returns the part that holds the item ``index``, and the item's number in it.

    Args:
        ends: of each part, the number of items up to its end.
    Raises:
        IndexError: there is no such item.
    """
    if not ends or not 0 <= index < ends[-1]:
        raise IndexError(index)
    part = bisect_right(ends, index)
    return part, index - (ends[part - 1] if part else 0)
