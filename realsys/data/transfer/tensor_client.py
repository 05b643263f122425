"""Fetches tensors from the workers that hold them, everything that a call needs at once.

Used by the compute thread only; blocks with a deadline. Rows from a peer on this host are used in place
(shared_memory.py), others arrive by an encrypted stream (sealed_receiver.py), or with the reply's header
if they are few; dtypes arrive exactly.
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
from realsys.data.tensor_bytes import tensor_from_frames
from realsys.data.transfer.sealed_receiver import (
    MessageSink,
    SealedReceiver,
    StreamResult,
    TensorSink,
)
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
from realsys.transport.codec import MAX_MESSAGE_BYTES, ProtocolError, decode, encode, mismatch_error
from realsys.transport.curve_keys import TrialKeypairs

logger = logging.getLogger(__name__)

CANCEL_POLL_MS = 500  # interval at which a wait checks for cancellation
MAX_STREAMS = 4  # opened to one peer in one call, if connections are cut repeatedly
MAX_REPEATS = 4 * MAX_STREAMS  # requests for one source in one call

SinkFor = Callable[[Source, int], MessageSink | None]  # (source, number of bytes) → sink

WaitingFor = Callable[[str], AbstractContextManager[None]]


def _not_reported(text: str) -> AbstractContextManager[None]:
    return nullcontext()


class TensorClient:
    """Fetches tensors from peers by their index among the model workers.

    Args:
        store: receives the rows that ``fetch_all`` fetches.
        may_share: False disables shared memory.
    Attributes:
        num_bytes: bytes received so far, by ``memory`` and ``socket``.
        names: peer names, for errors.
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
        self._identity = this_process()
        self._no_sharing: set[int] = set()  # workers whose memory this process can't open
        self._maps = SegmentMaps()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._cancelled = False
        self._streams: dict[int, SealedReceiver] = {}  # by peer
        self._stream_of_request: dict[bytes, bytes] = {}  # request → the stream that it named
        self._arrivals: SimpleQueue[StreamResult] = SimpleQueue()
        # Readable while results are queued
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.num_bytes: Counter[str] = Counter()

    def fetch_all(
        self,
        sources: Sequence[Source],
        *,
        timeout_s: float,
        waiting_for: WaitingFor = _not_reported,
    ) -> None:
        """Fetches everything that a call needs into the store.

        All requests are sent before the first reply is awaited; ``timeout_s`` covers all of them.

        Args:
            waiting_for: context entered while no reply has arrived, with ``model_worker/<index>: what``.
        Raises:
            WaitTimeout: names the peers that did not reply. RemoteError: a peer refused, with its reason.
        """
        assert self._store is not None, "made without a store"
        found = self.stream(sources, timeout_s=timeout_s, waiting_for=waiting_for)
        for (_, key, ids), rows in found:
            self._store.put_rows(key, zip(ids, rows, strict=True))

    def fetch(
        self, worker: int, key: str, ids: Sequence[str], *, timeout_s: float
    ) -> list[torch.Tensor]:
        """Fetches the rows of ``ids`` under ``key`` from model worker ``worker``. Raises as
        ``fetch_all``.
        """
        ((_, rows),) = self.stream([(worker, key, tuple(ids))], timeout_s=timeout_s)
        return rows

    def put(self, worker: int, sample: SequenceSample, *, timeout_s: float) -> None:
        """Sends ``sample`` to model worker ``worker``, which stores it; returns when it is stored.

        Raises:
            WaitTimeout: it did not confirm in time. RemoteError: it refused, with its reason.
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
        answered, parts = self._receive(waiting, deadline_s, _not_reported)
        if not answered or isinstance(parts, StreamResult):
            raise WaitTimeout(
                f"model_worker/{worker} did not accept {len(sample.ids)} datapoints in {timeout_s:g} s",
                where=self._endpoints[worker],
                fix=f"see the log of model_worker/{worker}",
            )
        self._header(source, parts, "accept")

    def cancel(self) -> None:
        """Cancels the pending wait, which then raises WaitTimeout. The only method that other
        threads may call.
        """
        self._cancelled = True

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

    def stream(
        self,
        sources: Sequence[Source],
        *,
        timeout_s: float,
        waiting_for: WaitingFor = _not_reported,
        in_flight: int | None = None,
        silence_s: float | None = None,
        sink_for: SinkFor | None = None,
    ) -> Generator[tuple[Source, list[torch.Tensor]], None, None]:
        """Yields each source with its rows as they arrive, prefetching the next source.

        Args:
            timeout_s: for all sources.
            in_flight: maximum number of outstanding requests per peer; None: all.
            waiting_for: as in ``fetch_all``.
            silence_s: raises sooner if no peer has sent anything for this long.
            sink_for: returns the sink for a source that arrives by a stream, which is then yielded without
                rows. If it is or returns None, new memory is used.
        Raises:
            WaitTimeout, RemoteError: as ``fetch_all``.
        """
        later: dict[int, deque[Source]] = {}  # not requested yet, by peer
        for source in sources:
            later.setdefault(source[0], deque()).append(source)
        firsts = [s for of_peer in later.values() for s in _pop(of_peer, in_flight)]
        waiting = {self._request(source): source for source in firsts}
        # Replies whose rows come by stream.
        coming: dict[bytes, tuple[TensorReply, torch.Tensor | None]] = {}
        opened: Counter[int] = Counter()  # number of streams opened, by peer
        earlier_requests: dict[bytes, int] = {}  # request → number of earlier requests for its rows
        deadline_s = time.monotonic() + timeout_s
        try:
            while waiting:
                now_s = time.monotonic()
                wait_s = deadline_s - now_s if silence_s is None else silence_s
                until_s = min(deadline_s, now_s + wait_s)
                request_id, answer = self._receive(waiting, until_s, waiting_for)
                if not request_id:
                    silent_s = timeout_s if until_s == deadline_s else wait_s
                    raise self._timeout_error(list(waiting.values()), silent_s)
                source = waiting[request_id]
                if isinstance(answer, StreamResult):
                    header, whole = coming.pop(request_id)
                    rows = self._arrived(source, header, whole, answer)
                else:
                    header = self._header(source, answer)
                    if header.sealed is not None and self._has_stream(source[0], header):
                        whole = self._expect(source, request_id, header, sink_for)
                        coming[request_id] = header, whole
                        continue
                    if header.offer is not None:
                        self._open(source, request_id, header, opened, until_s)
                    rows = self._rows(source, header, answer[1:])
                del waiting[request_id]
                if rows is None:  # it can't be delivered this way: request it again
                    slot = header.slot
                    back = () if slot is None else ((slot.segment, slot.index),)
                    times = earlier_requests.pop(request_id, 0) + 1
                    if times > MAX_REPEATS:
                        raise self._not_delivered_error(source)
                    new_id = self._request(source, give_back=back)
                    waiting[new_id], earlier_requests[new_id] = source, times
                    continue
                waiting |= {self._request(s): s for s in _pop(later[source[0]], 1)}
                yield source, rows
        finally:
            # Replies that were requested but not consumed would arrive first the next time.
            self._drop_streams({worker for worker, _, _ in waiting.values()})
            self._stream_of_request.clear()

    def _not_delivered_error(self, source: Source) -> ProtocolError:
        worker, key, _ = source
        return mismatch_error(
            f"{self.names[worker]} replied {MAX_REPEATS} times for {key!r} without delivering it",
            where=self._endpoints[worker],
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
        """Opens the offered stream, unless one was opened since the request was sent."""
        worker, key, _ = source
        current = self._streams.get(worker)
        if header.offer is None or (
            current is not None and current.stream != self._stream_of_request.get(request_id)
        ):
            return
        self._drop_streams([worker])
        opened[worker] += 1
        if opened[worker] > MAX_STREAMS:
            raise RemoteError(
                f"the connection by which {self.names[worker]} sends {key!r} was cut "
                f"{MAX_STREAMS} times",
                where=self._endpoints[worker],
                fix=f"check the network between the hosts, and see the log of {self.names[worker]}",
            )
        self._streams[worker] = SealedReceiver(
            urlsplit(self._endpoints[worker]).hostname or "",
            header.offer,
            name=self.names[worker],
            timeout_s=until_s - time.monotonic(),
            arrived=self._on_stream_result,
        )

    def _on_stream_result(self, arrived: StreamResult) -> None:
        """Queues a stream's result for the owner; called from the stream's thread."""
        self._arrivals.put(arrived)
        with suppress(OSError):  # the counter is full
            os.eventfd_write(self._wake, 1)

    def _expect(
        self, source: Source, request_id: bytes, header: TensorReply, sink_for: SinkFor | None
    ) -> torch.Tensor | None:
        """Prepares to receive a reply's rows by stream; returns their memory, None if the caller
        provides it.
        """
        worker, _, ids = source
        sealed = header.sealed
        assert sealed is not None, "checked by the caller"
        dtype, shape = checked_layout(header, num_rows=len(ids), num_bytes=sealed.num_bytes)
        if sink_for is not None and (sink := sink_for(source, sealed.num_bytes)) is not None:
            self._streams[worker].expect(request_id, sealed, sink)
            return None
        try:
            whole = torch.empty(shape, dtype=dtype)
        except (RuntimeError, MemoryError) as error:
            raise ProtocolError(
                f"{sealed.num_bytes} bytes are announced: {error}",
                where=self.names[worker],
                fix="ask for less at a time, or give this worker more memory",
            ) from error
        self._streams[worker].expect(request_id, sealed, TensorSink(whole))
        return whole

    def _arrived(
        self, source: Source, header: TensorReply, whole: torch.Tensor | None, arrived: StreamResult
    ) -> list[torch.Tensor] | None:
        """Returns rows received by a stream; None if it was cut and they must be requested again."""
        worker, key, _ = source
        current = self._streams.get(worker)
        if (
            (arrived.forged or arrived.cut)
            and current is not None
            and current.stream == arrived.stream
        ):
            self._drop_streams([worker])
        if arrived.forged:
            raise ProtocolError(
                f"bytes of {key!r} are not those that {self.names[worker]} sent: changed, left out, "
                "repeated or in another order",
                where=self._endpoints[worker],
                fix="fetch again; if it happens again, something between the two hosts modifies their "
                "traffic (docs/security.md)",
            )
        if arrived.cut:
            logger.warning("tensor stream cut peer=%s error=%s", self.names[worker], arrived.cut)
            return None
        self.num_bytes["socket"] += header.sealed.num_bytes if header.sealed is not None else 0
        return [] if whole is None else list(torch.split(whole, list(header.rows)))

    def _drop_streams(self, workers: Collection[int]) -> None:
        """Closes the streams of these peers; messages in transit are lost."""
        for worker in workers:
            if (stream := self._streams.pop(worker, None)) is not None:
                stream.close()

    def _request(self, source: Source, give_back: tuple[tuple[int, int], ...] = ()) -> bytes:
        worker, key, ids = source
        request_id = uuid.uuid4().bytes
        stream = self._streams[worker].stream if worker in self._streams else b""
        self._stream_of_request[request_id] = stream
        request = TensorRequest(
            trial=self.trial,
            attempt=self.attempt,
            token=self._token,
            key=key,
            ids=tuple(ids),
            host="" if worker in self._no_sharing else self._host,
            give_back=give_back,
            pid=self._identity.pid,
            start_ticks=self._identity.start_ticks,
            stream=stream,
        )
        self._socket(worker).send_multipart([request_id, encode(request)])
        return request_id

    def _receive(
        self, waiting: Mapping[bytes, Source], deadline_s: float, waiting_for: WaitingFor
    ) -> tuple[bytes, list[Any] | StreamResult]:
        """Returns the next awaited reply: its request id, and its frames or the stream's result.

        The id is empty if none arrived before the deadline.
        """
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
                    ready = self._poll(poller, deadline_s)
            if not ready:
                return b"", []
            for socket, _ in ready:
                if socket == self._wake:
                    continue  # handled below: headers are read first while streams continue
                request_id, *parts = socket.recv_multipart(copy=False)
                if request_id.bytes in waiting:
                    return request_id.bytes, parts
                self._drop(sockets[socket], parts)
            if (arrived := self._next_arrival(waiting)) is not None:
                return arrived.request_id, arrived

    def _next_arrival(self, waiting: Collection[bytes]) -> StreamResult | None:
        """Returns the next awaited stream result, None if there is none; the last one resets the event."""
        while True:
            try:
                arrived = self._arrivals.get_nowait()
            except Empty:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                if self._arrivals.empty():
                    return None
                continue
            if arrived.request_id in waiting:
                return arrived

    def _poll(self, poller: zmq.Poller, deadline_s: float) -> list[tuple[Any, int]]:
        """Polls until something is readable; returns nothing at the deadline or after a cancellation."""
        while True:
            left_ms = max(0, int((deadline_s - time.monotonic()) * 1000))
            ready = poller.poll(min(left_ms, CANCEL_POLL_MS))
            if ready or left_ms == 0 or self._cancelled:
                return ready

    def _timeout_error(self, sources: Sequence[Source], timeout_s: float) -> WaitTimeout:
        workers = sorted({worker for worker, _, _ in sources})
        names = ", ".join(self.names[worker] for worker in workers)
        keys = ", ".join(sorted({repr(key) for _, key, _ in sources}))
        when = "before it was cancelled" if self._cancelled else f"in {timeout_s:g} s"
        return WaitTimeout(
            f"{names} did not send {keys} {when}",
            where=", ".join(self._endpoints[worker] for worker in workers),
            fix=f"see the log of {names}",
        )

    def _drop(self, worker: int, parts: Sequence[Any]) -> None:
        """Discards a late reply to a cancelled request, freeing its slot if it has one."""
        try:
            header: TensorReply = decode(parts[0].bytes, TensorReply) if parts else TensorReply()
            if header.slot is not None:
                self._maps.rows(worker, header.slot)  # freed immediately
        except (RealsysError, OSError) as error:
            logger.warning("late reply not readable peer=model_worker/%d %s", worker, error)

    def _header(self, source: Source, parts: Sequence[Any], verb: str = "send") -> TensorReply:
        worker, key, _ = source
        if not parts:
            raise mismatch_error("a reply without a header arrived", where=self.names[worker])
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
        """Returns a reply's rows; None if its memory can't be opened or they come by a stream."""
        worker, _, ids = source
        slot = header.slot
        if header.sealed is not None or header.offer is not None:
            return None
        num_bytes = sum(map(len, frames)) if slot is None else slot.num_bytes
        dtype, shape = checked_layout(header, num_rows=len(ids), num_bytes=num_bytes)
        if slot is None:
            whole = tensor_from_frames(dtype, shape, [frame.buffer for frame in frames])
        else:
            if worker in self._no_sharing or not self._host:
                raise ProtocolError(
                    "rows arrived in shared memory although frames were requested",
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
            socket.sndhwm = 0  # unlimited: sending a request must never block
            socket.maxmsgsize = MAX_MESSAGE_BYTES
            connect(socket, self._endpoints[worker])
            self._sockets[worker] = socket
        return self._sockets[worker]


def _pop(sources: deque[Source], count: int | None) -> list[Source]:
    """Removes and returns the next ``count`` sources, or all."""
    return [sources.popleft() for _ in range(len(sources) if count is None else count) if sources]
