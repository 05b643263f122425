"""Fetches tensors from the workers that have them, all that a call needs at once.

Used by the compute thread only; blocks with a deadline. Rows from a peer of this host are used where the
peer wrote them (shared_memory.py), others arrive by a sealed stream (sealed_receiver.py), or with the
answer's header where they are few; dtypes arrive exact.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import torch
import zmq

from realsys.api.errors import RealsysError, RemoteError, WaitTimeout
from realsys.data.sequence_sample import SequenceSample
from realsys.data.tensor_bytes import joined
from realsys.data.transfer.sealed_receiver import Arrived, Landing, SealedReceiver, WholeLanding
from realsys.data.transfer.shared_memory import SegmentMaps, host_name
from realsys.data.transfer.tensor_store import TensorStore
from realsys.data.transfer.transfer_messages import (
    TensorPut,
    TensorReply,
    TensorRequest,
    checked_layout,
    frames_of,
)
from realsys.data.transfer.transfer_plan import Source
from realsys.runtime.process_identity import this_process
from realsys.transport.binding import connect
from realsys.transport.codec import MAX_MESSAGE_BYTES, ProtocolError, decode, encode
from realsys.transport.curve_keys import TrialKeypairs

logger = logging.getLogger(__name__)

LOOK_MS = 500  # how often one who waits looks whether it was given up
MAX_STREAMS = (
    4  # that are opened to one peer in one call: connections may be cut, but not again and again
)
MAX_ASKED_AGAIN = 4 * MAX_STREAMS  # one source in one call

Land = Callable[[Source, int], Landing | None]  # source, bytes → where they go

WaitingFor = Callable[[str], AbstractContextManager[None]]


def _unheard(text: str) -> AbstractContextManager[None]:
    return nullcontext()


class TensorClient:
    """Fetches tensors from peers by their index among the model workers.

    Args:
        store: where ``fetch_all`` puts what came.
        may_share: False: nothing comes through shared memory.
    Attributes:
        num_bytes: bytes that came so far, ``memory`` and ``socket``.
        names: of the peers, for errors.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        trial: str,
        attempt: int,
        token: str = "",
        keypairs: TrialKeypairs,
        store: TensorStore | None = None,
        may_share: bool = True,
    ) -> None:
        self._endpoints, self._keypairs = list(endpoints), keypairs
        self.names = [f"model_worker/{worker}" for worker in range(len(endpoints))]
        self.trial, self.attempt, self._token = trial, attempt, token
        self._store = store
        self._host = host_name() if may_share else ""
        self._me = this_process()
        self._no_sharing: set[int] = set()  # workers whose memory can't be opened from here
        self._maps = SegmentMaps()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._given_up = False
        self._streams: dict[int, SealedReceiver] = {}  # by peer
        self._asked_with: dict[bytes, bytes] = {}  # request → the stream that it named
        self._arrivals: SimpleQueue[Arrived] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable: there are arrivals
        self.num_bytes: Counter[str] = Counter()

    def fetch_all(
        self,
        sources: Sequence[Source],
        *,
        timeout_s: float,
        waiting_for: WaitingFor = _unheard,
    ) -> None:
        """Fetches everything that a call needs into the store.

        All peers are asked before the first answer is awaited; ``timeout_s`` is for all of them.

        Args:
            waiting_for: entered while nothing has come, with ``model_worker/<index>: what``.
        Raises:
            WaitTimeout: names the peers that did not answer. RemoteError: one refused, with its reason.
        """
        assert self._store is not None, "made without a store"
        for (_, key, ids), rows in self._answers(sources, timeout_s, waiting_for):
            self._store.put_rows(key, zip(ids, rows, strict=True))

    def fetch(
        self, worker: int, key: str, ids: Sequence[str], *, timeout_s: float
    ) -> list[torch.Tensor]:
        """The rows of ``ids`` under ``key``, from model worker ``worker``. Raises as ``fetch_all``."""
        ((_, rows),) = self._answers([(worker, key, tuple(ids))], timeout_s)
        return rows

    def stream(
        self,
        sources: Sequence[Source],
        *,
        timeout_s: float,
        in_flight: int,
        silence_s: float | None = None,
        land: Land | None = None,
    ) -> Generator[tuple[Source, list[torch.Tensor]], None, None]:
        """Each source with its rows, as they come; stays a source ahead of who works on them.

        Args:
            timeout_s: for all of them. in_flight: so many at most are asked of a peer at a time.
            silence_s: raises sooner, when nothing has come from anybody for so long.
            land: says where what comes by a stream goes; such a source comes without rows: they are there.
                None, or where it gives none: in new memory.
        Raises:
            WaitTimeout, RemoteError: as ``fetch_all``.
        """
        return self._answers(
            sources, timeout_s, in_flight=in_flight, silence_s=silence_s, land=land
        )

    def put(self, worker: int, sample: SequenceSample, *, timeout_s: float) -> None:
        """Gives ``sample`` to model worker ``worker``, which keeps it. Returns when it has it.

        Raises:
            WaitTimeout: it did not say so in time. RemoteError: it refused, with its reason.
        """
        keys = tuple(sorted(sample.keys))
        buffers = [frames_of(sample.data[key].detach().cpu().contiguous()) for key in keys]
        put = TensorPut(
            trial=self.trial,
            attempt=self.attempt,
            token=self._token,
            meta=sample.meta,
            keys=keys,
            frames=tuple(map(len, buffers)),
        )
        source: Source = (worker, ", ".join(keys), sample.ids)
        request_id = uuid.uuid4().bytes
        frames = [frame for of_key in buffers for frame in of_key]
        self._socket(worker).send_multipart([request_id, encode(put), *frames], copy=False)
        waiting = {request_id: source}
        deadline_s = time.monotonic() + timeout_s
        answered, parts = self._receive(waiting, deadline_s, _unheard)
        if not answered or isinstance(parts, Arrived):
            raise WaitTimeout(
                f"model_worker/{worker} did not take {len(sample.ids)} datapoints in {timeout_s:g} s",
                where=self._endpoints[worker],
                fix=f"see the log of model_worker/{worker}",
            )
        self._header(source, parts, "take")

    def give_up(self) -> None:
        """Lets whoever waits here have WaitTimeout soon. Any thread may call it, and nothing else of it."""
        self._given_up = True

    def close(self) -> None:
        """Closes all connections."""
        self._drop_streams(list(self._streams))
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._context.term()
        self._maps.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _answers(
        self,
        sources: Sequence[Source],
        timeout_s: float,
        waiting_for: WaitingFor = _unheard,
        *,
        in_flight: int | None = None,
        silence_s: float | None = None,
        land: Land | None = None,
    ) -> Generator[tuple[Source, list[torch.Tensor]], None, None]:
        later: dict[int, deque[Source]] = {}  # not asked for yet, by peer
        for source in sources:
            later.setdefault(source[0], deque()).append(source)
        firsts = [s for of_peer in later.values() for s in _taken(of_peer, in_flight)]
        waiting = {self._ask(source): source for source in firsts}
        coming: dict[bytes, tuple[TensorReply, torch.Tensor | None]] = {}  # by streams
        opened: Counter[int] = Counter()  # streams, by peer
        again: dict[bytes, int] = {}  # request → how often its rows were asked for before
        deadline_s = time.monotonic() + timeout_s
        try:
            while waiting:
                now_s = time.monotonic()
                patience_s = deadline_s - now_s if silence_s is None else silence_s
                until_s = min(deadline_s, now_s + patience_s)
                request_id, answer = self._receive(waiting, until_s, waiting_for)
                if not request_id:
                    silent_s = timeout_s if until_s == deadline_s else patience_s
                    raise self._late(list(waiting.values()), silent_s)
                source = waiting[request_id]
                if isinstance(answer, Arrived):
                    header, whole = coming.pop(request_id)
                    rows = self._arrived(source, header, whole, answer)
                else:
                    header = self._header(source, answer)
                    if header.sealed is not None and self._has_stream(source[0], header):
                        coming[request_id] = header, self._expect(source, request_id, header, land)
                        continue
                    if header.offer is not None:
                        self._open(source, request_id, header, opened, until_s)
                    rows = self._rows(source, header, answer[1:])
                del waiting[request_id]
                if rows is None:  # it can't come as it should: ask again
                    slot = header.slot
                    back = () if slot is None else ((slot.segment, slot.index),)
                    times = again.pop(request_id, 0) + 1
                    if times > MAX_ASKED_AGAIN:
                        raise self._never_right(source)
                    new_id = self._ask(source, give_back=back)
                    waiting[new_id], again[new_id] = source, times
                    continue
                waiting |= {self._ask(s): s for s in _taken(later[source[0]], 1)}
                yield source, rows
        finally:
            # What was asked for and not taken would come first the next time.
            self._drop_streams({worker for worker, _, _ in waiting.values()})
            self._asked_with.clear()

    def _never_right(self, source: Source) -> ProtocolError:
        worker, key, _ = source
        return ProtocolError(
            f"{self.names[worker]} answered {MAX_ASKED_AGAIN} times for {key!r} in a way in which "
            "nothing can come",
            where=self._endpoints[worker],
            fix="both workers must run the same version of realsys; else report this as a bug",
        )

    # ---- streams ----------------------------------------------------------------------------

    def _has_stream(self, worker: int, header: TensorReply) -> bool:
        found, sealed = self._streams.get(worker), header.sealed
        return found is not None and sealed is not None and found.stream == sealed.stream

    def _open(
        self,
        source: Source,
        request_id: bytes,
        header: TensorReply,
        opened: Counter[int],
        until_s: float,
    ) -> None:
        """Opens the stream that is offered, unless there is one since the request was made."""
        worker, key, _ = source
        mine = self._streams.get(worker)
        if header.offer is None or (
            mine is not None and mine.stream != self._asked_with.get(request_id)
        ):
            return
        self._drop_streams([worker])
        opened[worker] += 1
        if opened[worker] > MAX_STREAMS:
            raise RemoteError(
                f"the connection by which {self.names[worker]} gives {key!r} was cut "
                f"{MAX_STREAMS} times",
                where=self._endpoints[worker],
                fix=f"look at the network between the hosts, and at the log of {self.names[worker]}",
            )
        self._streams[worker] = SealedReceiver(
            urlsplit(self._endpoints[worker]).hostname or "",
            header.offer,
            name=self.names[worker],
            timeout_s=until_s - time.monotonic(),
            arrived=self._tell,
        )

    def _tell(self, arrived: Arrived) -> None:
        """From the thread of a stream."""
        self._arrivals.put(arrived)
        with suppress(OSError):  # more were told than a counter holds
            os.eventfd_write(self._wake, 1)

    def _expect(
        self, source: Source, request_id: bytes, header: TensorReply, land: Land | None
    ) -> torch.Tensor | None:
        """The memory into which the rows of an answer come from now on; None if the caller gave it."""
        worker, _, ids = source
        sealed = header.sealed
        assert sealed is not None, "asked by the caller"
        dtype, shape = checked_layout(header, num_rows=len(ids), num_bytes=sealed.num_bytes)
        if land is not None and (landing := land(source, sealed.num_bytes)) is not None:
            self._streams[worker].expect(request_id, sealed, landing)
            return None
        try:
            whole = torch.empty(shape, dtype=dtype)
        except (RuntimeError, MemoryError) as error:
            raise ProtocolError(
                f"{sealed.num_bytes} bytes are announced: {error}",
                where=self.names[worker],
                fix="ask for less at a time, or give this worker more memory",
            ) from error
        self._streams[worker].expect(request_id, sealed, WholeLanding(whole))
        return whole

    def _arrived(
        self, source: Source, header: TensorReply, whole: torch.Tensor | None, arrived: Arrived
    ) -> list[torch.Tensor] | None:
        """Rows that came by a stream; None where it was cut and they must be asked for again."""
        worker, key, _ = source
        mine = self._streams.get(worker)
        if (arrived.forged or arrived.cut) and mine is not None and mine.stream == arrived.stream:
            self._drop_streams([worker])
        if arrived.forged:
            raise ProtocolError(
                f"bytes of {key!r} are not those that {self.names[worker]} sent: changed, left out, "
                "repeated or in another order",
                where=self._endpoints[worker],
                fix="fetch again; if it comes again, somebody or something between the two hosts "
                "changes what they send (docs/security.md)",
            )
        if arrived.cut:
            logger.warning("tensor stream cut peer=%s error=%s", self.names[worker], arrived.cut)
            return None
        self.num_bytes["socket"] += header.sealed.num_bytes if header.sealed is not None else 0
        return [] if whole is None else list(torch.split(whole, list(header.rows)))

    def _drop_streams(self, workers: Collection[int]) -> None:
        """Closes streams; what was on its way by them does not come."""
        for worker in workers:
            if (stream := self._streams.pop(worker, None)) is not None:
                stream.close()

    def _ask(self, source: Source, give_back: tuple[tuple[int, int], ...] = ()) -> bytes:
        worker, key, ids = source
        request_id = uuid.uuid4().bytes
        stream = self._streams[worker].stream if worker in self._streams else b""
        self._asked_with[request_id] = stream
        request = TensorRequest(
            trial=self.trial,
            attempt=self.attempt,
            token=self._token,
            key=key,
            ids=tuple(ids),
            host="" if worker in self._no_sharing else self._host,
            give_back=give_back,
            pid=self._me.pid,
            start_ticks=self._me.start_ticks,
            stream=stream,
        )
        self._socket(worker).send_multipart([request_id, encode(request)])
        return request_id

    def _receive(
        self, waiting: Mapping[bytes, Source], deadline_s: float, waiting_for: WaitingFor
    ) -> tuple[bytes, list[Any] | Arrived]:
        """The next answer that is waited for: its request's id, and its frames or that it came by a stream;
        none at the deadline."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        sockets = {self._socket(worker): worker for worker, _, _ in waiting.values()}
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        worker, key, _ = next(iter(waiting.values()))
        while True:
            ready = poller.poll(0)
            if not ready:
                with waiting_for(f"model_worker/{worker}: tensors {key}"):
                    ready = self._polled(poller, deadline_s)
            if not ready:
                return b"", []
            for socket, _ in ready:
                if socket == self._wake:
                    continue  # below: streams go on while headers are read first
                request_id, *parts = socket.recv_multipart(copy=False)
                if request_id.bytes in waiting:
                    return request_id.bytes, parts
                self._drop(sockets[socket], parts)
            if (arrived := self._next_arrival(waiting)) is not None:
                return arrived.ticket, arrived

    def _next_arrival(self, waiting: Collection[bytes]) -> Arrived | None:
        """The next one that is waited for. Its flag falls with the last."""
        while True:
            try:
                arrived = self._arrivals.get_nowait()
            except Empty:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                if self._arrivals.empty():
                    return None
                continue
            if arrived.ticket in waiting:
                return arrived

    def _polled(self, poller: zmq.Poller, deadline_s: float) -> list[tuple[Any, int]]:
        """What is there to be read; nothing at the deadline, or once it was given up."""
        while True:
            left_ms = max(0, int((deadline_s - time.monotonic()) * 1000))
            ready = poller.poll(min(left_ms, LOOK_MS))
            if ready or left_ms == 0 or self._given_up:
                return ready

    def _late(self, sources: Sequence[Source], timeout_s: float) -> WaitTimeout:
        workers = sorted({worker for worker, _, _ in sources})
        names = ", ".join(self.names[worker] for worker in workers)
        keys = ", ".join(sorted({repr(key) for _, key, _ in sources}))
        when = "before it was given up" if self._given_up else f"in {timeout_s:g} s"
        return WaitTimeout(
            f"{names} did not send {keys} {when}",
            where=", ".join(self._endpoints[worker] for worker in workers),
            fix=f"see the log of {names}",
        )

    def _drop(self, worker: int, parts: Sequence[Any]) -> None:
        """The late answer to a request that was given up: only its slot, if any, matters."""
        try:
            header: TensorReply = decode(parts[0].bytes, TensorReply) if parts else TensorReply()
            if header.slot is not None:
                self._maps.rows(worker, header.slot)  # let go of at once
        except (RealsysError, OSError) as error:
            logger.warning("late answer not understood peer=model_worker/%d %s", worker, error)

    def _header(self, source: Source, parts: Sequence[Any], verb: str = "give") -> TensorReply:
        worker, key, _ = source
        if not parts:
            raise ProtocolError(
                "an answer without a header came",
                where=self.names[worker],
                fix="both workers must run the same version of realsys; else report this as a bug",
            )
        header: TensorReply = decode(parts[0].bytes, TensorReply)
        if header.error:
            raise RemoteError(
                f"{self.names[worker]} did not {verb} {key!r}: {header.error}",
                where=self._endpoints[worker],
                fix="see that worker's log",
            )
        return header

    def _rows(
        self, source: Source, header: TensorReply, frames: Sequence[Any]
    ) -> list[torch.Tensor] | None:
        """The rows of an answer; None where its memory can't be opened, or it has none yet but a stream."""
        worker, _, ids = source
        slot = header.slot
        if header.sealed is not None or header.offer is not None:
            return None
        num_bytes = sum(map(len, frames)) if slot is None else slot.num_bytes
        dtype, shape = checked_layout(header, num_rows=len(ids), num_bytes=num_bytes)
        if slot is None:
            whole = joined(dtype, shape, [frame.buffer for frame in frames])
        else:
            if worker in self._no_sharing or not self._host:
                raise ProtocolError(
                    "rows came in memory to one who asked for frames",
                    where=self.names[worker],
                    fix="report this as a bug",
                )
            try:
                whole = self._maps.rows(worker, slot).view(dtype).view(shape)
            except OSError as error:
                logger.warning("memory not shared peer=model_worker/%d error=%s", worker, error)
                self._no_sharing.add(worker)
                return None
            self._maps.keep_only(worker, header.segments)
        self.num_bytes["socket" if slot is None else "memory"] += num_bytes
        return list(torch.split(whole, list(header.rows)))

    def _socket(self, worker: int) -> zmq.Socket[bytes]:
        if worker not in self._sockets:
            socket = self._context.socket(zmq.DEALER)
            socket.curve_serverkey = self._keypairs.server_public
            socket.curve_publickey = self._keypairs.client_public
            socket.curve_secretkey = self._keypairs.client_secret
            socket.sndhwm = 0  # however many requests: asking must not wait for an answer
            socket.maxmsgsize = MAX_MESSAGE_BYTES
            connect(socket, self._endpoints[worker])
            self._sockets[worker] = socket
        return self._sockets[worker]


def _taken(sources: deque[Source], count: int | None) -> list[Source]:
    """The next ``count`` of them, or all; they are gone from there."""
    return [sources.popleft() for _ in range(len(sources) if count is None else count) if sources]
