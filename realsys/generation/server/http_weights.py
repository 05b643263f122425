"""Paths of a generation server that update its weights, from a folder or from trainers.

Registered by http_app.py. Updates run one at a time, and to completion even if the caller has disconnected:
a partial update would be useless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from realsys.api.errors import DataError, RealsysError
from realsys.generation.http.http_answers import error_json, status_of
from realsys.generation.http.http_json import read_body
from realsys.generation.http.served_engine import ServedEngine
from realsys.generation.server.http_responses import json_response
from realsys.transport.generation_messages import WeightSource, WeightsTaken
from realsys.transport.http_bodies import request_body

logger = logging.getLogger(__name__)


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


class _NewVersion(msgspec.Struct):
    new_version: str | int
    abort_all_requests: bool = True  # SGLang's default


class Weights:
    """Handlers of weight updates."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()

    def routes(self) -> list[web.RouteDef]:
        """Routes and their handlers."""
        return [
            web.post("/update_weights_from_disk", self._from_disk),
            web.post("/update_weights_from_stream", self._from_stream),
            web.post("/update_weight_version", self._new_version),
        ]

    async def _from_disk(self, request: web.Request) -> web.Response:
        body = read_body(await request_body(request), _FromDisk, where=request.path)
        if body.load_format not in (None, "auto", "safetensors"):
            raise DataError(
                f"load_format is {body.load_format!r}", where=request.path, fix="leave it out"
            )
        version = body.weight_version
        if version is None:  # tokens of other weights must be distinguishable
            version = (await self._engine.info()).weight_version + 1
        source = WeightSource(version=_number(version, request.path), path=body.model_path)
        if body.abort_all_requests:
            await self._engine.abort("", every=True)
        return await self._update(source)

    async def _from_stream(self, request: web.Request) -> web.Response:
        source = read_body(await request_body(request), WeightSource, where=request.path)
        if bool(source.path) == bool(source.parts):
            fix = "give path, a Hugging Face folder, or parts to fetch"
            raise DataError("path and parts: one of them is needed", where=request.path, fix=fix)
        return await self._update(source)

    async def _update(self, source: WeightSource) -> web.Response:
        try:
            taken: WeightsTaken = await self._to_its_end(
                lambda: self._engine.update_weights(source)
            )
        except RealsysError as error:
            logger.warning("weight update failed version=%d error=%s", source.version, error.what)
            status = status_of(error)
            told = {"success": False, "message": error.what, **error_json(error, status=status)}
            return json_response(told, status=status)
        logger.info(
            "weights updated version=%d seconds=%.3f paused_s=%.4f bytes=%d",
            taken.version,
            taken.seconds,
            taken.paused_s,
            taken.num_bytes,
        )
        done = {"success": True, "message": "Succeeded to update model weights."}
        return json_response({**done, **msgspec.structs.asdict(taken)})

    async def _new_version(self, request: web.Request) -> web.Response:
        body = read_body(await request_body(request), _NewVersion, where=request.path)
        version = _number(body.new_version, request.path)
        if body.abort_all_requests:
            await self._engine.abort("", every=True)
        await self._to_its_end(lambda: self._engine.set_version(version))
        done = {"success": True, "message": f"Weight version updated to {version}"}
        return json_response({**done, "new_version": str(version)})

    async def _to_its_end(self, change: Callable[[], Awaitable[Any]]) -> Any:
        async def one_at_a_time() -> Any:
            async with self._changing:
                return await change()

        task = asyncio.create_task(one_at_a_time(), name="change of weights")
        self._changes.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._changes.discard)
        # Marks the error as retrieved if no caller waits
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        return await asyncio.shield(task)


def _number(version: str | int, where: str) -> int:
    try:
        return int(version)
    except ValueError:
        raise DataError(
            f"weight version {version!r} is not an integer",
            where=where,
            fix="use the number of training steps behind the weights",
        ) from None
