"""Assembles whole weights from received buckets, on the CPU.

Weights of an earlier version are never written to, since an engine may be reading them: changed weights go
to other memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from realsys.data.tensor_bytes import bytes_of
from realsys.transport.codec import ProtocolError
from realsys.weights.layouts.boxes import Box
from realsys.weights.realloc.buckets import Bucket
from realsys.weights.realloc.views import Views, moves_of, pack, unpack
from realsys.weights.sync.buffer_pool import BufferPool
from realsys.weights.sync.manifest import Manifest, PublishedBucket, WholeWeight
from realsys.weights.sync.patches import apply_patch

_OTHER_CHECKSUM = "their checksum differs from the published one"


@dataclass(frozen=True, kw_only=True)
class HeldVersion:
    """A complete received version, with base weights and adapters separate."""

    version: int
    origins: Mapping[int, str]  # trainer → its publisher
    weights: Mapping[str, Tensor]
    memory: BufferPool

    def version_from(self, part: Manifest) -> int | None:
        """Returns the version if it was received from the publisher of ``part``, else None."""
        return self.version if self.origins.get(part.giver) == part.origin else None

    def bytes_of(self, part: Manifest, given: PublishedBucket) -> Tensor:
        """Reads a bucket's bytes back from the weights: uint8 ``[num_bytes]``, a copy."""
        bucket = part.bucket(given)
        found = self.memory.allocate(given.num_bytes)
        names = {piece.name for piece in bucket.pieces}
        pack(moves_of(_views(self.weights, names), bucket, part.dtypes), found)
        return found

    def still_has(self, part: Manifest, given: PublishedBucket) -> bool:
        """True if a bucket's bytes are unchanged since they were received."""
        return xxh3_64_intdigest(self.bytes_of(part, given).numpy().data) == given.checksum


class Memory(Protocol):
    """Allocator of the memory in which weights are assembled."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Returns uninitialised host memory as uint8 ``[num_bytes]``."""


class Assembly:
    """Weights of one version while they are received.

    Args:
        weights: all weights of the model. kept: those reused unchanged from an earlier version.
    """

    def __init__(
        self, weights: Collection[WholeWeight], kept: Mapping[str, Tensor], memory: Memory
    ) -> None:
        self._dtypes = {w.name: w.dtype for w in weights}
        self.weights: dict[str, Tensor] = {}
        for weight in weights:
            x = kept.get(weight.name)
            self.weights[weight.name] = _new(weight, memory) if x is None else x
        self._views = _views(self.weights, self.weights.keys() - kept.keys())

    def put(self, part: Manifest, given: PublishedBucket, received_bytes: Tensor) -> None:
        """Writes a bucket to its places.

        Raises:
            ProtocolError: its length or checksum differs from the manifest.
        """
        if received_bytes.dtype != torch.uint8 or received_bytes.shape != (given.num_bytes,):
            raise _damaged_error(
                part, given, f"{list(received_bytes.shape)} {received_bytes.dtype} came"
            )
        if xxh3_64_intdigest(received_bytes.numpy().data) != given.checksum:
            raise _damaged_error(part, given, _OTHER_CHECKSUM)
        bucket = self._new_in(part.bucket(given))
        unpack(moves_of(self._views, bucket, self._dtypes), received_bytes, 1.0)

    def sink(self, part: Manifest, given: PublishedBucket) -> BucketSink | None:
        """Returns a sink that writes a bucket in place while it arrives; None if its places are not
        contiguous.
        """
        segments = []
        for piece in given.pieces:
            name = part.weights[piece.weight].name
            if name not in self._views:
                return None
            place = self.weights[name][tuple(map(slice, piece.start, piece.stop))]
            if not place.is_contiguous():
                return None
            segments.append((piece.offset, bytes_of(place)))
        return BucketSink(part, given, segments)

    def patch(
        self, part: Manifest, given: PublishedBucket, received_bytes: Tensor, base: Tensor
    ) -> None:
        """Writes a bucket made by applying the received patch to ``base``, which is modified.
        Raises as ``put``.
        """
        apply_patch(received_bytes.numpy(), base.numpy())
        self.put(part, given, base)

    def needs(self, part: Manifest, given: PublishedBucket) -> bool:
        """True if a bucket has a piece of a weight that is not reused."""
        return any(part.weights[piece.weight].name in self._views for piece in given.pieces)

    def _new_in(self, bucket: Bucket) -> Bucket:
        """Removes the pieces of reused weights from a bucket."""
        pairs = zip(bucket.pieces, bucket.offsets, strict=True)
        new = [(piece, offset) for piece, offset in pairs if piece.name in self._views]
        return Bucket(tuple(p for p, _ in new), tuple(o for _, o in new), bucket.num_bytes)


class BucketSink:
    """Sink that writes a bucket to its places while it arrives, from any thread.

    Args:
        segments: (start in the bucket, bytes of a weight), ascending.
    """

    def __init__(
        self, part: Manifest, given: PublishedBucket, segments: Sequence[tuple[int, memoryview]]
    ) -> None:
        self._part, self._given, self._segments = part, given, segments
        self._starts = [start for start, _ in segments]
        self._checksum = xxh3_64()

    def buffer(self, offset: int, num_bytes: int) -> memoryview | None:
        start, place = self._segments[max(0, bisect_right(self._starts, offset) - 1)]
        begin = offset - start
        inside = begin >= 0 and begin + num_bytes <= len(place)
        return place[begin : begin + num_bytes] if inside else None

    def received(self, offset: int, frame: memoryview) -> None:
        self._checksum.update(frame)
        if self.buffer(offset, len(frame)) is not None:
            return
        for start, place in self._segments:
            begin, end = max(start, offset), min(start + len(place), offset + len(frame))
            if begin < end:
                place[begin - start : end - start] = frame[begin - offset : end - offset]

    def check(self) -> None:
        """Raises ProtocolError if the bytes differ from those published."""
        if self._checksum.intdigest() != self._given.checksum:
            raise _damaged_error(self._part, self._given, _OTHER_CHECKSUM)


def _new(weight: WholeWeight, memory: Memory) -> Tensor:
    dtype: torch.dtype = getattr(torch, weight.dtype)
    return memory.allocate(weight.num_bytes).view(dtype).view(weight.shape)


def _views(weights: Mapping[str, Tensor], names: Collection[str]) -> Views:
    return {name: [(Box.whole(tuple(weights[name].shape)), weights[name])] for name in names}


def _damaged_error(part: Manifest, given: PublishedBucket, why: str) -> ProtocolError:
    names = sorted({part.weights[piece.weight].name for piece in given.pieces})
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return ProtocolError(
        f"{given.num_bytes} bytes of {some} from model_worker/{part.giver} are damaged: {why}",
        where=f"row {given.row}",
        fix="fetch again; if it happens again, check the memory of both hosts",
    )
