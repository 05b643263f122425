"""Whole weights put together from buckets, on the CPU.

Weights that an earlier version left are never written to, since an engine may be reading them: what has
changed goes to other memory.
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
from realsys.weights.sync.manifest import GivenBucket, Manifest, WholeWeight
from realsys.weights.sync.patches import apply_patch

_OTHER_CHECKSUM = "their checksum is another than when they were published"


@dataclass(frozen=True, kw_only=True)
class Held:
    """A version that is here whole, as it came: base weights and adapters apart."""

    version: int
    origins: Mapping[int, str]  # giver → its publisher
    weights: Mapping[str, Tensor]
    memory: BufferPool

    def version_from(self, part: Manifest) -> int | None:
        """The version, if what is here came from the publisher of ``part``."""
        return self.version if self.origins.get(part.giver) == part.origin else None

    def bytes_of(self, part: Manifest, given: GivenBucket) -> Tensor:
        """A bucket's bytes, read back from the weights: uint8 ``[num_bytes]``, a copy."""
        bucket = part.bucket(given)
        found = self.memory.allocate(given.num_bytes)
        names = {piece.name for piece in bucket.pieces}
        pack(moves_of(_views(self.weights, names), bucket, part.dtypes), found)
        return found

    def still_has(self, part: Manifest, given: GivenBucket) -> bool:
        """Whether a bucket's bytes are here as they came: nobody has written to these weights."""
        return xxh3_64_intdigest(self.bytes_of(part, given).numpy().data) == given.checksum


class Memory(Protocol):
    """What weights are put together in."""

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 ``[num_bytes]`` in host memory; what is in it is anything."""


class Assembly:
    """The weights of one version while they come.

    Args:
        weights: all of the model. kept: of these, those that are taken over from before as they are.
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

    def put(self, part: Manifest, given: GivenBucket, came: Tensor) -> None:
        """Writes a bucket to its places.

        Raises:
            ProtocolError: it is not as long as was said, or its checksum is another.
        """
        if came.dtype != torch.uint8 or came.shape != (given.num_bytes,):
            raise _damaged(part, given, f"{list(came.shape)} {came.dtype} came")
        if xxh3_64_intdigest(came.numpy().data) != given.checksum:
            raise _damaged(part, given, _OTHER_CHECKSUM)
        bucket = self._new_in(part.bucket(given))
        unpack(moves_of(self._views, bucket, self._dtypes), came, 1.0)

    def landing(self, part: Manifest, given: GivenBucket) -> BucketLanding | None:
        """Where a bucket can be written as it comes; None where its places are not in one piece each."""
        segments = []
        for piece in given.pieces:
            name = part.weights[piece.weight].name
            if name not in self._views:
                return None
            place = self.weights[name][tuple(map(slice, piece.start, piece.stop))]
            if not place.is_contiguous():
                return None
            segments.append((piece.offset, bytes_of(place)))
        return BucketLanding(part, given, segments)

    def patch(self, part: Manifest, given: GivenBucket, came: Tensor, base: Tensor) -> None:
        """Writes a bucket that is ``base`` but for what came. Changes ``base``; raises as ``put``."""
        apply_patch(came.numpy(), base.numpy())
        self.put(part, given, base)

    def needs(self, part: Manifest, given: GivenBucket) -> bool:
        """Whether a bucket has a piece of a weight that is not taken over."""
        return any(part.weights[piece.weight].name in self._views for piece in given.pieces)

    def _new_in(self, bucket: Bucket) -> Bucket:
        """Without the pieces of weights that were taken over."""
        pairs = zip(bucket.pieces, bucket.offsets, strict=True)
        new = [(piece, offset) for piece, offset in pairs if piece.name in self._views]
        return Bucket(tuple(p for p, _ in new), tuple(o for _, o in new), bucket.num_bytes)


class BucketLanding:
    """A bucket on its way to its places, from whatever thread reads it.

    Args:
        segments: (start in the bucket, bytes of a weight), ascending.
    """

    def __init__(
        self, part: Manifest, given: GivenBucket, segments: Sequence[tuple[int, memoryview]]
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
        """Raises ProtocolError when they are not the bytes that were published."""
        if self._checksum.intdigest() != self._given.checksum:
            raise _damaged(self._part, self._given, _OTHER_CHECKSUM)


def _new(weight: WholeWeight, memory: Memory) -> Tensor:
    dtype: torch.dtype = getattr(torch, weight.dtype)
    return memory.allocate(weight.num_bytes).view(dtype).view(weight.shape)


def _views(weights: Mapping[str, Tensor], names: Collection[str]) -> Views:
    return {name: [(Box.whole(tuple(weights[name].shape)), weights[name])] for name in names}


def _damaged(part: Manifest, given: GivenBucket, why: str) -> ProtocolError:
    names = sorted({part.weights[piece.weight].name for piece in given.pieces})
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return ProtocolError(
        f"{given.num_bytes} bytes of {some} from model_worker/{part.giver} are damaged: {why}",
        where=f"row {given.row}",
        fix="fetch again; if it comes again, look at the memory of both hosts",
    )
