"""The order of a mixture: which record of which source an item of an epoch is (pure, no torch).

Everything follows from the sources' sizes and weights, so a run that goes on after a kill, and every worker
for itself, finds the same record at the same index.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from fractions import Fraction


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
    """
    if not weights and temperature == 1.0:
        return dict(sizes)
    shares = {
        name: Fraction(repr(weights.get(name, 1.0) if weights else size ** (1 / temperature)))
        for name, size in sizes.items()
    }
    unit = max(size / shares[name] for name, size in sizes.items())
    return {name: round(unit * share) for name, share in shares.items()}


def place(items: Mapping[str, int], index: int) -> tuple[str, int]:
    """Returns the source of item ``index`` of an epoch, and the item's number among that source's.

    Sources take turns in their proportions: item k of n stands at (2k + 1) / 2n of the epoch.

    Raises:
        IndexError: the epoch has no such item.
    """
    if not 0 <= index < sum(items.values()):
        raise IndexError(index)
    for name, own in items.items():
        number = bisect_left(range(own), index, key=lambda k, at=name: _rank(items, at, k))  # type: ignore[misc]
        if number < own and _rank(items, name, number) == index:
            return name, number
    raise IndexError(index)


def _rank(items: Mapping[str, int], name: str, number: int) -> int:
    """Counts the items before item ``number`` of source ``name``; of equals the first source's."""
    rank, own, is_earlier = number, items[name], True
    for other, count in items.items():
        if other == name:
            is_earlier = False
            continue
        # Those with (2k + 1) / 2 count <= or < (2 number + 1) / 2 own.
        over = (2 * number + 1) * count - own
        rank += max(over // (2 * own) + 1 if is_earlier else -(-over // (2 * own)), 0)
    return rank
