"""Shapes (pure): which texts are read together, how a cache grows, which texts it keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from realsys.generation.decoding.decoder import rounded

_LEAST_ROOM = 48  # positions a slot has room for from the beginning: growing copies them all
_LINE = 16  # floats of a processor's cache line
_LONGEST_TO_SHORTEST = 1.25  # of rows that are read together, padded to the longest


def rectangles(
    lengths: Sequence[int], begins: Sequence[int], *, max_tokens: int, max_entries: int
) -> list[list[int]]:
    """Groups rows to prefill together, by index: similar lengths, and bounded tokens with padding.

    Args:
        begins: cached prefix tokens of each, which need cells in addition to those prefilled.
    """
    groups: list[list[int]] = []
    begin = 0  # the largest of the last group
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        group = groups[-1] if groups else []
        num, known = len(group) + 1, max(begin, begins[i])
        fits = bool(group) and num * lengths[i] <= max_tokens
        fits = fits and num * (known + lengths[i]) <= max_entries
        if fits and lengths[i] <= max(lengths[group[0]] * _LONGEST_TO_SHORTEST, 8):
            group.append(i)
            begin = known
        else:
            groups.append([i])
            begin = begins[i]
    return groups


def grown_size(
    have: tuple[int, int],
    need: tuple[int, int],
    *,
    most_rows: int,
    granule: int,
    least_rows: int,
    max_entries: int | None,
) -> tuple[int, int]:
    """Returns the new size of a cache, rows and positions, for the given need.

    At least twice of what there was, where it grows. Where that would be more than ``max_entries``, it is
    as tight as it has to be, in both directions, and what is left of these is shared by the two. A need
    beyond ``max_entries`` is met too: by no more than ``_LINE - 1`` positions a row above it.

    >>> grown_size((64, 48), (3, 1000), most_rows=64, granule=8, least_rows=2, max_entries=4096)
    (3, 1360)
    """
    if need[0] <= have[0] and need[1] <= have[1]:
        return have
    rows, width = have
    if need[0] > rows:
        rows = min(
            max(rounded(need[0], granule), 2 * rows), rounded(max(most_rows, need[0]), granule)
        )
    if need[1] > width:
        # An odd number of lines: those an even number apart would share a few sets of a cache.
        width = rounded(max(need[1], 2 * width, _LEAST_ROOM), _LINE) | _LINE
    if max_entries is None or rows * width <= max_entries:
        return rows, width
    rows, width = max(need[0], least_rows), rounded(need[1], _LINE)
    if (room := max_entries / (rows * width)) > 1:
        rows = max(rows, min(int(rows * math.sqrt(room)), most_rows))
        lines = max_entries // rows // _LINE
        width = max(width, (lines - (lines % 2 == 0)) * _LINE)
    return rows, width


def newest_that_fit(sizes: Sequence[int], most: int) -> list[int]:
    """Returns the indices of texts that remain stored after all were put.

    >>> newest_that_fit([3, 9, 2, 4], 8)
    [2, 3]
    """
    found: list[int] = []
    left = most
    for i in reversed(range(len(sizes))):
        if sizes[i] > most:
            continue  # larger than the whole cache
        if sizes[i] > left:
            break
        found.append(i)
        left -= sizes[i]
    return found[::-1]
