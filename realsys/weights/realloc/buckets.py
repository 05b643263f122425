"""Packs pieces of weights into buckets, and orders the rounds in which workers exchange them (pure).

Round n is the n-th bucket of every pair, for all workers. Each worker goes through the rounds in order: it
fills and posts the sends of round n, posts its receives, then processes the arrivals of round n - 1. The
worker that is furthest behind therefore never waits: all others have posted what it needs, and a pair with
two buffers has one free. So no order of events can deadlock (tests/unit/weights/test_realloc_plan.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from realsys.models.shape import DTYPE_BYTES
from realsys.weights.layouts.boxes import Box

T = TypeVar("T")


class WeightPiece(NamedTuple):
    """A part of a weight to be transferred."""

    name: str
    box: Box


@dataclass(frozen=True)
class Bucket:
    """Pieces that are sent in one message.

    Attributes:
        offsets: start of each piece in bytes, aligned for its dtype.
        num_bytes: length of the message.
    """

    pieces: tuple[WeightPiece, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @property
    def tag(self) -> int:
        """Checksum of names and boxes, equal on both ends."""
        text = ";".join(f"{name}{box.start}{box.stop}" for name, box in self.pieces)
        return zlib.crc32(text.encode())


def cut_into_buckets(
    pieces: Iterable[WeightPiece],
    dtypes: Mapping[str, str],
    *,
    max_bytes: int,
    alone_bytes: int | None = None,
) -> Iterator[Bucket]:
    """Packs pieces in order, splitting them where a bucket is full; a single number is never split.

    Args:
        alone_bytes: larger pieces get a bucket of their own, so that a link which can send from the
            weight's memory need not pack them.
    """
    bucket = _OpenBucket(max_bytes)
    for piece in pieces:
        itemsize = DTYPE_BYTES[dtypes[piece.name]]
        alone = alone_bytes is not None and piece.box.numel * itemsize >= alone_bytes
        if alone:
            yield from bucket.finish()
        rest = [piece.box]
        while rest:
            if bucket.is_full_for(rest[0], itemsize):
                yield from bucket.finish()
            head, tail = first_part(rest[0], bucket.room(itemsize))
            bucket.add(WeightPiece(piece.name, head), itemsize)
            rest[:1] = tail
        if alone:
            yield from bucket.finish()
    yield from bucket.finish()


class _OpenBucket:
    """The bucket that is being filled."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[WeightPiece] = []
        self._offsets: list[int] = []
        self._end = 0

    def _begin(self, itemsize: int) -> int:
        return -(-self._end // itemsize) * itemsize

    def room(self, itemsize: int) -> int:
        """Number of elements that still fit, at least one."""
        return max(1, (self._max_bytes - self._begin(itemsize)) // itemsize)

    def is_full_for(self, box: Box, itemsize: int) -> bool:
        """True if ``box`` should start a new bucket: no row of it fits, or it would be split needlessly."""
        begin = self._begin(itemsize)
        if not self._pieces or box.numel * itemsize <= self._max_bytes - begin:
            return False
        row_bytes = box.numel // (box.shape[0] if box.shape else 1) * itemsize
        fits_alone = box.numel * itemsize <= self._max_bytes
        return row_bytes > self._max_bytes - begin or (fits_alone and 2 * begin > self._max_bytes)

    def add(self, piece: WeightPiece, itemsize: int) -> None:
        begin = self._begin(itemsize)
        self._pieces.append(piece)
        self._offsets.append(begin)
        self._end = begin + piece.box.numel * itemsize

    def finish(self) -> Iterator[Bucket]:
        """Yields the bucket if it is not empty, and starts the next one."""
        if self._pieces:
            yield Bucket(tuple(self._pieces), tuple(self._offsets), self._end)
        self._pieces, self._offsets, self._end = [], [], 0


def first_part(box: Box, max_numel: int) -> tuple[Box, list[Box]]:
    """Splits off at most ``max_numel`` elements of ``box``, in whole rows if one fits; returns them
    and the rest.
    """
    if box.numel <= max_numel:
        return box, []
    for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        rows = stop - start
        row_numel = box.numel // rows
        if row_numel <= max_numel:
            cut = start + max_numel // row_numel
            return box.with_range(dim, start, cut), [box.with_range(dim, cut, stop)]
        if rows > 1:  # no whole row fits: split the first one, leave the others for later
            head, rest = first_part(box.with_range(dim, start, start + 1), max_numel)
            return head, [*rest, box.with_range(dim, start + 1, stop)]
    return box, []


def bucket_share(bucket_bytes: int, fan_out: int) -> int:
    """Returns a pair's share of the bytes that a worker may have in flight in one round."""
    return max(bucket_bytes // max(fan_out, 1), 1)


class Round(NamedTuple, Generic[T]):
    """A worker's actions in one round, by peer: sends to fill and post, receives to post, arrivals
    to process.
    """

    sends: dict[int, T]
    receives: dict[int, T]
    arrivals: dict[int, T]


def rounds(
    outgoing: Mapping[int, Iterator[T]], incoming: Mapping[int, Iterator[T]]
) -> Iterator[Round[T]]:
    """Yields a worker's rounds until all its message streams are exhausted; the last only processes
    arrivals.
    """
    arrivals: dict[int, T] = {}
    while True:
        found = Round(_next_of(outgoing), _next_of(incoming), arrivals)
        if not any(found):
            return
        yield found
        arrivals = found.receives


def _next_of(streams: Mapping[int, Iterator[T]]) -> dict[int, T]:
    """Returns the next message of each stream that is not exhausted."""
    found = {peer: next(stream, None) for peer, stream in streams.items()}
    return {peer: message for peer, message in found.items() if message is not None}
