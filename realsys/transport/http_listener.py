"""Serves an aiohttp application on a free port: over HTTPS with its own certificate, or over plain HTTP.

A client must complete the TLS handshake, and then a first request's head, within some seconds each; silent
connections are closed.
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

from realsys.api.errors import ClusterError
from realsys.runtime.certificates import KeyPair, self_signed
from realsys.runtime.linux import memfd_create
from realsys.transport.binding import address_of, in_url

logger = logging.getLogger(__name__)

SILENCE_S = 10.0
_BACKLOG = 1024
# Requests still open are aborted before this begins (the engine's close); it is for the last bytes.
_SHUTDOWN_S = 2.0


class HttpListener:
    """Owns the sockets. ``url``, over HTTPS with the certificate's SHA-256, and ``cert_pem`` are there
    after ``start``.

    Args:
        name: what listens, for errors and the certificate.
        tls: else plain HTTP, which only ever belongs on the loopback interface.
        silence_s: how long a connection may take for its handshake, and then for its first request.
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
        self._silent: set[object] = set()  # connections that have not asked anything yet
        app.middlewares.insert(0, self._on_request)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
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
        protocol = server()
        self._silent.add(protocol)
        asyncio.get_running_loop().call_later(2 * self._silence_s, self._cut_if_silent, protocol)
        return protocol

    def _cut_if_silent(self, protocol: web.RequestHandler) -> None:
        if protocol in self._silent:
            self._silent.discard(protocol)
            protocol.force_close()

    @web.middleware
    async def _on_request(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        self._silent.discard(request.protocol)
        return await handler(request)


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
