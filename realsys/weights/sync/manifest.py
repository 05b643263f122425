"""What one trainer gives of one version: the list that comes before the bytes (pure, no torch).

A list is msgpack of the types below, checked on the way in: a receiver finds in it every piece's place in
the whole weight and in a bucket's bytes, and each bucket's checksum. Names of rows are those in the
trainer's tensor store; a bucket that has not changed keeps the row of the version in which it last did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from realsys.models.shape import DTYPE_BYTES
from realsys.transport.codec import ProtocolError, decode, encode
from realsys.weights.layouts.boxes import Box
from realsys.weights.realloc.buckets import Bucket, WeightPiece

KEY = "weights"  # in the tensor store, of lists and buckets alike


class WholeWeight(msgspec.Struct, frozen=True, array_like=True):
    """A weight of the model, and the dtype in which it travels."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Of the whole weight."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class GivenPiece(msgspec.Struct, frozen=True, array_like=True):
    """A box of a weight (by its index in the list), and where its bytes begin in the bucket."""

    weight: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: int


class Patch(msgspec.Struct, frozen=True, array_like=True):
    """A row that makes the bucket of version ``base`` this one (patches.py)."""

    row: str
    base: int
    num_bytes: int


class GivenBucket(msgspec.Struct, frozen=True, array_like=True):
    """A row of bytes. ``changed_in``: the version since which it is what it is.

    ``checksum``: XXH3, 64 bits: against bugs and broken memory. Against an enemy, transport encrypts.
    """

    row: str
    num_bytes: int
    checksum: int
    changed_in: int
    pieces: tuple[GivenPiece, ...]
    patch: Patch | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer's part of a version.

    Attributes:
        origin: another one whenever a publisher begins anew: then nothing that came before counts.
        giver: this trainer's index among the model workers. givers: of all that give a part.
        adapter_scale: alpha / rank; 0 where the model has no adapters.
        keep: the next version may build on this one, so a receiver should keep what came.
    """

    model: str
    version: int
    origin: str
    giver: int
    givers: tuple[int, ...]
    weights: tuple[WholeWeight, ...]
    buckets: tuple[GivenBucket, ...]
    adapter_scale: float = 0.0
    keep: bool = False

    @property
    def dtypes(self) -> dict[str, str]:
        """Weight → dtype."""
        return {w.name: w.dtype for w in self.weights}

    def bucket(self, given: GivenBucket) -> Bucket:
        """A bucket with the names of its pieces."""
        pieces = (
            WeightPiece(self.weights[p.weight].name, Box(p.start, p.stop)) for p in given.pieces
        )
        return Bucket(tuple(pieces), tuple(p.offset for p in given.pieces), given.num_bytes)


def manifest_name(model: str, version: int, worker: int) -> str:
    """Under which row a trainer's list lies; its buckets' rows begin with it."""
    return f"{model}/{version}/{worker}"


def giver_of(name: str) -> str:
    """The worker of ``manifest_name``, as people know it; ``name`` where it is none."""
    worker = name.rpartition("/")[2]
    return f"model_worker/{worker}" if worker.isdecimal() else name


def given_pieces(bucket: Bucket, index: dict[str, int]) -> tuple[GivenPiece, ...]:
    """A bucket's pieces for a list. ``index``: weight → its place in the list."""
    return tuple(
        GivenPiece(index[piece.name], piece.box.start, piece.box.stop, offset)
        for piece, offset in zip(bucket.pieces, bucket.offsets, strict=True)
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Raises ProtocolError when it is too long for a message."""
    return encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """Reads what ``encode_manifest`` wrote.

    Raises:
        ProtocolError: it is something else, or its numbers do not fit together.
    """
    manifest: Manifest = decode(data, Manifest)
    if problem := next(_problems(manifest), ""):
        raise ProtocolError(
            f"the list of weights of {manifest.model[:80]!r} makes no sense: {problem}",
            where="receiving weights",
            fix="both workers must run the same version of realsys; else report this as a bug",
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


def _problems_of(bucket: GivenBucket, manifest: Manifest) -> Iterator[str]:
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
