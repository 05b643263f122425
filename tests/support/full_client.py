"""A client for all that a generation server offers, of which a run's own processes use a part."""

from __future__ import annotations

from collections.abc import AsyncIterator

from realsys.generation.http.http_answers import read_answer
from realsys.generation.http.http_client import CONTROL_S, HttpGenerationClient
from realsys.generation.http.http_json import generate_body
from realsys.generation.http.served_engine import EngineAnswer
from realsys.transport.generation_messages import GenerateRequest, PauseMode


class FullClient(HttpGenerationClient):
    """Streams, pauses and reads metrics too."""

    async def stream(
        self, request: GenerateRequest, *, timeout_s: float
    ) -> AsyncIterator[EngineAnswer]:
        """Yields the growing answer, complete so far each time. Raises as ``generate``."""
        body, finished = generate_body(request, stream=True), False
        try:
            async for data in self._http.events("/generate", body, timeout_s=timeout_s):
                if data.startswith(b'{"error"'):
                    raise self._http.refusal(data, 200, "/generate")
                answer = read_answer(data, rid=request.rid)
                finished = answer.finish is not None
                yield answer
        finally:
            if not finished:
                self._abort_soon(request.rid)

    async def pause(self, mode: PauseMode = PauseMode.RETRACT) -> None:
        body = {"mode": mode.value}
        await self._control.call("POST", "/pause_generation", body, timeout_s=CONTROL_S)

    async def resume(self) -> None:
        await self._control.call("POST", "/continue_generation", {}, timeout_s=CONTROL_S)

    async def flush_cache(self) -> None:
        await self._control.call("POST", "/flush_cache", timeout_s=CONTROL_S)

    async def metrics(self) -> str:
        return (await self._control.call("GET", "/metrics", timeout_s=CONTROL_S)).decode()
