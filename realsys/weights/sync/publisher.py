"""Publishes a trainer's part of a version: keeps a copy that servers fetch while training continues.

Training pauses only for the copy and its checksums. Published memory is never written to again: a version
that a receiver is fetching stays unchanged until it is removed.
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
    Manifest,
    Patch,
    PublishedBucket,
    WholeWeight,
    encode_manifest,
    manifest_name,
    published_pieces,
)
from realsys.weights.sync.patches import make_patch
from realsys.weights.sync.plan_publish import BUCKET_BYTES, PublishPlan

KEEP_VERSIONS = 2  # a server may still fetch the last one when the next is published
PATCH_SHARE = 0.5  # share of a bucket; a longer patch saves too little


@dataclass(frozen=True, kw_only=True)
class PublishedVersion:
    """Statistics of this trainer's part of a version.

    Attributes:
        name: name of its manifest; empty if it has no part.
        num_bytes: size of all its buckets. new_bytes: size of those that changed.
        copy_s: seconds until all weights were copied. seconds: until servers can fetch them.
    """

    name: str = ""
    num_bytes: int = 0
    new_bytes: int = 0
    copy_s: float = 0.0
    seconds: float = 0.0


class _Bucket(NamedTuple):
    """A bucket as last published."""

    given: PublishedBucket
    x: Tensor


class WeightPublisher:
    """Publishes one model from one worker.

    Args:
        store: served by this worker's tensor server; separate, so that checkpoints don't hold weights
            twice.
        trained: names of the weights that training changes, if not all (adapters): the rest is copied
            once.
        adapter_scale: alpha / rank.
        may_round: weights are published in a dtype that can't hold them exactly.
        delta: compare with the previous version, and publish only changes if they are small.
    """

    def __init__(
        self,
        store: TensorStore,
        plan: PublishPlan,
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
        self._store, self._plan, self._trained = store, plan, frozenset(trained)
        self.model, self.worker = model, worker
        self._scale, self._may_round, self._delta = adapter_scale, may_round, delta
        self._keep_versions = keep_versions
        self._buckets = plan.buckets(worker, apart=self._trained, max_bytes=bucket_bytes)
        index = {w.name: i for i, w in enumerate(plan.weights)}
        dtypes = plan.dtypes
        self._weights = tuple(WholeWeight(w.name, w.shape, dtypes[w.name]) for w in plan.weights)
        self._pieces = [published_pieces(bucket, index) for bucket in self._buckets]
        self._origin = uuid.uuid4().hex
        self._newest = -1
        self._rows: dict[int, set[str]] = {}  # version, oldest first → rows that it refers to
        self._last: list[_Bucket] = []
        self._memory: BufferPool | None = None

    def publish(self, engine: PipelinableEngine, version: int) -> PublishedVersion:
        """Copies this worker's part of ``version`` and makes it available to servers.

        Blocks and does not modify weights. ``engine`` must not train until it returns.

        Raises:
            InternalError: the version is not newer than the last, or views do not match the layout.
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
            self.forget(old)  # before the copy, which then reuses its memory
        copies = self._snapshot(engine.held_weights(), self._frozen())
        copied_s = time.perf_counter()
        self._last = self._make_buckets(version, copies)
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
        """Removes a version; unknown ones are ignored. Rows used by other versions stay."""
        rows = self._rows.pop(version, set())
        needed = {row for other in self._rows.values() for row in other}
        needed.update(row for bucket in self._last for row in _rows_of(bucket.given))
        self._store.clear(rows - needed)

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that can be fetched, oldest first."""
        return tuple(self._rows)

    def _frozen(self) -> frozenset[int]:
        """Numbers of published buckets that training does not change."""
        if not self._last or not self._trained:
            return frozenset()
        return frozenset(
            number
            for number, bucket in enumerate(self._buckets)
            if not self._trained.intersection(piece.name for piece in bucket.pieces)
        )

    @torch.no_grad()
    def _snapshot(self, views: Views, frozen: Collection[int]) -> dict[int, Tensor]:
        """Copies buckets to private memory; returns bucket number → bytes."""
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
        moves = moves_of(views, bucket, self._plan.dtypes)
        if not self._may_round:
            check_lossless(views, {piece.name for piece in bucket.pieces}, self._plan.dtypes)
        if staging is None:
            pack(moves, copy)
            return
        # The GPU works in order: the next bucket is packed after this one's copy to the host.
        packed = staging[: bucket.num_bytes]
        pack(moves, packed)
        copy.copy_(packed, non_blocking=True)

    def _make_buckets(self, version: int, copies: Mapping[int, Tensor]) -> list[_Bucket]:
        """Makes all buckets of a version, with new rows in the store."""
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
        """Makes a bucket of a version, or returns the last one if it is unchanged."""
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
        given = PublishedBucket(
            row=row,
            num_bytes=x.numel(),
            checksum=xxh3_64_intdigest(x.numpy().data),
            changed_in=version,
            pieces=self._pieces[number],
            patch=patch,
        )
        return _Bucket(given, x)

    def _put(self, version: int) -> None:
        """Stores the manifest last: a server that finds it finds all rows."""
        manifest = Manifest(
            model=self.model,
            version=version,
            origin=self._origin,
            giver=self.worker,
            givers=tuple(sorted(self._plan.pieces)),
            weights=self._weights,
            buckets=tuple(bucket.given for bucket in self._last),
            adapter_scale=self._scale,
            keep=self._delta or bool(self._trained),
        )
        name = manifest_name(self.model, version, self.worker)
        data = bytearray(encode_manifest(manifest))
        self._store.put_rows(KEY, [(name, torch.frombuffer(data, dtype=torch.uint8))])
        self._rows[version] = {name, *(row for b in manifest.buckets for row in _rows_of(b))}


def _rows_of(bucket: PublishedBucket) -> list[str]:
    return [bucket.row] if bucket.patch is None else [bucket.row, bucket.patch.row]
