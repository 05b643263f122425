"""Fetches a weight version from its trainers for a generation server, verifies and assembles it.

Manifests first, then all buckets, several in flight from each trainer, in any order of arrival. Needs no
process group and no registration: any number of receivers may come and go.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from realsys.api.errors import CheckpointError, RealsysError, RemoteError, WaitTimeout
from realsys.data.transfer.sealed_receiver import MessageSink
from realsys.data.transfer.shared_arena import arena_bytes
from realsys.data.transfer.tensor_client import SinkFor, TensorClient
from realsys.data.transfer.transfer_plan import Source
from realsys.models.hf_directory import weight_files, weight_shapes
from realsys.transport.codec import ProtocolError
from realsys.weights.sync.adapters import merged
from realsys.weights.sync.assembly import Assembly, BucketSink, HeldVersion, Memory
from realsys.weights.sync.buffer_pool import BufferPool
from realsys.weights.sync.host_share import HostShare, PartSource, VersionSource, WholeVersion
from realsys.weights.sync.manifest import (
    KEY,
    Manifest,
    PublishedBucket,
    WholeWeight,
    decode_manifest,
    trainer_of,
)
from realsys.weights.sync.parts import FetchMode, check_parts, choose_fetch_mode

if TYPE_CHECKING:  # imported for its type only
    from realsys.transport.generation_messages import WeightSource

logger = logging.getLogger(__name__)

IN_FLIGHT = 3  # buckets per trainer: one being written, one in flight, one being read
SILENCE_S = 60.0  # a trainer replies from its own thread, even while computing

E = TypeVar("E", bound=RealsysError)


class _WantedBucket(NamedTuple):
    """A bucket to obtain, its trainer (index of the part), and the fetch mode."""

    part: int
    given: PublishedBucket
    mode: FetchMode

    @property
    def row(self) -> str:
        patch = self.given.patch
        return patch.row if self.mode is FetchMode.DELTA and patch is not None else self.given.row


class WeightReceiver:
    """Fetches versions of one model, one at a time. Thread-safe.

    Args:
        make_client: endpoints → a client of the tensor servers there.
        silence_s: time limit without data from any trainer.
        share: makes the host share, given the function that fetches a version for neighbours; None: no
            sharing.
        check_held: verify weights reused from an earlier version, and fetch them again if they were
            written to.
    Attributes:
        num_bytes: bytes received for all versions so far.
    """

    def __init__(
        self,
        make_client: Callable[[tuple[str, ...]], TensorClient],
        *,
        in_flight: int = IN_FLIGHT,
        silence_s: float = SILENCE_S,
        check_held: bool = True,
        share: Callable[[Callable[[VersionSource, float], WholeVersion]], HostShare] | None = None,
    ) -> None:
        self._make_client, self._in_flight = make_client, in_flight
        self._silence_s, self._check_held = silence_s, check_held
        self._memory = BufferPool()
        self._client: tuple[tuple[str, ...], TensorClient] | None = None
        self._held: HeldVersion | None = None
        self._newest: WholeVersion | None = None  # for neighbours that request it later
        self._lock = threading.Lock()
        self._share = share(self._for_neighbour) if share is not None else None
        self.num_bytes = 0

    def fetch(self, source: WeightSource, *, timeout_s: float) -> Mapping[str, Tensor]:
        """Returns all weights of a version: whole CPU tensors by Hugging Face name, adapters merged.

        They are read-only for the caller: the next version may share some. Their memory is reused after
        the last reference is dropped.

        Raises:
            WaitTimeout: a trainer did not send in time. RemoteError: it no longer has this version.
            ProtocolError: the data is damaged or does not form a complete model. CheckpointError: the
                folder is incomplete.
        """
        if source.path:
            return read_folder(source.path)
        parts = tuple(PartSource(part.endpoint, part.name) for part in source.parts)
        whole = self._fetch_shared(VersionSource(source.version, parts), timeout_s)
        return merged(whole.weights, whole.scale) if whole.scale else whole.weights

    def _fetch_shared(self, source: VersionSource, timeout_s: float) -> WholeVersion:
        """Returns a version, from a neighbour or from trainers."""
        deadline_s = time.monotonic() + timeout_s
        self._lock_fetch(source, timeout_s)
        try:
            share = self._share
            whole = share.from_neighbour(source, deadline_s) if share is not None else None
            if whole is None:
                whole = self._whole(source, deadline_s)
            else:  # another server's memory: if that server ends, the next version is fetched whole
                self._held = None
        finally:
            self._lock.release()
        return whole

    def _lock_fetch(self, source: VersionSource, timeout_s: float) -> None:
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise WaitTimeout(
                f"version {source.version} of the weights: another fetch took over {timeout_s:g} s",
                where="receiving weights",
                fix="fetch one version at a time, or allow for both",
            )

    def _for_neighbour(self, source: VersionSource, timeout_s: float) -> WholeVersion:
        """Returns the version that another server of this host requests; refuses older ones than
        the newest.
        """
        deadline_s = time.monotonic() + timeout_s
        self._lock_fetch(source, timeout_s)
        try:
            # Not bound to a local name, which would keep its memory from being reused.
            newest = -1 if self._newest is None else self._newest.source.version
            if newest > source.version:
                raise RemoteError(
                    f"version {newest} arrived instead of {source.version}",
                    where="weights of this host",
                    fix="fetch the older one from trainers",
                )
            return self._whole(source, deadline_s)
        finally:
            self._lock.release()

    def _whole(self, source: VersionSource, deadline_s: float) -> WholeVersion:
        """Fetches a version from trainers, or returns the newest if it is the same."""
        if self._newest is not None and self._newest.source == source:
            return self._newest
        self._newest = None  # frees its memory for the next one
        try:
            found = self._fetch(source, deadline_s)
        except (WaitTimeout, RemoteError, ProtocolError) as error:
            raise _with_version(error, source) from error
        if self._share is not None:
            self._newest = found
        return found

    def close(self) -> None:
        """Closes connections and drops kept weights. A waiting fetch ends soon."""
        if (found := self._client) is not None:
            found[1].cancel()
        if self._share is not None:
            self._share.close()
        with self._lock:
            self._held = self._newest = None
            self._memory.clear()
            if self._client is not None:
                self._client[1].close()
                self._client = None

    def _fetch(self, source: VersionSource, deadline_s: float) -> WholeVersion:
        client, at = self._client_of(source)
        parts = self._manifests(client, at, source, deadline_s)
        check_parts(parts, version=source.version)
        wanted = self._wanted(parts)
        kept = self._kept(parts, wanted)
        assembly = Assembly(parts[0].weights, kept, self._allocator(parts[0].weights, kept))
        self._copy_present(assembly, parts, wanted)
        coming: dict[Source, _WantedBucket] = {
            (at[w.part], KEY, (w.row,)): w for w in wanted if w.mode is not FetchMode.REUSE
        }
        landings: dict[Source, BucketSink] = {}

        def sink_for(source: Source, num_bytes: int) -> BucketSink | None:
            number, given, mode = coming[source]
            found = assembly.sink(parts[number], given) if mode is FetchMode.FULL else None
            if found is None or num_bytes != given.num_bytes:
                return None
            landings[source] = found
            return found

        with closing(self._rows(client, list(coming), deadline_s, sink_for)) as rows:
            for asked, x in rows:
                if x is None:
                    landings.pop(asked).check()
                else:
                    self._put(assembly, parts, coming[asked], x)
        weights = assembly.weights
        if any(part.keep for part in parts):
            origins = {part.giver: part.origin for part in parts}
            self._held = HeldVersion(
                version=source.version, origins=origins, weights=weights, memory=self._memory
            )
        else:
            self._held = None
        return WholeVersion(source=source, weights=weights, scale=parts[0].adapter_scale)

    def _allocator(self, weights: Sequence[WholeWeight], kept: Collection[str]) -> Memory:
        """Returns the allocator for new weights: memory that neighbours can map, if sharing is on."""
        if self._share is None:
            return self._memory
        sizes = [w.num_bytes for w in weights if w.name not in kept]
        try:
            return self._share.arenas.arena(arena_bytes(sizes))
        except OSError as error:
            logger.warning("weights can't be shared with neighbours error=%s", error)
            return self._memory

    def _client_of(self, source: VersionSource) -> tuple[TensorClient, list[int]]:
        """Returns a client, and each part's index among its endpoints. It stays open for the next
        version.
        """
        endpoints = tuple(dict.fromkeys(part.endpoint for part in source.parts))
        if self._client is None or self._client[0] != endpoints:
            if self._client is not None:
                self._client[1].close()
            self._client = endpoints, self._make_client(endpoints)
        client = self._client[1]
        names = {part.endpoint: trainer_of(part.name) for part in source.parts}
        client.names = [names[endpoint] for endpoint in endpoints]
        return client, [endpoints.index(part.endpoint) for part in source.parts]

    def _manifests(
        self, client: TensorClient, at: Sequence[int], source: VersionSource, deadline_s: float
    ) -> list[Manifest]:
        asked = [(at[i], KEY, (part.name,)) for i, part in enumerate(source.parts)]
        with closing(self._rows(client, asked, deadline_s)) as rows:
            found = {who: decode_manifest(x.numpy().tobytes()) for who, x in rows if x is not None}
        return [found[who] for who in asked]

    def _rows(
        self,
        client: TensorClient,
        sources: Sequence[Source],
        deadline_s: float,
        sink_for: SinkFor | None = None,
    ) -> Generator[tuple[Source, Tensor | None], None, None]:
        """Yields single rows as they arrive; None for one that ``sink_for`` received in place."""
        sizes: dict[Source, int] = {}

        def measured(source: Source, num_bytes: int) -> MessageSink | None:
            sizes[source] = num_bytes
            return sink_for(source, num_bytes) if sink_for is not None else None

        stream = client.stream(
            sources,
            timeout_s=max(0.0, deadline_s - time.monotonic()),
            in_flight=self._in_flight,
            silence_s=self._silence_s,
            sink_for=measured if sink_for is not None else None,
        )
        with closing(stream):
            for source, rows in stream:
                x = rows[0] if rows else None
                self.num_bytes += sizes[source] if x is None else x.numel() * x.element_size()
                yield source, x

    def _wanted(self, parts: Sequence[Manifest]) -> list[_WantedBucket]:
        """Lists all buckets with their fetch modes, after verifying those marked as present."""
        held, found = self._held, []
        for number, part in enumerate(parts):
            held_version = held.version_from(part) if held else None
            for given in part.buckets:
                mode = choose_fetch_mode(given, version=part.version, held_version=held_version)
                if (
                    held
                    and mode is FetchMode.REUSE
                    and self._check_held
                    and not held.still_has(part, given)
                ):
                    mode = FetchMode.FULL
                found.append(_WantedBucket(number, given, mode))
        return found

    def _kept(
        self, parts: Sequence[Manifest], wanted: Sequence[_WantedBucket]
    ) -> dict[str, Tensor]:
        """Weights of which nothing must be fetched."""
        if self._held is None:
            return {}
        changed = {
            p.weight for w in wanted if w.mode is not FetchMode.REUSE for p in w.given.pieces
        }
        names = [w.name for i, w in enumerate(parts[0].weights) if i not in changed]
        return {name: self._held.weights[name] for name in names}

    def _copy_present(
        self, assembly: Assembly, parts: Sequence[Manifest], wanted: Sequence[_WantedBucket]
    ) -> None:
        """Copies present buckets into weights of which other parts are fetched."""
        for number, given, mode in wanted:
            if self._held and mode is FetchMode.REUSE and assembly.needs(parts[number], given):
                base = self._held.bytes_of(parts[number], given)
                assembly.put(parts[number], given, base)

    def _put(
        self, assembly: Assembly, parts: Sequence[Manifest], wanted: _WantedBucket, x: Tensor
    ) -> None:
        part = parts[wanted.part]
        if wanted.mode is FetchMode.DELTA and self._held is not None:
            base = self._held.bytes_of(part, wanted.given)
            assembly.patch(part, wanted.given, x, base)
        else:
            assembly.put(part, wanted.given, x)


def _with_version(error: E, source: VersionSource) -> E:
    """Returns the error extended by its consequence for the version."""
    givers = ", ".join(trainer_of(part.name) for part in source.parts)
    return type(error)(
        f"version {source.version} of the weights (from {givers}) did not come: {error.what}",
        where=error.where,
        fix=f"ask for the newest version, which trainers keep; {error.fix}",
    )


# ---- Reads all weights of a Hugging Face directory to the CPU.


def read_folder(path: str) -> Mapping[str, Tensor]:
    """Reads name → whole tensor, in the dtype of the files. Tied weights appear once.

    Raises:
        CheckpointError: names a file that is missing, damaged or still being written.
    """
    weight_shapes(path)  # checks sizes against headers before anything large is read
    found = {}
    names_of: dict[str, list[str]] = {}
    for name, file in weight_files(path).items():
        names_of.setdefault(str(file), []).append(name)
    for file_name, names in names_of.items():
        try:
            with safe_open(file_name, framework="pt") as file:
                for name in names:
                    found[name] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"weights can't be read: {error}",
                where=file_name,
                fix="write the complete directory and rename it before announcing it to servers",
            ) from error
    return found
