"""Manifest of one trainer's part of a version, sent before the bytes (pure, no torch).

A manifest is msgpack of the types below, validated when decoded: it gives every piece's place in the whole
weight and in a bucket's bytes, and each bucket's checksum. Row names are those in the trainer's tensor
store; an unchanged bucket keeps the row of the version in which it last changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from realsys.models.shape import DTYPE_BYTES
from realsys.transport.codec import decode, encode, mismatch_error
from realsys.weights.layouts.boxes import Box
from realsys.weights.realloc.buckets import Bucket, WeightPiece

KEY = "weights"  # key in the tensor store, of manifests and buckets


class WholeWeight(msgspec.Struct, frozen=True, array_like=True):
    """A weight of the model, and the dtype in which it is sent."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size of the whole weight in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class PublishedPiece(msgspec.Struct, frozen=True, array_like=True):
    """A box of a weight (by its index in the manifest), and its offset in the bucket."""

    weight: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: int


class Patch(msgspec.Struct, frozen=True, array_like=True):
    """A row that turns the bucket of version ``base`` into this one (patches.py)."""

    row: str
    base: int
    num_bytes: int


class PublishedBucket(msgspec.Struct, frozen=True, array_like=True):
    """A published row of bytes. ``changed_in``: the version in which it last changed.

    ``checksum``: XXH3, 64 bits, against bugs and broken memory; transport encrypts against attackers.
    """

    row: str
    num_bytes: int
    checksum: int
    changed_in: int
    pieces: tuple[PublishedPiece, ...]
    patch: Patch | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer's part of a version.

    Attributes:
        origin: identifies the publisher's incarnation; after a restart nothing earlier is valid.
        giver: this trainer's index among the model workers. givers: indices of all with a part.
        adapter_scale: alpha / rank; 0 if the model has no adapters.
        keep: the next version may build on this one, so a receiver should keep it.
    """

    model: str
    version: int
    origin: str
    giver: int
    givers: tuple[int, ...]
    weights: tuple[WholeWeight, ...]
    buckets: tuple[PublishedBucket, ...]
    adapter_scale: float = 0.0
    keep: bool = False

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtype of each weight, by name."""
        return {w.name: w.dtype for w in self.weights}

    def bucket(self, given: PublishedBucket) -> Bucket:
        """Returns a bucket with the names of its pieces."""
        pieces = (
            WeightPiece(self.weights[p.weight].name, Box(p.start, p.stop)) for p in given.pieces
        )
        return Bucket(tuple(pieces), tuple(p.offset for p in given.pieces), given.num_bytes)


def manifest_name(model: str, version: int, worker: int) -> str:
    """Returns the row name of a trainer's manifest, a prefix of its buckets' row names."""
    return f"{model}/{version}/{worker}"


def trainer_of(name: str) -> str:
    """Returns the worker in a ``manifest_name`` for messages; ``name`` itself if it is none."""
    worker = name.rpartition("/")[2]
    return f"model_worker/{worker}" if worker.isdecimal() else name


def published_pieces(bucket: Bucket, index: dict[str, int]) -> tuple[PublishedPiece, ...]:
    """Describes a bucket's pieces for a manifest. ``index``: weight → its index in the manifest."""
    return tuple(
        PublishedPiece(index[piece.name], piece.box.start, piece.box.stop, offset)
        for piece, offset in zip(bucket.pieces, bucket.offsets, strict=True)
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Encodes a manifest. Raises ProtocolError if it exceeds the message size."""
    return encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """Decodes and validates a manifest.

    Raises:
        ProtocolError: it is not a manifest, or is inconsistent.
    """
    manifest: Manifest = decode(data, Manifest)
    if problem := next(_problems(manifest), ""):
        raise mismatch_error(
            f"the manifest of {manifest.model[:80]!r} is inconsistent: {problem}",
            where="receiving weights",
        )
    return manifest


def _problems(manifest: Manifest) -> Iterator[str]:
    names = [w.name for w in manifest.weights]
    if len(set(names)) != len(names):
        yield "a weight is named twice"
    for weight in manifest.weights:
        if weight.dtype not in DTYPE_BYTES:
            yield f"{weight.name} has dtype {weight.dtype[:40]!r}"
        if min(weight.shape, default=1) < 1:
            yield f"{weight.name} has shape {weight.shape}"
    if manifest.version < 0 or manifest.giver not in manifest.givers:
        yield f"version {manifest.version} of worker {manifest.giver} of {manifest.givers}"
    for number, bucket in enumerate(manifest.buckets):
        for problem in _problems_of(bucket, manifest):
            yield f"bucket {number}: {problem}"


def _problems_of(bucket: PublishedBucket, manifest: Manifest) -> Iterator[str]:
    if not 0 <= bucket.changed_in <= manifest.version:
        yield f"it changed in version {bucket.changed_in} of {manifest.version}"
    if bucket.patch is not None and not 0 <= bucket.patch.base < bucket.changed_in:
        yield f"it is made from version {bucket.patch.base}"
    end = 0
    for piece in bucket.pieces:
        if not 0 <= piece.weight < len(manifest.weights):
            yield f"weight {piece.weight} of {len(manifest.weights)}"
            return
        weight = manifest.weights[piece.weight]
        if not (
            len(piece.start) == len(piece.stop) == len(weight.shape)
            and all(
                0 <= a < b <= n
                for a, b, n in zip(piece.start, piece.stop, weight.shape, strict=True)
            )
        ):
            yield f"{weight.name} {weight.shape} has no part {piece.start} … {piece.stop}"
            return
        itemsize = DTYPE_BYTES.get(weight.dtype, 1)
        if piece.offset < end or piece.offset % itemsize:
            yield f"the bytes of {weight.name} begin at {piece.offset}"
        end = piece.offset + math.prod(Box(piece.start, piece.stop).shape) * itemsize
    if not bucket.pieces or end != bucket.num_bytes:
        yield f"its pieces have {end} bytes, it has {bucket.num_bytes}"
