"""Measures what a row of an Arrow table takes as Python values, before it is made into such. No torch.

A few bytes of a file can stand for any amount of them: a dictionary's value is named again and again, a
list of nulls has a length alone. So a row is measured first, as a line of a JSONL file is.
"""

from __future__ import annotations

from typing import Any

VALUE_BYTES = 8  # at least, of each value in a list


class UnreadableColumn(ValueError):
    """A column's type can't be measured, so it is not read."""


def unpacked_bytes(array: Any) -> int:
    """Returns the bytes of an Arrow array's values, a dictionary's value counted wherever it is named.

    Raises:
        UnreadableColumn: the array is of views, runs or unions, whose values can overlap.
    """
    from pyarrow import BaseExtensionType, types

    kind, least = array.type, VALUE_BYTES * len(array)
    if isinstance(kind, BaseExtensionType):
        return unpacked_bytes(array.storage)
    if types.is_dictionary(kind):
        return least + _sum(_lengths(array.dictionary).take(array.indices))
    if types.is_struct(kind):
        return least + sum(unpacked_bytes(part) for part in array.flatten())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return least + unpacked_bytes(array.flatten())
    if types.is_map(kind):
        first, last = array.offsets[0].as_py(), array.offsets[len(array)].as_py()
        parts = (array.keys.slice(first, last - first), array.items.slice(first, last - first))
        return least + sum(unpacked_bytes(part) for part in parts)
    if kind.num_fields or types.is_run_end_encoded(kind):
        raise UnreadableColumn(f"columns of type {kind} are not read")
    return least + _sum(_lengths(array))


def _lengths(array: Any) -> Any:
    """Returns the bytes of each value beyond VALUE_BYTES."""
    import pyarrow
    from pyarrow import compute, types

    kind = array.type
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if any(is_text(kind) for is_text in texts):
        return compute.binary_length(array)
    if types.is_string_view(kind) or types.is_binary_view(kind) or kind.num_fields:
        raise UnreadableColumn(f"columns of type {kind} are not read")
    return pyarrow.repeat(pyarrow.scalar(0, "int32"), len(array))  # numbers, dates, nulls


def _sum(lengths: Any) -> int:
    from pyarrow import compute

    return int(compute.sum(lengths).as_py() or 0)
