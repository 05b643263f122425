"""Authentication of connections: only holders of the trial's client key may connect.

For server.py. Answers libzmq's authentication requests (ZAP, rfc.zeromq.org/spec/27) within the
process, and counts handshakes that fail before that: no CURVE, another server's key. (libzmq drops
bytes that are not ZeroMQ without an event: not counted.) Refusals are logged at counts 1, 2, 4, 8,
...: a refused peer reconnects many times a second.
"""

from __future__ import annotations

import logging
from collections import Counter

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

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


class Authenticator:
    """The ZAP handler of one context. Bind it before any socket of that context accepts peers."""

    def __init__(
        self, context: zmq.asyncio.Context, *, client_public: bytes, refusals: Refusals
    ) -> None:
        self._client_public, self._refusals = client_public, refusals
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ADDRESS)

    def close(self) -> None:
        self._socket.close()

    async def run(self) -> None:
        while True:
            route, _, version, request_id, *question = await self._socket.recv_multipart()
            allowed = version == _ZAP_VERSION and self._allowed(question)
            status = (b"200", b"OK") if allowed else (b"400", b"not a client of this trial")
            reply = [route, b"", _ZAP_VERSION, request_id, *status, b"", b""]
            await self._socket.send_multipart(reply)

    def _allowed(self, question: list[bytes]) -> bool:
        domain, address, _identity, mechanism, *credentials = question
        by_curve = domain == DOMAIN and mechanism == b"CURVE" and len(credentials) == 1
        if by_curve and z85.encode(credentials[0]) == self._client_public:
            return True
        self._refusals.count("wrong_key", f"from {address.decode(errors='replace')}")
        return False


async def count_failed_handshakes(monitor: zmq.asyncio.Socket, refusals: Refusals) -> None:
    """Counts connections that failed the handshake. ``monitor`` is from ``open_monitor``."""
    while True:
        event = parse_monitor_message(await monitor.recv_multipart())
        if event["event"] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # already counted by _allowed
            refusals.count("no_handshake", f"error {event['value']}")


def open_monitor(socket: zmq.asyncio.Socket, events: int = _FAILED) -> zmq.asyncio.Socket:
    """Returns a socket with connection events. It must be read: libzmq blocks on a slow reader."""
    monitor: zmq.asyncio.Socket = socket.get_monitor_socket(events)
    return monitor
