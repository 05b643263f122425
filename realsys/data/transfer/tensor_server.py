"""Serves a worker's tensors to its peers from a thread of its own, while the worker computes.

Every reply is a header over CURVE and raw bytes, no pickle: to a peer on this host in memory that both
have mapped (shared_memory.py), to others in an encrypted stream (sealed_sender.py); a few bytes are sent
with the header. The client is tensor_client.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from realsys.api.errors import ClusterError, RealsysError
from realsys.data.transfer.sealed_sender import SealedSender
from realsys.data.transfer.shared_memory import MIN_SHARED_BYTES, SegmentPool, host_name
from realsys.data.transfer.tensor_store import TensorStore
from realsys.data.transfer.transfer_messages import (
    SharedSlot,
    TensorPut,
    TensorReply,
    TensorRequest,
    frames_of,
    header_of,
    sample_of,
)
from realsys.devices.streams import read_beside
from realsys.runtime.event_loop_thread import EventLoopThread
from realsys.transport.authentication import Refusals, SecureRouter
from realsys.transport.binding import bind
from realsys.transport.codec import MAX_MESSAGE_BYTES, ProtocolError, decode, encode
from realsys.transport.curve_keys import TrialKeypairs

logger = logging.getLogger(__name__)

AnyRequest = TensorRequest | TensorPut
MIN_SEALED_BYTES = 64 << 10  # smaller replies are sent with the header
MAX_ERROR_CHARS = 20_000  # an error that quotes a request must not outgrow a message


class TensorServer:
    """Serves a worker's store to its peers. ``start`` returns when ``endpoint`` is known.

    Args:
        published: key → separate store that serves this key; peers can't write to it.
        on_failure: called from the server's thread if it ends without ``stop``, since peers would wait
            for its tensors. ``raise_failure`` then raises the cause.
    """

    def __init__(
        self,
        store: TensorStore,
        *,
        name: str,
        trial: str,
        attempt: int,
        token: str = "",
        keypairs: TrialKeypairs,
        host: str = "127.0.0.1",
        ports: range | None = None,
        published: Mapping[str, TensorStore] | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.trial, self.attempt, self._token = name, trial, attempt, token
        self._on_failure = on_failure
        self._store, self._keypairs = store, keypairs
        self._published = dict(published or {})
        self._pool: SegmentPool | None = SegmentPool()
        self._host_name = host_name()
        self._host, self._ports = host, ports
        self._refusals = Refusals(f"{name} tensors")
        self._streams = SealedSender(name=name, host=host, ports=ports, refusals=self._refusals)
        self._thread = EventLoopThread(self._serve, name=f"tensors {name}", on_end=self._over)
        self.endpoint = ""

    def start(self) -> TensorServer:
        """Binds a free port and starts serving."""
        self._thread.start()
        self.raise_failure()
        return self

    def raise_failure(self) -> None:
        """Raises what ended the thread, if it did not end because it was asked to."""
        if (failure := self._thread.failure) is not None:
            raise ClusterError(
                f"{self.name} can't serve tensors: {failure}",
                where=f"tcp://{self._host}",
                fix="name an interface of this host",
            ) from failure

    def stop(self) -> None:
        """Ends the thread."""
        self._thread.stop()

    def _over(self, failure: BaseException | None) -> None:
        if failure is not None:
            self._on_failure()

    async def _serve(self, ready: Callable[[], None]) -> None:
        router = SecureRouter(
            self._keypairs,
            name=f"{self.name} tensors",
            refusals=self._refusals,
            max_bytes=MAX_MESSAGE_BYTES,
        )
        socket = router.socket
        try:
            self.endpoint = bind(socket, self._host, self._ports)
            ready()
            async with asyncio.TaskGroup() as tasks:
                router.start(tasks)
                while True:
                    peer, request_id, *body = await socket.recv_multipart()
                    header, buffers = self._answer(body)
                    parts = [peer, request_id, encode(header), *buffers]
                    await socket.send_multipart(parts, copy=False)
        finally:
            self._streams.close()
            router.close()
            if self._pool is not None:
                self._pool.close()

    def _answer(self, body: list[bytes]) -> tuple[TensorReply, list[memoryview]]:
        try:
            request: TensorRequest | TensorPut = decode(body[0] if body else b"", AnyRequest)
            sender = (request.trial, request.attempt, request.token)
            if sender != (self.trial, self.attempt, self._token):
                self._refusals.count("stale", f"{request.trial!r} attempt {request.attempt}")
                raise ProtocolError(
                    f"the request is from attempt {request.attempt} of {request.trial}",
                    where=f"{self.name}, attempt {self.attempt} of {self.trial}",
                    fix="the older attempt must exit",
                )
            if isinstance(request, TensorPut):
                self._store.put(sample_of(request, body[1:]))
                return TensorReply(), []
            if len(body) > 1:
                raise ProtocolError(
                    "a request has extra frames", where=self.name, fix="send the request alone"
                )
            if not request.ids:
                raise ProtocolError(
                    "the request names no datapoints", where=self.name, fix="name datapoints"
                )
            self._release_slots(request)
            return self._reply_with_rows(request)
        except RealsysError as error:
            return TensorReply(error=f"{error.what} ({error.where})"[:MAX_ERROR_CHARS]), []
        except Exception as error:  # any error is sent to the peer, and others are still served
            logger.exception("tensors not served name=%s", self.name)
            text = f"{type(error).__name__}: {error} ({self.name})"
            return TensorReply(error=text[:MAX_ERROR_CHARS]), []

    def _release_slots(self, request: TensorRequest) -> None:
        for segment, index in request.give_back:
            if self._pool is not None:
                self._pool.free(segment, index)

    def _reply_with_rows(self, request: TensorRequest) -> tuple[TensorReply, list[memoryview]]:
        """Returns the header and frames of the requested rows; frames are empty if they go another way.

        Waits only for the GPU work that writes these rows, not for later work.
        """
        store = self._published.get(request.key, self._store)
        rows = store.rows(request.key, request.ids)
        with read_beside(store.write_events(request.ids)):
            return self._send_rows(rows, request)

    def _send_rows(
        self, rows: Sequence[torch.Tensor], request: TensorRequest
    ) -> tuple[TensorReply, list[memoryview]]:
        header = header_of(rows)
        num_bytes = sum(x.numel() * x.element_size() for x in rows)
        same_host = request.host == self._host_name != ""
        if (
            same_host
            and num_bytes >= MIN_SHARED_BYTES
            and (taken := self._slot(num_bytes, rows, request))
        ):
            segments = self._pool.numbers if self._pool is not None else ()
            return msgspec.structs.replace(header, slot=taken, segments=segments), []
        if num_bytes < MIN_SEALED_BYTES:
            return header, frames_of(packed_bytes(rows))
        stream = self._streams.find(request.stream)
        if stream is None:
            return TensorReply(offer=self._streams.offer()), []
        sealed = stream.enqueue(packed_bytes(rows))
        return msgspec.structs.replace(header, sealed=sealed), []

    def _slot(
        self, num_bytes: int, rows: Sequence[torch.Tensor], request: TensorRequest
    ) -> SharedSlot | None:
        """Copies ``rows`` into a new slot; None if the system has no memory to share."""
        if self._pool is None:
            return None
        try:
            slot, memory = self._pool.allocate(num_bytes, (request.pid, request.start_ticks))
        except OSError as error:
            logger.warning("tensors go through sockets only name=%s error=%s", self.name, error)
            self._pool = None
            return None
        try:
            if any(x.is_cuda for x in rows):
                self._pool.pin(slot.segment)
            packed_bytes(rows, out=memory)
        except BaseException:
            self._pool.free(slot.segment, slot.index)
            raise
        return slot


def packed_bytes(rows: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Concatenates the bytes of ``rows``: uint8 ``[num_bytes]`` in host memory, in ``out`` if given.

    Bytes, since some dtypes can't be concatenated. Rows of one GPU take one copy; a single row in host
    memory is not copied if no ``out`` is given.
    """
    pieces = [x.detach().reshape(-1).view(torch.uint8) for x in rows]
    if len({x.device for x in pieces}) > 1:
        pieces = [x.cpu() for x in pieces]
    if pieces[0].device.type == "cpu":
        if out is None and len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces, out=out)
    whole = torch.cat(pieces)
    return whole.cpu() if out is None else out.copy_(whole)
