"""Streams of pieces cut into buckets, and the rounds in which a worker sends and gets them (pure).

Round n is the n-th bucket of every pair, for all workers. Each worker walks the rounds in order: it fills
and posts the sends of round n and opens its receives, then takes in what came in round n - 1. Whoever is
furthest behind then never waits for anybody: all others have posted what it takes in, and a pair with room
for two buckets has its room back. So no order of events can block (tests/unit/test_realloc_plan.py).
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
    """A part of a weight that moves."""

    name: str
    box: Box


@dataclass(frozen=True)
class Bucket:
    """What goes in one message.

    Attributes:
        offsets: where each piece begins, in bytes; aligned for its dtype.
        num_bytes: length of the message.
    """

    pieces: tuple[WeightPiece, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @property
    def tag(self) -> int:
        """A checksum of names and boxes: both ends must mean the same."""
        text = ";".join(f"{name}{box.start}{box.stop}" for name, box in self.pieces)
        return zlib.crc32(text.encode())


def cut_into_buckets(
    pieces: Iterable[WeightPiece],
    dtypes: Mapping[str, str],
    *,
    max_bytes: int,
    alone_bytes: int | None = None,
) -> Iterator[Bucket]:
    """Pieces in order, cut where a bucket is full. A single number is never cut.

    Args:
        alone_bytes: larger pieces share no bucket with others, so that a link which can send from the
            weight itself has no need to pack them.
    """
    bucket = _Growing(max_bytes)
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


class _Growing:
    """The bucket that is being filled."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[WeightPiece] = []
        self._offsets: list[int] = []
        self._end = 0

    def _begin(self, itemsize: int) -> int:
        return -(-self._end // itemsize) * itemsize

    def room(self, itemsize: int) -> int:
        """Numbers that still fit; one at least."""
        return max(1, (self._max_bytes - self._begin(itemsize)) // itemsize)

    def is_full_for(self, box: Box, itemsize: int) -> bool:
        """Whether ``box`` should begin a new bucket: no row of it fits, or it would be cut needlessly."""
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
        """The bucket, if anything is in it; the next one begins."""
        if self._pieces:
            yield Bucket(tuple(self._pieces), tuple(self._offsets), self._end)
        self._pieces, self._offsets, self._end = [], [], 0


def first_part(box: Box, max_numel: int) -> tuple[Box, list[Box]]:
    """At most ``max_numel`` numbers of ``box`` by whole rows where one fits, and the rest in order."""
    if box.numel <= max_numel:
        return box, []
    for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        rows = stop - start
        row_numel = box.numel // rows
        if row_numel <= max_numel:
            cut = start + max_numel // row_numel
            return box.with_range(dim, start, cut), [box.with_range(dim, cut, stop)]
        if rows > 1:  # a row does not fit: cut the first one, leave the others for later
            head, rest = first_part(box.with_range(dim, start, start + 1), max_numel)
            return head, [*rest, box.with_range(dim, start + 1, stop)]
    return box, []


def bucket_share(bucket_bytes: int, crowd: int) -> int:
    """A pair's share of the bytes that a worker may have under way in one round."""
    return max(bucket_bytes // max(crowd, 1), 1)


class Round(NamedTuple, Generic[T]):
    """What a worker does in one round, by peer: fill and post, open, then take in what came before."""

    sends: dict[int, T]
    receives: dict[int, T]
    arrivals: dict[int, T]


def rounds(
    outgoing: Mapping[int, Iterator[T]], incoming: Mapping[int, Iterator[T]]
) -> Iterator[Round[T]]:
    """A worker's rounds until all of its streams of messages are through. The last one only takes in."""
    arrivals: dict[int, T] = {}
    while True:
        found = Round(_next_of(outgoing), _next_of(incoming), arrivals)
        if not any(found):
            return
        yield found
        arrivals = found.receives


def _next_of(streams: Mapping[int, Iterator[T]]) -> dict[int, T]:
    """The next message of each stream that is not through."""
    found = {peer: next(stream, None) for peer, stream in streams.items()}
    return {peer: message for peer, message in found.items() if message is not None}
