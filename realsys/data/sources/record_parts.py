"""Views of records: several sources as one, a range of one, lists. No torch, no file.

``RecordSource`` is what every source of records is to its readers: a length, any record by its number, and
a name for it in messages.

In a mixture (mixed_questions.py) which record of which source an item of an epoch is follows from the
sources' sizes and weights alone: a run that goes on after a kill finds the same record at the same index.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from typing import Any, Protocol

from realsys.api.errors import DataError


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


# ---- mixtures ------------------------------------------------------------------------------------

_BITS = (
    128  # places in an epoch are compared as whole numbers: exact up to 2 ** 64 items of a source
)
# Of a mixture that repeats records; the master holds an epoch's order. Equal weights are never refused.
MOST_ITEMS = 20_000_000


def items_of_epoch(
    sizes: Mapping[str, int], weights: Mapping[str, float], *, temperature: float = 1.0
) -> dict[str, int]:
    """Returns how many items of an epoch each source gives.

    With ``weights`` the numbers are in their proportion (a source without one has 1), and as small as they
    can be with every record of every source in an epoch at least once: a source that is small for its
    weight begins anew. Without weights they are in proportion to ``size ** (1 / temperature)``, thus at
    a temperature of 1 every record comes once.

    Args:
        sizes: numbers of records, at least 1 each.
    Raises:
        DataError: they are more than ``MOST_ITEMS``, and than equal weights could make of the records.
    """
    if not weights and temperature == 1.0:
        return dict(sizes)
    try:
        shares = {
            name: Fraction(repr(weights.get(name, 1.0) if weights else size ** (1 / temperature)))
            for name, size in sizes.items()
        }
    except (OverflowError, ValueError) as error:  # ValueError: infinite
        what = f"{max(sizes.values()):,} records to the power of 1 / {temperature:g} are too large a number"
        raise _too_far_apart(what, {}, sizes, sizes) from error
    unit = max(size / shares[name] for name, size in sizes.items())
    items = {name: round(unit * share) for name, share in shares.items()}
    total, records = sum(items.values()), sum(sizes.values())
    if total > (most := max(MOST_ITEMS, len(sizes) * records)):
        what = f"an epoch would have {Decimal(total):.3g} items, made of {records:,} records"
        raise _too_far_apart(f"{what}; at most {most:,} are possible", weights, items, sizes)
    return items


def _too_far_apart(
    what: str, weights: Mapping[str, float], items: Mapping[str, int], sizes: Mapping[str, int]
) -> DataError:
    if not weights:
        fix = "use a larger one; 1: each record once, above 1: small sources come more often"
        return DataError(what, where="task.temperature", fix=fix)
    by_repeats = sorted(items, key=lambda name: Fraction(items[name], sizes[name]))
    seldom, often = (
        f"task.weights.{name}={weights.get(name, 1.0):g}"
        for name in (by_repeats[0], by_repeats[-1])
    )
    fix = f"bring {often} and {seldom} nearer together"
    return DataError(what, where="task.weights", fix=fix)


def place(items: Mapping[str, int], index: int) -> tuple[str, int]:
    """Returns the source of item ``index`` of an epoch, and the item's number among that source's.

    Sources take turns in their proportions: item k of n stands at (2k + 1) / 2n of the epoch.

    Raises:
        IndexError: the epoch has no such item.
    """
    total, num = sum(items.values()), len(items)
    if not 0 <= index < total:
        raise IndexError(index)
    # Each source has at most half an item more or less than its share before any place in the epoch. So
    # only items near the index come into question: of source n, those at (index + 1 - num / 2) / total to
    # (index + num / 2) / total.
    before, near = 0, []
    for order, (name, own) in enumerate(items.items()):
        first = min(max(0, -((num - 2 * index - 2) * own // total) // 2), own)
        end = min((((2 * index + num) * own) // total + 1) // 2, own)
        before += first
        near += [(((2 * k + 1) << _BITS) // own, order, name, k) for k in range(first, end)]
    _, _, name, number = sorted(near)[index - before]
    return name, number


def epoch_of(id_: str) -> int:
    """Returns the epoch of a datapoint of training, ``<epoch>-<index>``; of any other id the first, 0."""
    epoch, dash, _ = id_.partition("-")
    return int(epoch) if dash and epoch.isdecimal() else 0


def index_of(items: Mapping[str, int], name: str, number: int) -> int:
    """Returns the index at which ``place`` finds item ``number`` of source ``name``."""
    # The number of items before it; of equals the first source's comes first.
    rank, own, is_earlier = number, items[name], True
    for other, count in items.items():
        if other == name:
            is_earlier = False
            continue
        # Those with (2k + 1) / 2 count <= or < (2 number + 1) / 2 own.
        over = (2 * number + 1) * count - own
        rank += max(over // (2 * own) + 1 if is_earlier else -(-over // (2 * own)), 0)
    return rank
