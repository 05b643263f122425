"""SGLang's HTTP API as an aiohttp application over any ``ServedEngine``.

Authenticates callers, parses JSON, limits concurrent requests, and forwards to the engine; decides nothing
about tokens. Requests of a client that disconnects are aborted. Paths: docs/generation_servers.md.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from realsys.api.errors import InternalError, RealsysError, did_you_mean
from realsys.generation.http.http_answers import (
    DONE,
    OVERLOADED,
    UNAUTHORIZED,
    answer_json,
    error_json,
    server_sent_event,
    status_of,
)
from realsys.generation.http.http_json import GenerateCall, read_generate
from realsys.generation.http.served_engine import EngineAnswer, ServedEngine
from realsys.generation.server.http_control import Control
from realsys.generation.server.http_responses import json_response, refused
from realsys.generation.server.http_weights import Weights
from realsys.transport.generation_messages import GenerateRequest
from realsys.transport.http_bodies import request_body
from realsys.transport.http_listener import OPEN_PATHS

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
MAX_REQUESTS = 4096

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def generation_app(
    engine: ServedEngine, *, key: str, max_requests: int = MAX_REQUESTS
) -> web.Application:
    """Makes the application; ``engine`` is started and closed by the caller.

    Args:
        key: what callers must send as ``Authorization: Bearer <key>``.
        max_requests: answers on their way, running and waiting; more are refused with 503.
    """
    app = web.Application(
        client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json, _require_key(key)]
    )
    routes = [
        web.post("/generate", _Generate(engine, max_requests).handle),
        *Control(engine).routes(),
        *Weights(engine).routes(),
    ]
    app.add_routes(routes)
    return app


class _Generate:
    """Handler of /generate: single answers, batches and streams."""

    def __init__(self, engine: ServedEngine, max_requests: int) -> None:
        self._engine, self._max_requests = engine, max_requests
        self._open = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        began_s = time.monotonic()
        call = read_generate(await request_body(request))
        if self._open + len(call.requests) > self._max_requests:
            return refused(
                f"{self._open} answers are on their way and {len(call.requests)} more would be "
                f"over the limit of {self._max_requests}",
                kind="Overloaded",
                status=OVERLOADED,
                fix="send fewer at a time, or use more servers",
            )
        self._open += len(call.requests)
        try:
            if call.stream:
                return await self._stream(request, call, began_s)
            return await self._whole(call, began_s)
        finally:
            self._open -= len(call.requests)

    async def _whole(self, call: GenerateCall, began_s: float) -> web.Response:
        if len(call.requests) == 1:
            answers = [await self._answer(call.requests[0])]
        else:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._answer(r), name=r.rid) for r in call.requests]
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None  # the others were cancelled because of it
            answers = [task.result() for task in tasks]
        seconds = time.monotonic() - began_s
        bodies = [answer_json(answer, seconds=seconds) for answer in answers]
        return json_response(bodies if call.batch else bodies[0])

    async def _answer(self, request: GenerateRequest) -> EngineAnswer:
        async with aclosing(self._engine.generate(request, stream=False)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                if answer.finish is not None:
                    return answer
        raise InternalError(f"request {request.rid!r} ended without an answer", where="/generate")

    async def _stream(
        self, request: web.Request, call: GenerateCall, began_s: float
    ) -> web.StreamResponse:
        """Server-sent events, each the whole answer so far; the last is ``[DONE]``."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[tuple[int, EngineAnswer] | RealsysError | None]
        queue = asyncio.Queue(2 * len(call.requests))  # a slow reader slows its own events

        async def follow(index: int, one: GenerateRequest) -> None:
            async with aclosing(self._engine.generate(one, stream=True)) as answers:  # type: ignore[type-var]
                async for answer in answers:
                    await queue.put((index, answer))

        async def follow_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for i, one in enumerate(call.requests):
                        group.create_task(follow(i, one), name=one.rid)
                await queue.put(None)
            except BaseExceptionGroup as failures:
                await queue.put(_as_ours(failures.exceptions[0]))

        following = asyncio.create_task(follow_all(), name="answers of a stream")
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, RealsysError):  # the status is sent already: it is an event
                    await response.write(
                        server_sent_event(error_json(item, status=status_of(item)))
                    )
                    break
                index, answer = item
                seconds = time.monotonic() - began_s
                body = answer_json(answer, seconds=seconds, index=index if call.batch else None)
                await response.write(server_sent_event(body))
            await response.write(DONE)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await response.write_eof()
        return response


# ---- middlewares ----------------------------------------------------------------------------------


def _require_key(key: str) -> Any:
    """Rejects callers that do not send the key."""
    expected = f"Bearer {key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path in OPEN_PATHS or hmac.compare_digest(sent, expected):
            return await handler(request)
        return refused(
            "the request carries no key of this trial",
            kind="Unauthorized",
            status=UNAUTHORIZED,
            fix="send Authorization: Bearer <key>; realsys/generation/http/secret.py says which",
        )

    return check


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RealsysError as error:
        status = status_of(error)
        return json_response(error_json(error, status=status), status=status)
    except web.HTTPNotFound:
        paths = {r.get_info().get("path", "") for r in request.app.router.resources()}
        fix = did_you_mean(request.path, paths)
        return refused(f"no path {request.path}", kind="NotFound", status=404, fix=fix)
    except web.HTTPException as error:
        what = error.text or error.reason
        return refused(what, kind=type(error).__name__, status=error.status, fix="see the API")
    except ConnectionError:
        raise  # the client has disconnected
    except Exception as error:  # the outermost frame of a request
        logger.exception("request failed path=%s", request.path)
        return json_response(error_json(_as_ours(error), status=500), status=500)


def _as_ours(error: BaseException) -> RealsysError:
    if isinstance(error, RealsysError):
        return error
    return InternalError(f"{type(error).__name__}: {error}", where="generation server")
