"""Assigns sequences to data-parallel ranks and to micro-batches.

Both functions take lengths and return lists of indices, so that the master can decide without
tensors. Their results depend on the lengths alone: ranks that see the same lengths cut alike.
Indices inside a part ascend, so a part keeps the order of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from realsys.api.errors import ConfigError, DataError


class Run(NamedTuple):
    """Consecutive sequences of one id of a batch, from ``start`` up to ``stop`` (exclusive)."""

    id_index: int
    start: int
    stop: int


def balanced_partition(
    lengths: Sequence[int], k: int, *, equal_counts: bool = False
) -> list[list[int]]:
    """Splits the indices of ``lengths`` into ``k`` parts of nearly equal total length.

    Longest first, each to the part with the smallest total so far (LPT): the heaviest part is at most
    4/3 - 1/(3k) of the best possible (Graham 1969). With fewer items than parts some are empty,
    otherwise none is.

    Args:
        equal_counts: parts differ by at most one item. Items are assigned in rounds of ``k``, the
            longest of a round to the lightest part, so that two parts with equally many items
            differ by at most the longest item.
    Raises:
        ConfigError: ``k`` is below 1.
        DataError: a length is negative.
    """
    if k < 1:
        raise ConfigError(f"k is {k}", where="balanced_partition", fix="use 1 or more parts")
    order = _longest_first(lengths, where="balanced_partition")
    if equal_counts:
        return _deal_in_rounds(order, lengths, k)
    return _least_loaded(order, lengths, num_parts=k, capacity=None)


def pack_microbatches(
    lengths: Sequence[int], *, max_tokens: int | None, min_num: int = 1
) -> list[list[int]]:
    """Packs the indices of ``lengths`` into at least ``min_num`` parts of at most ``max_tokens`` each.

    First-fit decreasing, which opens few parts. If that gives fewer than ``min_num``, the items are
    spread evenly over ``min_num`` instead. An item longer than ``max_tokens`` is alone in its part.
    No part is empty; they are ordered by their first index.

    Args:
        max_tokens: None for no limit.
    Raises:
        ConfigError: ``min_num`` or ``max_tokens`` is below 1.
        DataError: a length is negative, or there are fewer items than ``min_num``.
    """
    for name, number in (("min_num", min_num), ("max_tokens", max_tokens)):
        if number is not None and number < 1:
            raise ConfigError(f"{name} is {number}", where="pack_microbatches", fix="use 1 or more")
    if len(lengths) < min_num:
        raise DataError(
            f"{len(lengths)} sequences can't fill {min_num} micro-batches",
            where="pack_microbatches",
            fix="lower mb_spec.n_mbs, or use a larger batch a data-parallel rank",
        )
    order = _longest_first(lengths, where="pack_microbatches")
    pieces: list[list[int]] = []
    if max_tokens is not None:
        pieces = _first_fit(order, lengths, capacity=max_tokens)
    if len(pieces) < min_num:
        pieces = _least_loaded(order, lengths, num_parts=min_num, capacity=max_tokens)
    return sorted(pieces)


def runs_within(lengths: Sequence[Sequence[int]], *, max_tokens: int | None) -> list[Run]:
    """Splits the sequences of each id, in order, into runs of at most ``max_tokens``.

    An id that fits is one run, so the common prefix of its sequences is computed once. Otherwise each
    run is filled before the next begins. A sequence longer than the limit is a run of its own.

    Args:
        lengths: lengths of the sequences, by id.
        max_tokens: None for no limit.
    """
    runs = []
    for index, pieces in enumerate(lengths):
        start = filled = 0
        for i, length in enumerate(pieces):
            if max_tokens is not None and i > start and filled + length > max_tokens:
                runs.append(Run(index, start, i))
                start, filled = i, 0
            filled += length
        runs.append(Run(index, start, len(pieces)))
    return runs


def contiguous(count: int, parts: int) -> list[list[int]]:
    """Splits ``range(count)`` into ``parts`` runs whose lengths differ by at most one."""
    bounds = [count * i // parts for i in range(parts + 1)]
    return [list(range(a, b)) for a, b in pairwise(bounds)]


def _longest_first(lengths: Sequence[int], *, where: str) -> list[int]:
    if negative := [(i, n) for i, n in enumerate(lengths) if n < 0]:
        index, length = negative[0]
        raise DataError(f"length {index} is {length}", where=where, fix="pass 0 or more tokens")
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _least_loaded(
    order: Sequence[int], lengths: Sequence[int], *, num_parts: int, capacity: int | None
) -> list[list[int]]:
    """Assigns each item to the lightest part with room; opens a new part if none has room."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for item in order:
        # The count breaks ties, so that items of length 0 don't accumulate while a part is empty.
        lightest = min(range(len(parts)), key=lambda p: (loads[p], len(parts[p]), p))
        full = capacity is not None and loads[lightest] + lengths[item] > capacity
        if full and parts[lightest]:
            lightest = len(parts)
            parts.append([])
            loads.append(0)
        parts[lightest].append(item)
        loads[lightest] += lengths[item]
    return [sorted(part) for part in parts]


def _first_fit(order: Sequence[int], lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    parts: list[list[int]] = []
    loads: list[int] = []
    for item in order:
        for part, load in enumerate(loads):
            if load + lengths[item] <= capacity:
                parts[part].append(item)
                loads[part] += lengths[item]
                break
        else:
            parts.append([item])
            loads.append(lengths[item])
    return [sorted(part) for part in parts]


def _deal_in_rounds(order: Sequence[int], lengths: Sequence[int], k: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(k)]
    loads = [0] * k
    for start in range(0, len(order), k):
        lightest_first = sorted(range(k), key=lambda p: (loads[p], p))
        for part, item in zip(lightest_first, order[start : start + k], strict=False):
            parts[part].append(item)
            loads[part] += lengths[item]
    return [sorted(part) for part in parts]
