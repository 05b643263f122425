"""Authentication of connections: only holders of the trial's client key may connect.

For servers of messages (server.py) and of tensors. Answers libzmq's authentication requests (ZAP,
rfc.zeromq.org/spec/27) within the process, and counts handshakes that fail before that: no CURVE,
another server's key. (libzmq drops bytes that are not ZeroMQ without an event: not counted.)
Refusals are logged at counts 1, 2, 4, 8, ...: a refused peer reconnects many times a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from realsys.transport.curve_keys import TrialKeypairs

logger = logging.getLogger(__name__)

DOMAIN = b"realsys"
HANDSHAKE_MS = 10_000  # limit for a peer that connects and sends nothing
_ZAP_ADDRESS = "inproc://zeromq.zap.01"  # fixed by the specification; one per context
_ZAP_VERSION = b"1.0"
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Refusals:
    """Counts of refused messages and connections of a server, by reason."""

    def __init__(self, server_name: str) -> None:
        self._server_name = server_name
        self.counts: Counter[str] = Counter()

    def count(self, reason: str, detail: str) -> None:
        self.counts[reason] += 1
        n = self.counts[reason]
        if n & (n - 1) == 0:
            logger.warning(
                "refused server=%s reason=%s count=%d detail=%s",
                self._server_name,
                reason,
                n,
                # May come from an untrusted peer: it must not inject lines into the log.
                detail[:200].encode("unicode_escape").decode(),
            )


class SecureRouter:
    """A ROUTER socket for holders of the trial's client key, to be bound by its owner.

    Args:
        name: of the server, in names of tasks.
        max_bytes: limit of a message; also for unauthenticated peers, before any handshake.
    """

    def __init__(
        self,
        keypairs: TrialKeypairs,
        *,
        name: str,
        refusals: Refusals,
        max_bytes: int,
        linger_ms: int = 0,
    ) -> None:
        self._client_public, self._refusals, self._name = keypairs.client_public, refusals, name
        self._context = zmq.asyncio.Context()  # its own: ZAP is answered per context
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ADDRESS)
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_secretkey = keypairs.server_secret
        self.socket.zap_domain = DOMAIN
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no answer from ZAP means no
        self.socket.maxmsgsize = max_bytes
        self.socket.handshake_ivl = HANDSHAKE_MS
        self.socket.sndhwm = 0  # a ROUTER drops what is above the mark
        self.socket.linger = linger_ms
        self._monitor = open_monitor(self.socket)

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close()
        self._zap.close()
        self._context.term()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Starts to admit peers and to count refused ones."""
        tasks.create_task(self._authenticate(), name=f"authenticator {self._name}")
        tasks.create_task(self._count_failed_handshakes(), name=f"handshakes {self._name}")

    async def _authenticate(self) -> None:
        while True:
            route, _, version, request_id, *question = await self._zap.recv_multipart()
            allowed = version == _ZAP_VERSION and self._allowed(question)
            status = (b"200", b"OK") if allowed else (b"400", b"not a client of this trial")
            reply = [route, b"", _ZAP_VERSION, request_id, *status, b"", b""]
            await self._zap.send_multipart(reply)

    def _allowed(self, question: list[bytes]) -> bool:
        domain, address, _identity, mechanism, *credentials = question
        by_curve = domain == DOMAIN and mechanism == b"CURVE" and len(credentials) == 1
        if by_curve and z85.encode(credentials[0]) == self._client_public:
            return True
        self._refusals.count("wrong_key", f"from {address.decode(errors='replace')}")
        return False

    async def _count_failed_handshakes(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if event["event"] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # already counted by _allowed
                self._refusals.count("no_handshake", f"error {event['value']}")


def open_monitor(socket: zmq.asyncio.Socket, events: int = _FAILED) -> zmq.asyncio.Socket:
    """Returns a socket with connection events. It must be read: libzmq blocks on a slow reader."""
    monitor: zmq.asyncio.Socket = socket.get_monitor_socket(events)
    return monitor
