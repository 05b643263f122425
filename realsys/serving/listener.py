"""Serves an aiohttp application over HTTPS on a free port, with a certificate of its own."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable
from typing import Self

from aiohttp import web

from realsys.api.errors import ClusterError
from realsys.serving.certificate import self_signed, server_context

logger = logging.getLogger(__name__)

_BACKLOG = 1024
# Requests still open are aborted before this begins (app.py); it is for the last bytes of answers.
_SHUTDOWN_S = 2.0


class HttpsListener:
    """Owns the sockets. ``url``, with the certificate's SHA-256, is there after ``start``."""

    url = ""

    def __init__(
        self, app: web.Application, *, host: str = "127.0.0.1", ports: Iterable[int] | None = None
    ) -> None:
        self._host, self._ports = host, ports
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
        )

    async def start(self) -> Self:
        """Listens from now on.

        Raises:
            ClusterError: no port is free.
        """
        certificate = self_signed(self._host)
        await self._runner.setup()
        sock = _listen(self._host, self._ports)
        site = web.SockSite(
            self._runner, sock, ssl_context=server_context(certificate), backlog=_BACKLOG
        )
        await site.start()
        port = sock.getsockname()[1]
        self.url = f"https://{self._host}:{port}#sha256={certificate.sha256}"
        return self

    async def stop(self) -> None:
        """Closes all connections."""
        await self._runner.cleanup()


def _listen(host: str, ports: Iterable[int] | None) -> socket.socket:
    address = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    tried = 0
    for port in (0,) if ports is None else ports:
        tried += 1
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
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
        f"none of {tried} ports is free for a generation server",
        where=f"{address}, port_range of the cluster spec",
        fix="widen port_range",
    )
