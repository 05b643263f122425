"""Control paths of a generation server: abort, pause, health, information and metrics.

Registered by http_app.py. Changes of weights are in http_weights.py.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import aclosing

import msgspec
from aiohttp import web

from realsys.api.errors import DataError, RealsysError, WorkerLost
from realsys.generation.http.http_json import read_body
from realsys.generation.http.served_engine import Counters, ServedEngine
from realsys.generation.server.http_responses import json_response
from realsys.transport.generation_messages import GenerateRequest, PauseMode, Sampling, ServerInfo
from realsys.transport.http_bodies import request_body

logger = logging.getLogger(__name__)

_HEALTH_S = 20.0
_POLL_S = 0.2


class _Abort(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class _Pause(msgspec.Struct):
    mode: PauseMode = PauseMode.ABORT  # SGLang's default


class _Continue(msgspec.Struct):
    torch_empty_cache: bool = True  # SGLang's; nothing to do here


class Control:
    """Handlers of everything but /generate and weight updates."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        """Routes and their handlers."""
        posts = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
        }
        gets = {
            "/health": self._health,
            "/health_generate": self._health_generate,
            "/ready": self._ready,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
            "/metrics": self._metrics,
            "/flush_cache": self._flush,
        }
        return [
            *(web.post(path, handler) for path, handler in posts.items()),
            *(web.get(path, handler) for path, handler in gets.items()),
        ]

    # ---- requests on their way --------------------------------------------------------------

    async def _abort(self, request: web.Request) -> web.Response:
        body = read_body(await request_body(request), _Abort, where=request.path)
        if not body.rid and not body.abort_all:
            fix = "give rid, or abort_all=true"
            raise DataError("the request names nothing to abort", where=request.path, fix=fix)
        await self._engine.abort(body.rid or "", every=body.abort_all)
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        body = read_body(await request_body(request), _Pause, where=request.path)
        await self._engine.pause(body.mode)
        return _ok("Generation paused successfully.")

    async def _continue(self, request: web.Request) -> web.Response:
        read_body(await request_body(request), _Continue, where=request.path)
        await self._engine.resume()
        return _ok("Generation continued successfully.")

    async def _flush(self, request: web.Request) -> web.Response:
        await self._engine.flush()
        return web.Response(text="Cache flushed.\n")

    # ---- how it does ------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if await self._alive() else 503)

    async def _ready(self, request: web.Request) -> web.Response:
        try:
            paused = (await self._engine.info()).paused
        except RealsysError:
            paused = True
        return web.Response(status=503 if paused else 200)

    async def _health_generate(self, request: web.Request) -> web.Response:
        """Returns 200 if a token is generated, for this check or any other request.

        A paused server generates none, and is healthy if it responds.
        """
        sampling = Sampling(max_new_tokens=1, temperature=0, ignore_eos=True)
        probe = GenerateRequest(rid=f"health-{uuid.uuid4().hex}", input_ids=(0,), sampling=sampling)
        before = self._engine.counters.progress
        task = asyncio.create_task(self._one_token(probe), name=probe.rid)
        try:
            async with asyncio.timeout(_HEALTH_S):
                while not task.done():
                    await asyncio.wait({task}, timeout=_POLL_S)
                    if self._engine.counters.progress != before:
                        return web.Response()
                    if (await self._engine.info()).paused:
                        return web.Response()
            task.result()
        except (RealsysError, TimeoutError) as error:
            logger.warning("health check failed error=%r", error)
            return web.Response(status=503)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return web.Response()

    async def _one_token(self, probe: GenerateRequest) -> None:
        async with aclosing(self._engine.generate(probe, stream=False)) as answers:  # type: ignore[type-var]
            async for _ in answers:
                pass

    async def _alive(self) -> bool:
        try:
            await self._engine.info()
        except WorkerLost:
            return False
        return True

    async def _model_info(self, request: web.Request) -> web.Response:
        info = await self._engine.info()
        return json_response(
            {
                "model_path": info.model_path,
                "tokenizer_path": info.model_path,
                "is_generation": True,
                "weight_version": str(info.weight_version),
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        return json_response(await self._engine.info())

    async def _loads(self, request: web.Request) -> web.Response:
        info = await self._engine.info()
        load = {
            "dp_rank": 0,
            "num_running_reqs": info.num_running,
            "num_waiting_reqs": info.num_waiting,
            "num_total_reqs": info.num_running + info.num_waiting,
            "num_used_tokens": info.num_tokens,
            "max_running_requests": info.max_running,
        }
        return json_response({"dp_rank_count": 1, "loads": [load]})

    async def _metrics(self, request: web.Request) -> web.Response:
        text = prometheus_text(await self._engine.info(), self._engine.counters)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")


def _ok(message: str) -> web.Response:
    return json_response({"message": message, "status": "ok"})


# ---- Formats a server's metrics in Prometheus's text format (pure).


def prometheus_text(info: ServerInfo, counters: Counters) -> str:
    """Formats all metrics, each with its help and type (exposition format 0.0.4)."""
    rows = [
        ("num_running_requests", "gauge", "Requests that are being decoded.", info.num_running),
        ("num_waiting_requests", "gauge", "Requests that wait for room.", info.num_waiting),
        ("num_used_tokens", "gauge", "Tokens of all requests.", info.num_tokens),
        ("max_running_requests", "gauge", "Most requests decoded together.", info.max_running),
        ("paused", "gauge", "1 while generation is paused.", int(info.paused)),
        ("weight_version", "gauge", "Training steps behind the weights.", info.weight_version),
        ("prompt_tokens_total", "counter", "Prompt tokens.", counters.prompt_tokens),
        ("cached_tokens_total", "counter", "Prompt tokens not computed.", counters.cached_tokens),
        ("generated_tokens_total", "counter", "Tokens made.", counters.generated_tokens),
        ("requests_total", "counter", "Requests that ended.", counters.finished),
        ("aborted_requests_total", "counter", "Requests that were aborted.", counters.aborted),
        ("weight_updates_total", "counter", "Changes of weights.", counters.weight_updates),
        ("weight_update_seconds_total", "counter", "Time they took.", counters.update_s),
        (
            "weight_update_paused_seconds_total",
            "counter",
            "Time that decoding stood still for them.",
            counters.update_paused_s,
        ),
    ]
    lines = []
    for name, kind, text, value in rows:
        full = f"realsys_{name}"
        labels = f'engine="{info.engine}"'
        lines += [
            f"# HELP {full} {text}",
            f"# TYPE {full} {kind}",
            f"{full}{{{labels}}} {value}",
        ]
    return "\n".join(lines) + "\n"
