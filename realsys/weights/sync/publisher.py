"""A trainer's side: keeps a copy of its part of a version, which servers fetch while it trains on.

Training stops for the copy and its checksums only. What was published is never written to again: a version
that a receiver has begun to fetch stays that version, until it is forgotten.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from realsys.api.errors import InternalError
from realsys.api.model import PipelinableEngine
from realsys.data.transfer.tensor_store import TensorStore
from realsys.weights.realloc.buckets import Bucket
from realsys.weights.realloc.views import Views, check_lossless, moves_of, pack
from realsys.weights.sync.buffer_pool import BufferPool
from realsys.weights.sync.manifest import (
    KEY,
    GivenBucket,
    Manifest,
    Patch,
    WholeWeight,
    encode_manifest,
    given_pieces,
    manifest_name,
)
from realsys.weights.sync.patches import make_patch
from realsys.weights.sync.plan_publish import BUCKET_BYTES, Giving

KEEP_VERSIONS = 2  # a server may be fetching the last one when the next is there
PATCH_SHARE = 0.5  # of a bucket; a longer patch saves too little


@dataclass(frozen=True, kw_only=True)
class PublishedVersion:
    """What this trainer gives of a version.

    Attributes:
        name: of its list; empty if it has nothing to give.
        num_bytes: of all its buckets. new_bytes: of those that changed.
        copy_s: until all weights were copied. seconds: until servers may fetch them.
    """

    name: str = ""
    num_bytes: int = 0
    new_bytes: int = 0
    copy_s: float = 0.0
    seconds: float = 0.0


class _Bucket(NamedTuple):
    """A bucket as it was published last."""

    given: GivenBucket
    x: Tensor


class WeightPublisher:
    """Publishes one model from one worker.

    Args:
        store: behind this worker's tensor server; its own, so that no checkpoint holds weights twice.
        trained: names of all that training changes, where it is not everything (adapters): the rest is
            copied once.
        adapter_scale: alpha / rank.
        may_round: weights are given in a dtype that can't hold them exactly.
        delta: compare with the version before, and give what changed where that is little.
    """

    def __init__(
        self,
        store: TensorStore,
        giving: Giving,
        *,
        model: str,
        worker: int,
        trained: Collection[str] = (),
        adapter_scale: float = 0.0,
        may_round: bool = False,
        delta: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        keep_versions: int = KEEP_VERSIONS,
    ) -> None:
        self._store, self._giving, self._trained = store, giving, frozenset(trained)
        self.model, self.worker = model, worker
        self._scale, self._may_round, self._delta = adapter_scale, may_round, delta
        self._keep_versions = keep_versions
        self._buckets = giving.buckets(worker, apart=self._trained, max_bytes=bucket_bytes)
        index = {w.name: i for i, w in enumerate(giving.weights)}
        dtypes = giving.dtypes
        self._weights = tuple(WholeWeight(w.name, w.shape, dtypes[w.name]) for w in giving.weights)
        self._pieces = [given_pieces(bucket, index) for bucket in self._buckets]
        self._origin = uuid.uuid4().hex
        self._newest = -1
        self._rows: dict[int, set[str]] = {}  # version, oldest first → rows that it refers to
        self._last: list[_Bucket] = []
        self._memory: BufferPool | None = None

    def publish(self, engine: PipelinableEngine, version: int) -> PublishedVersion:
        """Copies what this worker has to give of ``version`` and lets it be fetched.

        Blocks, and writes to no weight. ``engine`` must not train meanwhile; afterwards it may.

        Raises:
            InternalError: a version that is not newer than the last, or views that do not fit the layout.
        """
        if not self._buckets:
            return PublishedVersion()
        if version <= self._newest:
            raise InternalError(
                f"version {version} of {self.model} is to be published after version {self._newest}",
                where=f"model_worker/{self.worker}",
            )
        began_s = time.perf_counter()
        for old in self.versions[: 1 - self._keep_versions or None]:
            self.forget(old)  # before the copy, which then finds its memory warm
        copies = self._snapshot(engine.held_weights(), self._frozen())
        copied_s = time.perf_counter()
        self._last = self._sealed(version, copies)
        self._newest = version
        self._put(version)
        return PublishedVersion(
            name=manifest_name(self.model, version, self.worker),
            num_bytes=sum(b.given.num_bytes for b in self._last),
            new_bytes=sum(b.given.num_bytes for b in self._last if b.given.changed_in == version),
            copy_s=copied_s - began_s,
            seconds=time.perf_counter() - began_s,
        )

    def forget(self, version: int) -> None:
        """Lets go of a version; unknown ones are ignored. Rows that others refer to stay."""
        rows = self._rows.pop(version, set())
        needed = {row for other in self._rows.values() for row in other}
        needed.update(row for bucket in self._last for row in _rows_of(bucket.given))
        self._store.clear(rows - needed)

    @property
    def versions(self) -> tuple[int, ...]:
        """Those that can be fetched, oldest first."""
        return tuple(self._rows)

    def _frozen(self) -> frozenset[int]:
        """Buckets that were published and that training does not change."""
        if not self._last or not self._trained:
            return frozenset()
        return frozenset(
            number
            for number, bucket in enumerate(self._buckets)
            if not self._trained.intersection(piece.name for piece in bucket.pieces)
        )

    @torch.no_grad()
    def _snapshot(self, views: Views, frozen: Collection[int]) -> dict[int, Tensor]:
        """Bucket number → its bytes, in memory that nobody else writes to."""
        wanted = [n for n in range(len(self._buckets)) if n not in frozen]
        on_gpu = any(x.is_cuda for parts in views.values() for _, x in parts)
        if self._memory is None:
            self._memory = BufferPool(pinned=on_gpu)
        staging = None
        if on_gpu:
            most = max((self._buckets[n].num_bytes for n in wanted), default=0)
            device = next(x.device for parts in views.values() for _, x in parts if x.is_cuda)
            staging = torch.empty(most, dtype=torch.uint8, device=device)
        copies = {}
        for number in wanted:
            bucket = self._buckets[number]
            copies[number] = self._memory.allocate(bucket.num_bytes)
            self._fill(copies[number], views, bucket, staging)
        if staging is not None:
            torch.cuda.synchronize(staging.device)
        return copies

    def _fill(self, copy: Tensor, views: Views, bucket: Bucket, staging: Tensor | None) -> None:
        moves = moves_of(views, bucket, self._giving.dtypes)
        if not self._may_round:
            check_lossless(views, {piece.name for piece in bucket.pieces}, self._giving.dtypes)
        if staging is None:
            pack(moves, copy)
            return
        # The GPU does all in order: the next bucket is packed once this one is on its way out.
        packed = staging[: bucket.num_bytes]
        pack(moves, packed)
        copy.copy_(packed, non_blocking=True)

    def _sealed(self, version: int, copies: Mapping[int, Tensor]) -> list[_Bucket]:
        """All buckets of a version; new rows are in the store."""
        name = manifest_name(self.model, version, self.worker)
        found = []
        for number in range(len(self._buckets)):
            last = self._last[number] if self._last else None
            if number not in copies:
                found.append(self._last[number])
            else:
                found.append(self._new(f"{name}/{number}", version, number, copies[number], last))
        return found

    def _new(self, row: str, version: int, number: int, x: Tensor, last: _Bucket | None) -> _Bucket:
        """One bucket of a version, or the last one if it is the same."""
        patch = None
        if self._delta and last is not None:
            most = int(PATCH_SHARE * x.numel())
            changes = make_patch(last.x.numpy(), x.numpy(), max_bytes=most)
            if changes is not None and not changes.size:
                return last
            if changes is not None:
                patch = Patch(f"{row}+", self._newest, changes.size)
                self._store.put_rows(KEY, [(patch.row, torch.from_numpy(changes))])
        self._store.put_rows(KEY, [(row, x)])
        given = GivenBucket(
            row=row,
            num_bytes=x.numel(),
            checksum=xxh3_64_intdigest(x.numpy().data),
            changed_in=version,
            pieces=self._pieces[number],
            patch=patch,
        )
        return _Bucket(given, x)

    def _put(self, version: int) -> None:
        """The list comes last: who finds it finds all rows."""
        manifest = Manifest(
            model=self.model,
            version=version,
            origin=self._origin,
            giver=self.worker,
            givers=tuple(sorted(self._giving.pieces)),
            weights=self._weights,
            buckets=tuple(bucket.given for bucket in self._last),
            adapter_scale=self._scale,
            keep=self._delta or bool(self._trained),
        )
        name = manifest_name(self.model, version, self.worker)
        data = bytearray(encode_manifest(manifest))
        self._store.put_rows(KEY, [(name, torch.frombuffer(data, dtype=torch.uint8))])
        self._rows[version] = {name, *(row for b in manifest.buckets for row in _rows_of(b))}


def _rows_of(bucket: GivenBucket) -> list[str]:
    return [bucket.row] if bucket.patch is None else [bucket.row, bucket.patch.row]
