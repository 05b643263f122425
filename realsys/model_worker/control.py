"""Control thread of a model worker: serves requests while the main thread computes.

Ordered requests go to the compute thread; the others are answered here at once, so that a worker
answers ping and exit during a long training step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

from realsys.api.errors import InternalError
from realsys.data.transfer.tensor_store import TensorStore
from realsys.model_worker.ordered_requests import OrderedRequests
from realsys.transport.channel import RequestServer
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.worker_requests import ClearData, Done, Exit, Ping, Request

logger = logging.getLogger(__name__)


class ControlThread:
    """Runs the request server and its event loop on a thread of its own."""

    def __init__(
        self,
        requests: OrderedRequests,
        tensors: TensorStore,
        *,
        name: str,
        trial: str,
        attempt: int,
        token: str = "",
        keypairs: TrialKeypairs,
        host: str = "127.0.0.1",
        ports: range | None = None,
    ) -> None:
        self._requests, self._tensors = requests, tensors
        self._server = RequestServer(
            name=name,
            trial=trial,
            attempt=attempt,
            token=token,
            keypairs=keypairs,
            request_type=Request,
            bind_host=host,
            ports=ports,
        )
        self._name = name
        self._thread = threading.Thread(target=self._main, name=f"control {name}", daemon=True)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> str:
        """Binds the server, starts serving and returns the endpoint."""
        self._thread.start()
        if not self._ready.wait(10.0):
            raise InternalError("the control thread did not start in 10 s", where=self._name)
        if self._failure is not None:
            raise self._failure
        return self._server.endpoint

    def stop(self) -> None:
        """Sends outstanding replies and ends the thread."""
        if self._loop is not None and self._task is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(5.0)

    def raise_failure(self) -> None:
        """Raises the error that ended the thread, if it did not end through ``stop``."""
        if self._failure is not None:
            raise self._failure

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # raised again by start or raise_failure
            self._failure = error
            logger.exception("control thread ended name=%s", self._name)
        finally:
            self._ready.set()
            self._requests.close()

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        async with self._server:
            self._ready.set()
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
