"""A generation server's side: fetches a version from its trainers, checks it and makes it whole.

Lists first, then all buckets, several under way from each trainer, in whatever order they come. Needs no
process group and nobody's leave: receivers come and go, any number of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from torch import Tensor

from realsys.api.errors import RealsysError, RemoteError, WaitTimeout
from realsys.data.transfer.sealed_receiver import MessageSink
from realsys.data.transfer.shared_arena import arena_bytes
from realsys.data.transfer.tensor_client import SinkFor, TensorClient
from realsys.data.transfer.transfer_plan import Source
from realsys.transport.codec import ProtocolError
from realsys.weights.sync.adapters import merged
from realsys.weights.sync.assembly import Assembly, BucketLanding, Held, Memory
from realsys.weights.sync.buffer_pool import BufferPool
from realsys.weights.sync.hf_folder import read_folder
from realsys.weights.sync.host_share import HostShare, PartSource, VersionSource, WholeVersion
from realsys.weights.sync.manifest import (
    KEY,
    GivenBucket,
    Manifest,
    WholeWeight,
    decode_manifest,
    giver_of,
)
from realsys.weights.sync.parts import FetchMode, check_parts, way_of

if TYPE_CHECKING:  # a value that is only read
    from realsys.transport.generation_messages import WeightSource

logger = logging.getLogger(__name__)

IN_FLIGHT = 3  # buckets from each trainer: one being written, one on its way, one being read
SILENCE_S = 60.0  # a trainer answers from a thread of its own, also while it computes

E = TypeVar("E", bound=RealsysError)


class _Wanted(NamedTuple):
    """A bucket, who gives it (index of the part), and how it comes."""

    part: int
    given: GivenBucket
    way: FetchMode

    @property
    def row(self) -> str:
        patch = self.given.patch
        return patch.row if self.way is FetchMode.PATCH and patch is not None else self.given.row


class WeightReceiver:
    """Fetches versions of one model, one at a time; any thread may ask.

    Args:
        make_client: endpoints → a client of the tensor servers there.
        silence_s: raises when no trainer has sent anything for so long.
        share: makes this server's place among those of its host, given what fetches a version for them;
            none: it fetches for itself alone.
        check_held: read back what is taken over from an earlier version, and fetch it anew if anybody
            has written to it.
    Attributes:
        num_bytes: bytes that came with all versions so far.
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
        self._held: Held | None = None
        self._newest: WholeVersion | None = None  # for neighbours that ask later
        self._lock = threading.Lock()
        self._share = share(self._for_neighbour) if share is not None else None
        self.num_bytes = 0

    def fetch(self, source: WeightSource, *, timeout_s: float) -> Mapping[str, Tensor]:
        """All weights of a version: whole tensors on the CPU, by their Hugging Face names, adapters merged.

        They are the caller's to read, not to write to: the next version may share some. Their memory
        is used again once nobody has them any more.

        Raises:
            WaitTimeout: a trainer did not send in time. RemoteError: it no longer has this version.
            ProtocolError: what came is damaged or does not make one whole model. CheckpointError: the
                folder is not whole.
        """
        if source.path:
            return read_folder(source.path)
        parts = tuple(PartSource(part.endpoint, part.name) for part in source.parts)
        whole = self._turn(VersionSource(source.version, parts), timeout_s)
        return merged(whole.weights, whole.scale) if whole.scale else whole.weights

    def _turn(self, source: VersionSource, timeout_s: float) -> WholeVersion:
        """A version, from a neighbour or from trainers."""
        deadline_s = time.monotonic() + timeout_s
        self._take_turn(source, timeout_s)
        try:
            share = self._share
            whole = share.from_neighbour(source, deadline_s) if share is not None else None
            if whole is None:
                whole = self._whole(source, deadline_s)
            else:  # its memory is another server's: the next version comes whole, should that one end
                self._held = None
        finally:
            self._lock.release()
        return whole

    def _take_turn(self, source: VersionSource, timeout_s: float) -> None:
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise WaitTimeout(
                f"version {source.version} of the weights: another fetch took over {timeout_s:g} s",
                where="receiving weights",
                fix="fetch one version at a time, or allow for both",
            )

    def _for_neighbour(self, source: VersionSource, timeout_s: float) -> WholeVersion:
        """What another server of this host asks for; an older version than the newest is refused."""
        deadline_s = time.monotonic() + timeout_s
        self._take_turn(source, timeout_s)
        try:
            # Not in a name of its own, which would keep its memory from the next one.
            newest = -1 if self._newest is None else self._newest.source.version
            if newest > source.version:
                raise RemoteError(
                    f"version {newest} has come instead of {source.version}",
                    where="weights of this host",
                    fix="fetch the older one from trainers",
                )
            return self._whole(source, deadline_s)
        finally:
            self._lock.release()

    def _whole(self, source: VersionSource, deadline_s: float) -> WholeVersion:
        """A version from trainers, or the newest once more."""
        if self._newest is not None and self._newest.source == source:
            return self._newest
        self._newest = None  # its memory is the next one's
        try:
            found = self._fetch(source, deadline_s)
        except (WaitTimeout, RemoteError, ProtocolError) as error:
            raise _told(error, source) from error
        if self._share is not None:
            self._newest = found
        return found

    def close(self) -> None:
        """Closes connections and forgets what was kept. A fetch that waits for a trainer ends soon."""
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
        assembly = Assembly(parts[0].weights, kept, self._room(parts[0].weights, kept))
        self._take_over(assembly, parts, wanted)
        coming: dict[Source, _Wanted] = {
            (at[w.part], KEY, (w.row,)): w for w in wanted if w.way is not FetchMode.HELD
        }
        landings: dict[Source, BucketLanding] = {}

        def sink_for(source: Source, num_bytes: int) -> BucketLanding | None:
            number, given, way = coming[source]
            found = assembly.landing(parts[number], given) if way is FetchMode.WHOLE else None
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
            self._held = Held(
                version=source.version, origins=origins, weights=weights, memory=self._memory
            )
        else:
            self._held = None
        return WholeVersion(source=source, weights=weights, scale=parts[0].adapter_scale)

    def _room(self, weights: Sequence[WholeWeight], kept: Collection[str]) -> Memory:
        """Where new weights are put together: where neighbours can read them, if any may."""
        if self._share is None:
            return self._memory
        sizes = [w.num_bytes for w in weights if w.name not in kept]
        try:
            return self._share.arenas.arena(arena_bytes(sizes))
        except OSError as error:
            logger.warning("weights can't be shared with neighbours error=%s", error)
            return self._memory

    def _client_of(self, source: VersionSource) -> tuple[TensorClient, list[int]]:
        """A client, and each part's place among its endpoints. It stays open for the next version."""
        endpoints = tuple(dict.fromkeys(part.endpoint for part in source.parts))
        if self._client is None or self._client[0] != endpoints:
            if self._client is not None:
                self._client[1].close()
            self._client = endpoints, self._make_client(endpoints)
        client = self._client[1]
        names = {part.endpoint: giver_of(part.name) for part in source.parts}
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
        """Single rows as they come; None for one that is where ``sink_for`` wanted it."""
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

    def _wanted(self, parts: Sequence[Manifest]) -> list[_Wanted]:
        """All buckets. What is said to be here is looked at."""
        held, found = self._held, []
        for number, part in enumerate(parts):
            held_version = held.version_from(part) if held else None
            for given in part.buckets:
                way = way_of(given, version=part.version, held_version=held_version)
                if (
                    held
                    and way is FetchMode.HELD
                    and self._check_held
                    and not held.still_has(part, given)
                ):
                    way = FetchMode.WHOLE
                found.append(_Wanted(number, given, way))
        return found

    def _kept(self, parts: Sequence[Manifest], wanted: Sequence[_Wanted]) -> dict[str, Tensor]:
        """Weights of which nothing comes."""
        if self._held is None:
            return {}
        changed = {p.weight for w in wanted if w.way is not FetchMode.HELD for p in w.given.pieces}
        names = [w.name for i, w in enumerate(parts[0].weights) if i not in changed]
        return {name: self._held.weights[name] for name in names}

    def _take_over(
        self, assembly: Assembly, parts: Sequence[Manifest], wanted: Sequence[_Wanted]
    ) -> None:
        """Buckets that are here, as far as they belong to weights of which other parts come."""
        for number, given, way in wanted:
            if self._held and way is FetchMode.HELD and assembly.needs(parts[number], given):
                base = self._held.bytes_of(parts[number], given)
                assembly.put(parts[number], given, base)

    def _put(
        self, assembly: Assembly, parts: Sequence[Manifest], wanted: _Wanted, x: Tensor
    ) -> None:
        part = parts[wanted.part]
        if wanted.way is FetchMode.PATCH and self._held is not None:
            base = self._held.bytes_of(part, wanted.given)
            assembly.patch(part, wanted.given, x, base)
        else:
            assembly.put(part, wanted.given, x)


def _told(error: E, source: VersionSource) -> E:
    """The same error with what it means for the version."""
    givers = ", ".join(giver_of(part.name) for part in source.parts)
    return type(error)(
        f"version {source.version} of the weights (from {givers}) did not come: {error.what}",
        where=error.where,
        fix=f"ask for the newest version, which trainers keep; {error.fix}",
    )
