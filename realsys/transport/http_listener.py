"""Serves an aiohttp application on a free port: over HTTPS with its own certificate, or over plain HTTP.

A client must complete the TLS handshake, and then each request's head, within some seconds; who has not yet
been served with a key may not stay without a request either. Such connections are closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Self

from aiohttp import web
from aiohttp.http import HttpProcessingError

from realsys.api.errors import ClusterError
from realsys.runtime.certificates import KeyPair, self_signed
from realsys.runtime.linux import memfd_create
from realsys.transport.binding import address_of, in_url

logger = logging.getLogger(__name__)

SILENCE_S = 10.0
_BACKLOG = 1024
# Requests still open are aborted before this begins (the engine's close); it is for the last bytes.
_SHUTDOWN_S = 2.0
OPEN_PATHS = frozenset({"/health", "/ready"})  # answered without a key: they reveal only yes or no


class HttpListener:
    """Owns the sockets. ``url``, over HTTPS with the certificate's SHA-256, and ``cert_pem`` are there
    after ``start``.

    Args:
        name: what listens, for errors and the certificate.
        tls: else plain HTTP, which only ever belongs on the loopback interface.
        silence_s: how long a connection may take for its handshake, and then for the head of a request.
            Until it was served with a key, it is closed after twice that without one.
    """

    url = ""
    cert_pem = ""

    def __init__(
        self,
        app: web.Application,
        *,
        name: str = "generation server",
        tls: bool = True,
        host: str = "127.0.0.1",
        ports: Iterable[int] | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._name, self._tls = name, tls
        self._host, self._ports, self._silence_s = host, ports, silence_s
        self._connections: dict[
            asyncio.BaseProtocol, _TimedConnection
        ] = {}  # by aiohttp's protocol
        app.middlewares.insert(0, self._on_request)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,  # request_body does, up to a limit
            shutdown_timeout=_SHUTDOWN_S,
            logger=_server_logger(),
        )
        self._server: asyncio.Server | None = None

    async def start(self) -> Self:
        """Starts listening.

        Raises:
            ClusterError: no port is free.
        """
        certificate = self_signed(f"realsys {self._name}", self._host) if self._tls else None
        await self._runner.setup()
        sock = _listen(self._host, self._ports, self._name)
        self._server = await asyncio.get_running_loop().create_server(
            self._connection,
            sock=sock,
            ssl=None if certificate is None else _server_context(certificate),
            ssl_handshake_timeout=None if certificate is None else self._silence_s,
            backlog=_BACKLOG,
        )
        port = sock.getsockname()[1]
        address = f"{in_url(self._host)}:{port}"
        if certificate is None:
            self.url = f"http://{address}"
        else:
            self.url = f"https://{address}#sha256={certificate.sha256}"
            self.cert_pem = certificate.cert_pem
        return self

    async def stop(self) -> None:
        """Closes all connections."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None  # setup() made it
        return _TimedConnection(server(), self._connections, silence_s=self._silence_s)

    @web.middleware
    async def _on_request(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        connection = self._connections.get(request.protocol)
        if connection is None:  # it has ended
            return await handler(request)
        connection.begin_request()
        had_key = False
        try:
            response = await handler(request)
            had_key = response.status < 400 and request.path not in OPEN_PATHS
        finally:
            connection.end_request(had_key=had_key)
        return response


class _TimedConnection(asyncio.Protocol):
    """aiohttp's protocol of one connection, closed when its client dawdles between requests.

    Args:
        open_ones: where it stands while it is open, by aiohttp's protocol.
    """

    def __init__(
        self,
        inner: web.RequestHandler,
        open_ones: dict[asyncio.BaseProtocol, _TimedConnection],
        *,
        silence_s: float,
    ) -> None:
        self._inner, self._open_ones, self._silence_s = inner, open_ones, silence_s
        self._is_busy = False  # a request is being answered
        self._had_key = False
        self._timer: asyncio.TimerHandle | None = None
        self._close_after(2 * silence_s)  # the handshake and a first head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._open_ones[self._inner] = self
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_ones.pop(self._inner, None)
        self._stop_timer()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_busy and self._timer is None:
            self._close_after(self._silence_s)  # the head of a next request has begun
        self._inner.data_received(data)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def begin_request(self) -> None:
        """Notes that a request's head is there."""
        self._is_busy = True
        self._stop_timer()

    def end_request(self, *, had_key: bool) -> None:
        """Notes that a request is answered."""
        self._is_busy = False
        self._had_key |= had_key
        if not self._had_key:
            self._close_after(2 * self._silence_s)

    def _close_after(self, seconds: float) -> None:
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._inner.force_close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _NoTracebackOfClients(logging.Filter):
    """Drops what aiohttp logs of heads that can't be read: anybody can send them; they are answered 400."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


def _server_logger() -> logging.Logger:
    made = logging.getLogger(f"{__name__}.aiohttp")
    if not made.filters:
        made.addFilter(_NoTracebackOfClients())
    return made


def _listen(host: str, ports: Iterable[int] | None, name: str) -> socket.socket:
    family, address = address_of(host)
    tried = 0
    for port in (0,) if ports is None else ports:
        tried += 1
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a restart
            sock.bind((address, port))
            sock.listen(_BACKLOG)  # SO_REUSEADDR lets two bind; only one may listen
        except OSError as error:
            sock.close()
            logger.debug("port taken port=%d error=%s", port, error)
            continue
        return sock
    raise ClusterError(
        f"none of {tried} ports is free for a {name}",
        where=f"{address}, port_range of the cluster spec",
        fix="widen port_range",
    )


def _server_context(certificate: KeyPair) -> ssl.SSLContext:
    """TLS 1.3 with this certificate, which is in no file system: ssl reads it from anonymous memory."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The ssl module takes paths only: an anonymous file has one while it is open, for us alone.
    with os.fdopen(memfd_create("certificate"), "wb") as file:
        file.write((certificate.key_pem + certificate.cert_pem).encode())
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
