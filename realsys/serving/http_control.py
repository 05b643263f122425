"""The control paths of a generation server: abort, pause, weights, health, what it is and does.

Registered by app.py. Changes of weights are made one at a time, and to their end even if who asked
for them has gone.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from realsys.api.errors import DataError, RealsysError, WorkerLost
from realsys.serving.api import (
    GenerateRequest,
    PauseMode,
    Sampling,
    WeightPart,
    WeightSource,
    WeightsTaken,
)
from realsys.serving.engines import ServedEngine
from realsys.serving.http_answers import error_json, status_of
from realsys.serving.http_json import read_body
from realsys.serving.prometheus import prometheus_text

logger = logging.getLogger(__name__)

_HEALTH_S = 20.0
_LOOK_S = 0.2


class _Abort(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class _Pause(msgspec.Struct):
    mode: PauseMode = PauseMode.ABORT  # SGLang's default


class _Continue(msgspec.Struct):
    torch_empty_cache: bool = True  # SGLang's; nothing to do here


class _FromDisk(msgspec.Struct):
    model_path: str
    weight_version: str | int | None = None
    load_format: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    token_step: int = 0


class _FromStream(msgspec.Struct):
    version: int
    path: str = ""
    parts: tuple[WeightPart, ...] = ()


class _NewVersion(msgspec.Struct):
    new_version: str | int
    abort_all_requests: bool = True  # SGLang's default


class Control:
    """Handlers of everything but /generate."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()

    def routes(self) -> list[web.RouteDef]:
        """Paths and what serves them."""
        posts = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_stream": self._from_stream,
            "/update_weight_version": self._new_version,
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
        body = read_body(await request.read(), _Abort, where=request.path)
        if not body.rid and not body.abort_all:
            fix = "give rid, or abort_all=true"
            raise DataError("nothing to abort is named", where=request.path, fix=fix)
        await self._engine.abort(body.rid or "", every=body.abort_all)
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), _Pause, where=request.path)
        await self._engine.pause(body.mode)
        return _ok("Generation paused successfully.")

    async def _continue(self, request: web.Request) -> web.Response:
        read_body(await request.read(), _Continue, where=request.path)
        await self._engine.resume()
        return _ok("Generation continued successfully.")

    async def _flush(self, request: web.Request) -> web.Response:
        await self._engine.flush()
        return web.Response(text="Cache flushed.\n")

    # ---- weights ----------------------------------------------------------------------------

    async def _from_disk(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), _FromDisk, where=request.path)
        if body.load_format not in (None, "auto", "safetensors"):
            raise DataError(
                f"load_format is {body.load_format!r}", where=request.path, fix="leave it out"
            )
        version = body.weight_version
        if version is None:  # tokens of other weights must be told from those before
            version = (await self._engine.info()).weight_version + 1
        source = WeightSource(version=_number(version, request.path), path=body.model_path)
        if body.abort_all_requests:
            await self._engine.abort("", every=True)
        return await self._update(source)

    async def _from_stream(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), _FromStream, where=request.path)
        if bool(body.path) == bool(body.parts):
            fix = "give path, a Hugging Face folder, or parts to fetch"
            raise DataError("path and parts: one of them is needed", where=request.path, fix=fix)
        return await self._update(
            WeightSource(version=body.version, path=body.path, parts=body.parts)
        )

    async def _update(self, source: WeightSource) -> web.Response:
        try:
            taken: WeightsTaken = await self._to_its_end(
                lambda: self._engine.update_weights(source)
            )
        except RealsysError as error:
            logger.warning("weights not taken version=%d error=%s", source.version, error.what)
            status = status_of(error)
            told = {"success": False, "message": error.what, **error_json(error, status=status)}
            return _json(told, status=status)
        logger.info(
            "weights taken version=%d seconds=%.3f paused_s=%.4f bytes=%d",
            taken.version,
            taken.seconds,
            taken.paused_s,
            taken.num_bytes,
        )
        done = {"success": True, "message": "Succeeded to update model weights."}
        return _json({**done, **msgspec.structs.asdict(taken)})

    async def _new_version(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), _NewVersion, where=request.path)
        version = _number(body.new_version, request.path)
        if body.abort_all_requests:
            await self._engine.abort("", every=True)
        await self._to_its_end(lambda: self._engine.set_version(version))
        done = {"success": True, "message": f"Weight version updated to {version}"}
        return _json({**done, "new_version": str(version)})

    async def _to_its_end(self, change: Callable[[], Awaitable[Any]]) -> Any:
        async def one_at_a_time() -> Any:
            async with self._changing:
                return await change()

        task = asyncio.create_task(one_at_a_time(), name="change of weights")
        self._changes.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._changes.discard)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # seen, if nobody waits
        return await asyncio.shield(task)

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
        """200 if a token comes: one for this check, or any other. A paused server makes none, and is well
        as long as it answers."""
        sampling = Sampling(max_new_tokens=1, temperature=0, ignore_eos=True)
        probe = GenerateRequest(rid=f"health-{uuid.uuid4().hex}", input_ids=(0,), sampling=sampling)
        before = self._engine.counters.progress
        task = asyncio.create_task(self._one_token(probe), name=probe.rid)
        try:
            async with asyncio.timeout(_HEALTH_S):
                while not task.done():
                    await asyncio.wait({task}, timeout=_LOOK_S)
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
        return _json(
            {
                "model_path": info.model_path,
                "tokenizer_path": info.model_path,
                "is_generation": True,
                "weight_version": str(info.weight_version),
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        return _json(await self._engine.info())

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
        return _json({"dp_rank_count": 1, "loads": [load]})

    async def _metrics(self, request: web.Request) -> web.Response:
        text = prometheus_text(await self._engine.info(), self._engine.counters)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")


def _number(version: str | int, where: str) -> int:
    try:
        return int(version)
    except ValueError:
        raise DataError(
            f"weight version {version!r} is no whole number",
            where=where,
            fix="use the number of training steps behind the weights",
        ) from None


def _ok(message: str) -> web.Response:
    return _json({"message": message, "status": "ok"})


def _json(body: Any, *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )
