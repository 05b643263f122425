"""Control thread of a model worker: serves requests while the main thread computes.

Ordered requests go to the compute thread; the others are answered here at once, so that a worker
answers ping and exit during a long training step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Unpack

from realsys.data.transfer.tensor_store import TensorStore
from realsys.model_worker.ordered_requests import OrderedRequests
from realsys.runtime.event_loop_thread import EventLoopThread
from realsys.transport.channel import RequestServer
from realsys.transport.curve_keys import ChannelIdentity
from realsys.transport.worker_requests import ClearData, Done, Exit, Ping, Request


class ControlThread:
    """Runs the request server and its event loop on a thread of its own."""

    def __init__(
        self,
        requests: OrderedRequests,
        tensors: TensorStore,
        *,
        name: str,
        host: str = "127.0.0.1",
        ports: range | None = None,
        **identity: Unpack[ChannelIdentity],
    ) -> None:
        self._requests, self._tensors = requests, tensors
        self._server = RequestServer(
            name=name,
            request_type=Request,
            bind_host=host,
            ports=ports,
            **identity,
        )
        self._thread = EventLoopThread(
            self._serve, name=f"control {name}", on_end=lambda failure: self._requests.close()
        )

    def start(self) -> str:
        """Binds the server, starts serving and returns the endpoint."""
        self._thread.start()
        self.raise_failure()
        return self._server.endpoint

    def stop(self) -> None:
        """Sends what is still to be sent and ends the thread."""
        self._thread.stop()

    def raise_failure(self) -> None:
        """Raises what ended the thread, if it did not end because it was asked to."""
        if self._thread.failure is not None:
            raise self._thread.failure

    async def _serve(self, ready: Callable[[], None]) -> None:
        async with self._server:
            ready()
            await self._server.serve(self._handle)

    async def _handle(self, request: Any) -> Any:
        if isinstance(request, Ping):
            return Done()
        if isinstance(request, ClearData):
            self._tensors.clear(request.ids)
            return Done()
        if isinstance(request, Exit):
            self._requests.close()
            return Done()
        return await asyncio.wrap_future(self._requests.put(request))
