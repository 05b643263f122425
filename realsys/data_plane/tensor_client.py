"""Fetches tensors from the workers that have them, all that a call needs at once.

Used by the compute thread only; blocks with a deadline. Rows from a peer of this host are used where the
peer wrote them (shared_memory.py), others arrive in encrypted frames; dtypes arrive exact.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import zmq

from realsys.api.errors import RealsysError, RemoteError, WaitTimeout
from realsys.data_plane.sequence_sample import SequenceSample
from realsys.data_plane.shared_memory import SegmentMaps, host_name
from realsys.data_plane.tensor_bytes import joined
from realsys.data_plane.tensor_store import TensorStore
from realsys.data_plane.transfer_messages import (
    TensorPut,
    TensorReply,
    TensorRequest,
    checked_layout,
    frames_of,
)
from realsys.data_plane.transfer_plan import Source
from realsys.name_resolve.process_identity import this_process
from realsys.transport.binding import connect
from realsys.transport.codec import MAX_MESSAGE_BYTES, ProtocolError, decode, encode
from realsys.transport.keys import TrialKeypairs

logger = logging.getLogger(__name__)

LOOK_MS = 500  # how often one who waits looks whether it was given up

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
    ) -> Iterator[tuple[Source, list[torch.Tensor]]]:
        """Each source with its rows, as they come; stays a source ahead of who works on them.

        Args:
            timeout_s: for all of them. in_flight: so many at most are asked of a peer at a time.
            silence_s: raises sooner, when nothing has come from anybody for so long.
        Raises:
            WaitTimeout, RemoteError: as ``fetch_all``.
        """
        return self._answers(sources, timeout_s, in_flight=in_flight, silence_s=silence_s)

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
        if not answered:
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
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._context.term()
        self._maps.close()

    def _answers(
        self,
        sources: Sequence[Source],
        timeout_s: float,
        waiting_for: WaitingFor = _unheard,
        *,
        in_flight: int | None = None,
        silence_s: float | None = None,
    ) -> Iterator[tuple[Source, list[torch.Tensor]]]:
        later: dict[int, deque[Source]] = {}  # not asked for yet, by peer
        for source in sources:
            later.setdefault(source[0], deque()).append(source)
        firsts = [s for of_peer in later.values() for s in _taken(of_peer, in_flight)]
        waiting = {self._ask(source): source for source in firsts}
        deadline_s = time.monotonic() + timeout_s
        while waiting:
            now_s = time.monotonic()
            patience_s = deadline_s - now_s if silence_s is None else silence_s
            until_s = min(deadline_s, now_s + patience_s)
            request_id, parts = self._receive(waiting, until_s, waiting_for)
            if not request_id:
                silent_s = timeout_s if until_s == deadline_s else patience_s
                raise self._late(list(waiting.values()), silent_s)
            source = waiting.pop(request_id)
            waiting |= {self._ask(s): s for s in _taken(later[source[0]], 1)}
            header = self._header(source, parts)
            rows = self._rows(source, header, parts[1:])
            if rows is not None:
                yield source, rows
            elif header.slot is not None:  # it can't be opened from here: the same as frames
                slot = (header.slot.segment, header.slot.index)
                waiting[self._ask(source, give_back=(slot,))] = source

    def _ask(self, source: Source, give_back: tuple[tuple[int, int], ...] = ()) -> bytes:
        worker, key, ids = source
        request_id = uuid.uuid4().bytes
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
        )
        self._socket(worker).send_multipart([request_id, encode(request)])
        return request_id

    def _receive(
        self, waiting: Mapping[bytes, Source], deadline_s: float, waiting_for: WaitingFor
    ) -> tuple[bytes, list[Any]]:
        """The next answer that is waited for: its request's id and its frames; none at the deadline."""
        poller = zmq.Poller()
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
                request_id, *parts = socket.recv_multipart(copy=False)
                if request_id.bytes in waiting:
                    return request_id.bytes, parts
                self._drop(sockets[socket], parts)

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
        """The rows of an answer; None where its memory can't be opened and frames must be asked for."""
        worker, _, ids = source
        slot = header.slot
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
