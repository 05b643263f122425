"""Long lists of plain values that are much alike, each said as what differs from the one before (pure).

For plans of thousands of workers (realsys/api/plan.py), whose descriptions differ in an index or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

LIKE_BEFORE = "like the one before, but"


class _OtherShape(Exception):
    """Two values have other keys, lengths or kinds: one can't be said as changes of the other."""


def fold(items: Sequence[Any]) -> list[Any]:
    """Returns the items with ``{LIKE_BEFORE: changes}`` for those that have the shape of the one before.

    ``changes`` has the changed values by key; those of a list by index, as text.
    """
    folded = list(items[:1])
    for before, item in pairwise(items):
        try:
            folded.append({LIKE_BEFORE: _changes(before, item)} if _is_tree(item) else item)
        except _OtherShape:
            folded.append(item)
    return folded


def unfold(folded: Sequence[Any]) -> list[Any]:
    """Returns what ``fold`` was given. What did not change is one object several times: change nothing.

    Raises:
        ValueError: the changes do not fit to the item before.
    """
    items: list[Any] = []
    for item in folded:
        if isinstance(item, dict) and item.keys() == {LIKE_BEFORE}:
            try:
                item = _changed(items[-1], item[LIKE_BEFORE])
            except (LookupError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"item {len(items)} is not like the one before: {error}"
                ) from error
        items.append(item)
    return items


def _is_tree(value: Any) -> bool:
    return isinstance(value, dict | list)


def _changes(before: Any, item: Any) -> dict[str, Any]:
    if isinstance(before, dict) and isinstance(item, dict) and list(before) == list(item):
        pairs = [(key, before[key], value) for key, value in item.items()]
    elif isinstance(before, list) and isinstance(item, list) and len(before) == len(item):
        pairs = [(str(i), *both) for i, both in enumerate(zip(before, item, strict=True))]
    else:
        raise _OtherShape
    changes: dict[str, Any] = {}
    for key, old, new in pairs:
        if old is new:
            continue
        if _is_tree(old) or _is_tree(new):
            if inner := _changes(old, new):
                changes[key] = inner
        elif type(old) is not type(new) or old != new:
            changes[key] = new
    return changes


def _changed(before: Any, changes: dict[str, Any]) -> Any:
    copy: Any = dict(before) if isinstance(before, dict) else list(before)
    for key, change in changes.items():
        place = key if isinstance(copy, dict) else int(key)
        old = copy[place]
        copy[place] = _changed(old, change) if _is_tree(old) else change
    return copy
