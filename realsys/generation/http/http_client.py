"""``HttpGenerationClient``: the ``GenerationClient`` of one server over HTTPS. No torch."""

from __future__ import annotations

import asyncio

import msgspec

from realsys.api.errors import RealsysError, WaitTimeout
from realsys.generation.http.http_answers import read_answer
from realsys.generation.http.http_json import generate_body
from realsys.generation.http.http_session import HttpSession
from realsys.transport.generation_messages import (
    GenerateRequest,
    GenerateResult,
    ServerInfo,
    WeightSource,
    WeightsTaken,
)

CONTROL_S = 30.0  # default deadline of calls
_ABORT_S = 5.0


class HttpGenerationClient:
    """Client of one server.

    Args:
        url: as registered, with the SHA-256 of its certificate.
        key: ``secret.bearer_key`` of the trial.
        name: of the server, e.g. ``generation_server/0``: every error names it.
    """

    def __init__(self, url: str, key: str, *, name: str) -> None:
        self.name = name
        self._http = HttpSession(url, key, name=name, limit=0)
        self._control = HttpSession(url, key, name=name)  # never queued behind answers
        self._aborts: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> GenerateResult:
        """Generates one answer.

        Raises:
            WaitTimeout: the request has been aborted, as it is when this call is cancelled.
            WorkerLost: no connection, or it broke.
            DataError: the server can't do what is asked. RemoteError: it is full, or it failed.
        """
        try:
            data = await self._http.call(
                "POST", "/generate", generate_body(request), timeout_s=timeout_s
            )
        except (WaitTimeout, asyncio.CancelledError):
            self._abort_soon(request.rid)
            raise
        return read_answer(data, rid=request.rid).result()

    async def abort(self, rid: str = "", *, every: bool = False) -> None:
        body = {"rid": rid, "abort_all": every}
        await self._control.call("POST", "/abort_request", body, timeout_s=CONTROL_S)

    async def update_weights(self, source: WeightSource, *, timeout_s: float) -> WeightsTaken:
        """Updates the weights. Raises RemoteError if the server can't get them; it then keeps its own."""
        data = await self._control.call(
            "POST", "/update_weights_from_stream", source, timeout_s=timeout_s
        )
        return msgspec.json.decode(data, type=WeightsTaken)

    async def info(self, *, timeout_s: float = 5.0) -> ServerInfo:
        data = await self._control.call("GET", "/server_info", timeout_s=timeout_s)
        return msgspec.json.decode(data, type=ServerInfo)

    async def healthy(self, *, timeout_s: float = 5.0) -> bool:
        try:
            await self._control.call("GET", "/health_generate", timeout_s=timeout_s)
        except RealsysError:
            return False
        return True

    async def close(self) -> None:
        """Closes the client after sending pending aborts, for a few seconds at most."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_S)
        for task in self._aborts:
            task.cancel()
        await self._http.close()
        await self._control.close()

    def _abort_soon(self, rid: str) -> None:
        """Sends an abort in the background, since the caller is ending; ``close`` waits for it."""
        task = asyncio.get_running_loop().create_task(self._abort(rid), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, rid: str) -> None:
        body = {"rid": rid, "abort_all": False}
        try:
            await self._control.call("POST", "/abort_request", body, timeout_s=_ABORT_S)
        except RealsysError:
            pass  # the server is gone, and the request with it
