"""The serving end of a channel: receives requests on a ROUTER socket, runs each once, replies.

For every worker that others call. A request may arrive several times (client.py resends it): a copy
joins the running one or gets the cached reply. Frames of another trial are dropped; older attempts
and other versions get an error. The handler interprets requests; authentication.py decides who may
connect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import zmq
import zmq.asyncio

from realsys.api.errors import ClusterError, StaleAttempt
from realsys.transport.authentication import Refusals, SecureRouter
from realsys.transport.binding import bind
from realsys.transport.codec import MAX_MESSAGE_BYTES, ProtocolError, decode, encode
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.messages import (
    PROTOCOL_VERSION,
    FrameHead,
    ReplyFrame,
    RequestFrame,
    error_to_info,
)

logger = logging.getLogger(__name__)

Handler = Callable[[Any], Awaitable[Any]]
MAX_KEPT_REPLIES = 4096
MAX_KEPT_BYTES = 64 * 1024 * 1024
YOUNG_S = 60.0  # a client resends after 10 s, and after it has detected a broken connection
_LINGER_MS = 500  # time for the last replies; a peer that does not read blocks no longer


@dataclass(eq=False, repr=False, kw_only=True)
class RequestServer:
    """Serves one handler. Use as ``async with``; then ``endpoint`` is known.

    Args:
        name: of this worker, in logs and errors.
        trial, attempt, token: of the requests that are accepted.
        request_type: a Struct or a union of tagged ones that bodies are decoded to.
        bind_host: name or address of the interface to listen on; 0.0.0.0 for all.
        ports: to try, in order; None: any free one.
    """

    name: str
    trial: str
    attempt: int
    token: str = ""
    keypairs: TrialKeypairs
    request_type: Any
    bind_host: str = "127.0.0.1"
    ports: Iterable[int] | None = None
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def __post_init__(self) -> None:
        self._refusals = Refusals(self.name)
        self._running: dict[str, set[bytes]] = {}  # request id -> peers that wait for it
        self._replies = KeptReplies(MAX_KEPT_REPLIES, MAX_KEPT_BYTES)
        self.endpoint = ""  # where clients connect, e.g. tcp://node7:40123

    @property
    def refused(self) -> dict[str, int]:
        """Counts by reason: wrong_key, no_handshake, malformed, other_trial, stale, version."""
        return dict(self._refusals.counts)

    async def __aenter__(self) -> Self:
        self._router = SecureRouter(
            self.keypairs,
            name=self.name,
            refusals=self._refusals,
            max_bytes=self.max_message_bytes,
            linger_ms=_LINGER_MS,
        )
        self._socket = self._router.socket
        try:
            self.endpoint = bind(self._socket, self.bind_host, self.ports)
        except ClusterError as error:
            self._router.close()
            raise ClusterError(
                f"{self.name} can't listen: {error.what}", where=error.where, fix=error.fix
            ) from error
        except (zmq.ZMQError, OSError) as error:
            self._router.close()
            raise ClusterError(
                f"{self.name} can't listen: {error}",
                where=f"tcp://{self.bind_host}",
                fix="name an interface of this host in bind_host, and a free port (0: any)",
            ) from error
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._router.close()

    async def serve(self, handler: Handler) -> None:
        """Serves until cancelled. Each request is a task of its own, in no particular order.

        An exception of the handler is sent to the caller and does not end the server. A handler is not
        stopped when its caller's deadline passes: half an optimizer step is of no use.
        """
        async with asyncio.TaskGroup() as tasks:
            self._router.start(tasks)
            while True:
                peer, *parts = await self._socket.recv_multipart()
                frame = await self._admit(peer, parts)
                if frame is None:
                    continue
                if (kept := self._replies.get(frame.request_id)) is not None:
                    await self._socket.send_multipart([peer, kept])
                elif frame.request_id in self._running:
                    self._running[frame.request_id].add(peer)
                elif self._replies.was_answered(frame.request_id):
                    await self._refuse(peer, frame.request_id, self._forgotten(frame))
                else:
                    self._running[frame.request_id] = {peer}
                    answer = self._answer(frame, handler)
                    tasks.create_task(answer, name=f"{frame.sender} {frame.request_id}")

    async def _admit(self, peer: bytes, parts: list[bytes]) -> RequestFrame | None:
        """Returns the frame if it is to be run; otherwise counts the reason, and sends it to peers
        of this trial."""
        frame = self._read(parts)
        if frame is None:
            self._refusals.count("malformed", f"{sum(map(len, parts))} bytes")
            return None
        if frame.trial != self.trial:
            self._refusals.count("other_trial", frame.trial)
            return None
        if frame.version != PROTOCOL_VERSION or not isinstance(frame, RequestFrame):
            self._refusals.count("version", str(frame.version))
            await self._refuse(
                peer,
                frame.request_id,
                ProtocolError(
                    f"received protocol version {frame.version}, "
                    f"{self.name} speaks version {PROTOCOL_VERSION}",
                    where=self.name,
                    fix="start all workers of a trial with the same realsys",
                ),
            )
            return None
        if (frame.attempt, frame.token) != (self.attempt, self.token):
            self._refusals.count("stale", f"{frame.sender} attempt {frame.attempt}")
            older = self.name if frame.attempt > self.attempt else frame.sender
            await self._refuse(
                peer,
                frame.request_id,
                StaleAttempt(
                    f"{frame.sender} is of attempt {frame.attempt}, "
                    f"{self.name} of attempt {self.attempt}",
                    where=f"trial {self.trial}",
                    fix=f"{older} was superseded and must exit",
                ),
            )
            return None
        return frame

    def _read(self, parts: list[bytes]) -> RequestFrame | FrameHead | None:
        if len(parts) != 1:
            return None
        for kind in (RequestFrame, FrameHead):
            try:
                frame: RequestFrame | FrameHead = decode(
                    parts[0], kind, max_bytes=self.max_message_bytes
                )
            except ProtocolError:
                continue
            # A frame of our version that does not parse as a RequestFrame is malformed, not old.
            broken = isinstance(frame, FrameHead) and frame.version == PROTOCOL_VERSION
            return None if broken else frame
        return None

    async def _answer(self, frame: RequestFrame, handler: Handler) -> None:
        began_s = time.monotonic()
        try:
            reply = await self._run(frame, handler)
        except BaseException:
            del self._running[frame.request_id]  # the server is shutting down
            raise
        took_s = time.monotonic() - began_s
        if took_s > frame.deadline_s:
            logger.warning(
                "replied late to=%s request=%s seconds=%.1f deadline_s=%.1f",
                frame.sender,
                frame.request_id,
                took_s,
                frame.deadline_s,
            )
        # Cached before sending: a copy of the request that arrives in between must find the reply.
        self._replies.keep(frame.request_id, reply)
        for peer in self._running.pop(frame.request_id):
            await self._socket.send_multipart([peer, reply])

    async def _run(self, frame: RequestFrame, handler: Handler) -> bytes:
        try:
            request = decode(frame.body, self.request_type, max_bytes=self.max_message_bytes)
            body = encode(await handler(request), max_bytes=self.max_message_bytes)
            reply = self._reply(frame.request_id, ok=True, body=body)
            return encode(reply, max_bytes=self.max_message_bytes)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # the server is stopped; otherwise the handler cancelled itself
            return self._error_reply(frame.request_id, error)
        except Exception as error:  # any error of the handler is sent to the caller
            logger.warning(
                "request failed from=%s request=%s error=%r",
                frame.sender,
                frame.request_id,
                error,
            )
            return self._error_reply(frame.request_id, error)

    def _forgotten(self, frame: RequestFrame) -> ProtocolError:
        return ProtocolError(
            f"{self.name} has executed this request, but its reply was lost and is no longer cached "
            f"({MAX_KEPT_BYTES // 2**20} MiB are kept)",
            where=f"request {frame.request_id} of {frame.sender}",
            fix="check the network between the two; then realsys resume",
        )

    async def _refuse(self, peer: bytes, request_id: str, error: Exception) -> None:
        await self._socket.send_multipart([peer, self._error_reply(request_id, error)])

    def _error_reply(self, request_id: str, error: BaseException) -> bytes:
        return encode(self._reply(request_id, ok=False, error=error))

    def _reply(
        self, request_id: str, *, ok: bool, body: bytes = b"", error: BaseException | None = None
    ) -> ReplyFrame:
        return ReplyFrame(
            version=PROTOCOL_VERSION,
            request_id=request_id,
            attempt=self.attempt,
            ok=ok,
            body=body,
            error=error_to_info(error) if error is not None else None,
        )


class KeptReplies:
    """Cache of recent replies by request id, for as long as a copy of the request may still arrive.

    More than ``max_replies`` are kept while they are young. ``max_bytes`` is never exceeded except
    by the newest reply, which always stays; young replies that were evicted are remembered as
    answered.

    Args:
        young_s: how late a copy may arrive.
        clock: in seconds.
    """

    def __init__(
        self,
        max_replies: int,
        max_bytes: int,
        *,
        young_s: float = YOUNG_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_replies, self._max_bytes = max_replies, max_bytes
        self._young_s, self._clock = young_s, clock
        self._replies: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        # Request id, evicted while young → time answered
        self._evicted: OrderedDict[str, float] = OrderedDict()
        self._num_bytes = 0

    def get(self, request_id: str) -> bytes | None:
        kept = self._replies.get(request_id)
        return None if kept is None else kept[1]

    def was_answered(self, request_id: str) -> bool:
        """Returns whether the reply was evicted while a copy of the request may still arrive: it
        must not run again."""
        return request_id in self._evicted

    def keep(self, request_id: str, reply: bytes) -> None:
        now_s = self._clock()
        self._replies[request_id] = (now_s, reply)
        self._num_bytes += len(reply)
        while len(self._replies) > 1:
            oldest, (kept_s, data) = next(iter(self._replies.items()))
            is_young = now_s - kept_s < self._young_s
            if self._num_bytes <= self._max_bytes and (
                is_young or len(self._replies) <= self._max_replies
            ):
                break
            del self._replies[oldest]
            self._num_bytes -= len(data)
            if is_young:
                self._evicted[oldest] = kept_s
        while self._evicted and now_s - next(iter(self._evicted.values())) >= self._young_s:
            self._evicted.popitem(last=False)
