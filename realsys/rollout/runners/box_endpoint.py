"""Serves the policy in a box: on a socket that was made there, within what a program may cost a worker."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, cast

from aiohttp import web
from aiohttp.typedefs import Middleware

from realsys.rollout.endpoint.endpoint_app import MAX_BODY_BYTES, answering_app, read_body
from realsys.rollout.endpoint.error_replies import Handler
from realsys.rollout.endpoint.session_registry import SessionFinder

MOST_CONNECTIONS = 64  # of a box; further ones are closed at once
MOST_BODY_BYTES = 2 * MAX_BODY_BYTES  # of requests of a box that are not answered yet
_SHUTDOWN_S = 2.0
_SERVE_S = 60.0  # longest until a socket is served; the loop is busy then


class BoxEndpoint:
    """The endpoint of one episode in its box, without the paths that set rewards and end sessions.

    ``async with``: at the end nothing is served any more, and a box that is still there is ended; so is one
    that begins to listen only then.
    """

    def __init__(self, finder: SessionFinder) -> None:
        app = answering_app(finder)
        self._bodies = _BodyPlaces()
        app.middlewares.append(self._bodies.bounded)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            shutdown_timeout=_SHUTDOWN_S,
        )
        self._lock = threading.Lock()
        self._is_over = False
        self._ends: list[Callable[[], None]] = []
        self._servers: list[asyncio.Server] = []
        self._connections = _Connections()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self._runner.setup()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._is_over = True
        for end in self._ends:
            end()
        for server in self._servers:
            server.close()
        await self._runner.cleanup()

    def on_listening(self, listener: socket.socket, end: Callable[[], None]) -> None:
        """Serves what a box listens with; as ``Sandbox.run_each`` has it. Called in the box's thread.

        Raises:
            TimeoutError: it is not served after a minute. ConnectionError: the episode is over.
        """
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._ends.append(end)
        if is_over:
            listener.close()
            end()
            raise ConnectionAbortedError("the episode is over")
        listener.setblocking(False)
        # Who waits in vain fails the box, and with it the episode, whose end closes what is served later
        asyncio.run_coroutine_threadsafe(self._serve(listener), self._loop).result(_SERVE_S)

    async def _serve(self, listener: socket.socket) -> None:
        if self._is_over:
            listener.close()
            raise ConnectionAbortedError("the episode is over")
        make = cast("Callable[[], asyncio.Protocol]", self._runner.server)
        server = await self._loop.create_server(
            lambda: _BoundedConnection(make, self._connections), sock=listener, start_serving=False
        )
        self._servers.append(server)
        await server.start_serving()


class _Connections:
    """How many a box has."""

    count = 0


class _BoundedConnection(asyncio.Protocol):
    """A connection that is served, or closed at once as there are too many."""

    def __init__(self, make: Callable[[], asyncio.Protocol], connections: _Connections) -> None:
        self._make, self._connections = make, connections
        self._served: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._connections.count >= MOST_CONNECTIONS:
            cast("asyncio.Transport", transport).abort()
            return
        self._connections.count += 1
        self._served = self._make()
        self._served.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._served is not None:
            self._connections.count -= 1
            self._served.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._served is not None:
            self._served.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._served is None else self._served.eof_received()

    def pause_writing(self) -> None:
        if self._served is not None:
            self._served.pause_writing()

    def resume_writing(self) -> None:
        if self._served is not None:
            self._served.resume_writing()


class _BodyPlaces:
    """Bounds the bodies of requests that are not answered yet; who finds no place waits unread."""

    def __init__(self) -> None:
        self.left, self.waiting = MOST_BODY_BYTES, 0
        self._freed = asyncio.Event()

    @property
    def bounded(self) -> Middleware:
        """A middleware; it reads bodies, which stay with their requests."""

        @web.middleware
        async def bounded(request: web.Request, handler: Handler) -> web.StreamResponse:
            length = request.content_length
            if not request.can_read_body or (length is not None and length > MAX_BODY_BYTES):
                return await handler(request)  # which refuses it by its length
            taken = MAX_BODY_BYTES if length is None else length
            await self._take(taken)
            try:
                read = len(await read_body(request))
                self._free(taken - read)  # a body may not tell its length before
                taken = read
                return await handler(request)
            finally:
                self._free(taken)

        return bounded

    async def _take(self, size: int) -> None:
        self.waiting += 1
        try:
            while self.left < size:
                self._freed.clear()
                await self._freed.wait()
        finally:
            self.waiting -= 1
        self.left -= size

    def _free(self, size: int) -> None:
        self.left += size
        self._freed.set()
