"""The calling end of a channel: one DEALER socket to one peer, many concurrent calls.

For the master and every other caller of a worker. A call is resent under the same id until its
deadline, so that a lost message, a reconnect or a restarted peer does no harm: server.py runs it
once. The client does not judge liveness: its owner learns that the peer died (registration,
supervisor) and calls ``fail``.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import uuid
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from realsys.api.errors import ClusterError, InternalError, RealsysError, WaitTimeout, WorkerLost
from realsys.transport.authentication import open_monitor
from realsys.transport.binding import connect
from realsys.transport.codec import MAX_MESSAGE_BYTES, ProtocolError, decode, encode
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.messages import PROTOCOL_VERSION, ReplyFrame, RequestFrame, info_to_error

logger = logging.getLogger(__name__)

RESEND_S = 10.0
# Three per client: its own and its monitor's two ends. libzmq's default is 1023, its maximum is this.
MAX_SOCKETS, SOCKETS_A_PEER = 65_535, 3
# Per peer: those three and the connection. Others: everything else the process has open.
DESCRIPTORS_A_PEER, OTHER_DESCRIPTORS = 4, 256
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5_000, 20_000  # detects silently broken connections
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 2_000
_LINKS = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "connected",
    zmq.EVENT_DISCONNECTED: "disconnected",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed (is it a worker of this trial?)",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed (another trial's keys?)",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused our key (another trial's keys?)",
}


def client_context(num_peers: int = 1) -> zmq.asyncio.Context:
    """Returns a context for all clients of a process. Its owner calls ``term`` after closing them.

    Raises:
        ClusterError: the limits on sockets or open files are too low for ``num_peers``.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if problem := too_many_peers(num_peers, limit):
        raise problem
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def too_many_peers(num_peers: int, max_files: int) -> ClusterError | None:
    """Returns the error if a process can't have that many peers, else None.

    Args:
        max_files: the hard limit of open files; negative for none.
    """
    if num_peers * SOCKETS_A_PEER > MAX_SOCKETS:
        most, needed = MAX_SOCKETS // SOCKETS_A_PEER, num_peers * SOCKETS_A_PEER
        return ClusterError(
            f"{num_peers:,} workers need {needed:,} sockets of one process, {MAX_SOCKETS:,} are possible",
            where="calls to all workers",
            fix=f"use at most {most:,} workers of a type",
        )
    needed = num_peers * DESCRIPTORS_A_PEER + OTHER_DESCRIPTORS
    if not 0 <= max_files < needed:
        return None
    return ClusterError(
        f"{num_peers:,} workers need {needed:,} open files in one process, {max_files:,} are allowed",
        where=f"hard limit of open files on {socket.gethostname()} (ulimit -Hn)",
        fix="ask the administrator to raise it for jobs (LimitNOFILE of slurmd), or use fewer workers",
    )


@dataclass(eq=False, repr=False)
class RequestClient:
    """Calls one peer. Use as ``async with``, or ``open`` and ``close``; within one event loop.

    Args:
        endpoint: the peer's, from its registration.
        peer_name, sender: names of the two workers, for errors and the peer's log.
        reply_type: a Struct or a union of tagged ones that replies are decoded to.
        context: from ``client_context``, shared by the process's clients.
        resend_s: interval at which a call is resent until it is answered.
    """

    endpoint: str
    _: KW_ONLY
    peer_name: str
    sender: str
    trial: str
    attempt: int
    token: str = ""
    keypairs: TrialKeypairs
    reply_type: Any
    context: zmq.asyncio.Context
    resend_s: float = RESEND_S
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def __post_init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._calls: dict[str, str] = {}  # request id -> what, for errors
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: str | None = None
        self._link = "never connected"
        self.num_dropped = 0  # replies that were unreadable, late or of an older attempt

    def open(self) -> Self:
        """Connects in the background. Needs a running event loop, which owns the client from now
        on."""
        self._socket = self.context.socket(zmq.DEALER)
        self._socket.curve_serverkey = self.keypairs.server_public
        self._socket.curve_publickey = self.keypairs.client_public
        self._socket.curve_secretkey = self.keypairs.client_secret
        self._socket.maxmsgsize = self.max_message_bytes
        self._socket.sndhwm = 0  # sending never blocks; the queue is bounded by calls and resends
        self._socket.linger = 0
        self._socket.heartbeat_ivl = _HEARTBEAT_MS
        self._socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
        self._socket.reconnect_ivl = _RECONNECT_MS
        self._socket.reconnect_ivl_max = _RECONNECT_MAX_MS
        self._monitor = open_monitor(self._socket, sum(_LINKS))
        connect(self._socket, self.endpoint)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._receive(), name=f"replies of {self.peer_name}"),
            loop.create_task(self._follow_link(), name=f"link to {self.peer_name}"),
        ]
        return self

    async def close(self) -> None:
        """Closes the connection. Calls in progress end with WorkerLost."""
        self.fail("this client was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            self._tasks = []
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()

    async def __aenter__(self) -> Self:
        return self.open()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def call(self, body: object, *, timeout_s: float, what: str) -> Any:
        """Sends ``body`` and returns the reply's body.

        Args:
            what: names the call in errors, e.g. ``actor_train step 7``.
        Raises:
            WaitTimeout: no reply in ``timeout_s``.
            WorkerLost: ``fail`` or ``close`` was called, before or while waiting.
            RemoteError: the peer failed; or the RealsysError that it raised.
            ProtocolError: the request or the reply can't be encoded or decoded.
        """
        data = encode(body, max_bytes=self.max_message_bytes)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        request_id = uuid.uuid4().hex
        reply: asyncio.Future[Any] = loop.create_future()
        self._waiting[request_id], self._calls[request_id] = reply, what
        try:
            if self._failed is not None:
                raise self._lost(what, self._failed)
            while (left_s := deadline_s - loop.time()) > 0:
                await self._socket.send(self._frame(request_id, left_s, data))
                await asyncio.wait({reply}, timeout=min(self.resend_s, left_s))
                if reply.done():
                    return reply.result()
            raise WaitTimeout(
                f"no reply from {self.peer_name} to {what} in {timeout_s:g} s (link: {self._link})",
                where=self.endpoint,
                fix=f"check the log of {self.peer_name}; raise the time limit if it is only slow",
            )
        finally:
            del self._waiting[request_id], self._calls[request_id]
            if not reply.cancel() and not reply.cancelled():
                reply.exception()  # marks it as retrieved, also if this call was itself cancelled

    def fail(self, reason: str) -> None:
        """Marks the peer as lost: ends all waiting calls with WorkerLost and refuses later ones."""
        if self._failed is None:
            self._failed = reason
        for request_id, reply in self._waiting.items():
            if not reply.done():
                reply.set_exception(self._lost(self._calls[request_id], reason))

    async def _receive(self) -> None:
        try:
            while True:
                self._take(await self._socket.recv())
        except Exception as error:  # outermost frame of the task: callers must not wait for it
            logger.exception("receiving failed peer=%s", self.peer_name)
            self.fail(f"receiving failed here: {error!r}")

    async def _follow_link(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            happened = zmq.Event(event["event"])
            # A refused connection is also disconnected; keep the refusal, which explains it.
            if happened != zmq.EVENT_DISCONNECTED or self._link == "connected":
                self._link = _LINKS.get(happened, self._link)

    def _take(self, data: bytes) -> None:
        try:
            frame: ReplyFrame = decode(data, ReplyFrame, max_bytes=self.max_message_bytes)
        except ProtocolError as error:
            self._drop(error.what)
            return
        reply = self._waiting.get(frame.request_id)
        if reply is None or reply.done():
            self._drop("no call waits for it")
        elif frame.ok and frame.attempt < self.attempt:
            self._drop(f"of attempt {frame.attempt}, ours is {self.attempt}")
        elif frame.ok and frame.version == PROTOCOL_VERSION:
            try:
                reply.set_result(
                    decode(frame.body, self.reply_type, max_bytes=self.max_message_bytes)
                )
            except ProtocolError as error:
                reply.set_exception(error)
        else:
            reply.set_exception(self._refusal(frame))

    def _refusal(self, frame: ReplyFrame) -> RealsysError:
        if frame.error is not None:
            return info_to_error(frame.error, self.peer_name)
        if frame.version != PROTOCOL_VERSION:
            return ProtocolError(
                f"{self.peer_name} replied in protocol version {frame.version}, "
                f"we speak version {PROTOCOL_VERSION}",
                where=self.endpoint,
                fix="start all workers of a trial with the same realsys",
            )
        return InternalError("a refusal came without an error", where=self.peer_name)

    def _drop(self, reason: str) -> None:
        self.num_dropped += 1
        logger.info("reply dropped peer=%s reason=%s", self.peer_name, reason)

    def _frame(self, request_id: str, left_s: float, body: bytes) -> bytes:
        frame = RequestFrame(
            version=PROTOCOL_VERSION,
            trial=self.trial,
            attempt=self.attempt,
            token=self.token,
            request_id=request_id,
            sender=self.sender,
            deadline_s=left_s,
            body=body,
        )
        return encode(frame, max_bytes=self.max_message_bytes)

    def _lost(self, what: str, reason: str) -> WorkerLost:
        return WorkerLost(
            f"{self.peer_name} was lost, no reply to {what}: {reason}",
            where=self.endpoint,
            fix=f"the end of the log of {self.peer_name} shows the cause; then realsys resume",
        )
