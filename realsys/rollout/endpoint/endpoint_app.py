"""The endpoint as an aiohttp application: finds the session, has it answer, notes what was read.

    /v1/chat/completions  /v1/completions  /v1/responses  /v1/messages  /v1/messages/count_tokens
    /v1/models  /health
    /sessions/KEY/…       the same, for clients whose key can't be set
    /openai/v1/…  /openai/deployments/NAME/…   the same again, for clients of Azure's
    /rl/start_session  /rl/set_reward  /rl/end_session   of episodes alone

A reply counts as read when its last byte has been written to a connection that is still there. One whose
client leaves its stream ends with what was written (pending_call.py). Of a whole reply a client gets
nothing before all of it: if it leaves, the answer goes on, and its retry gets the same one.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from typing import Any

from aiohttp import web

from realsys.api.basics.reward import LARGEST
from realsys.api.errors import DataError
from realsys.rollout.conversation.chat_messages import ChatRequest, ChatResult, Unserved
from realsys.rollout.conversation.chat_rendering import request_args
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.conversation.large_texts import beside_loop, size_of
from realsys.rollout.dialects import (
    anthropic_messages,
    body_fields,
    chat_completions,
    responses_api,
    text_completions,
)
from realsys.rollout.dialects.dialect import Dialect, StreamEncoder
from realsys.rollout.dialects.model_list import (
    anthropic_model,
    anthropic_model_list,
    openai_model,
    openai_model_list,
)
from realsys.rollout.endpoint.error_replies import (
    Handler,
    SlowBody,
    as_ours,
    errors_as_replies,
    json_body,
    status_of,
)
from realsys.rollout.endpoint.session_registry import SessionFinder, SessionRegistry, UnknownKey
from realsys.transport.http_bodies import request_body

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 << 20
LARGE_BODY_BYTES = 1 << 18
_KEY = re.compile(r"[A-Za-z0-9._-]{8,256}")
PING_S = 10.0  # a stream without text for so long gets a sign of life
_KIND_CHARS, _MOST_KINDS = 80, 100  # of what is logged: clients choose the types of their tools
MOST_WAIT_S = 60.0  # for an episode; clients ask again
# A body must arrive within BODY_S, and as long as its bytes take at this rate.
BODY_S, BODY_BYTES_PER_S = 30.0, 1 << 20

AZURE_BASES = ("/openai/v1", "/openai", "/openai/deployments/{deployment}")


def endpoint_app(registry: SessionRegistry) -> web.Application:
    """Makes the application over the episodes of ``registry``, with the paths of their lives."""
    app = answering_app(registry)
    lives = _SessionLives(registry)
    for base in ("", "/sessions/{key}"):
        app.router.add_post(f"{base}/rl/set_reward", lives.set_reward)
        app.router.add_post(f"{base}/rl/end_session", lives.end_session)
    app.router.add_post("/rl/start_session", lives.start_session)
    return app


def answering_app(finder: SessionFinder) -> web.Application:
    """Makes the application that answers in the sessions of ``finder``."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors_as_replies])
    handlers = _Handlers(finder)
    routes: list[web.RouteDef] = [web.get("/health", _health)]
    for base in ("", "/sessions/{key}"):
        # Clients append /v1 to their base URL, or don't; those of Azure's have paths of their own
        for version in ("/v1", "", *AZURE_BASES):
            at = base + version
            routes += [
                web.post(f"{at}/chat/completions", handlers.replies(chat_completions)),
                web.post(f"{at}/completions", handlers.replies(text_completions)),
                web.post(f"{at}/responses", handlers.replies(responses_api)),
                web.post(f"{at}/messages", handlers.replies(anthropic_messages)),
                web.post(f"{at}/messages/count_tokens", handlers.count_tokens),
                web.get(f"{at}/models", handlers.models),
                web.get(f"{at}/models/{{model:.+}}", handlers.models),
            ]
    app.add_routes(routes)
    return app


class _Handlers:
    """What the paths do at which the policy answers."""

    def __init__(self, finder: SessionFinder) -> None:
        self._finder = finder
        self._started = time.time()
        self._logged: set[str] = set()  # kinds of tools and parts that were left out

    def _log_left_out(self, asked: ChatRequest) -> None:
        """Logs each kind of what requests were served without, once in the endpoint's life."""
        for kind in dict.fromkeys(text[:_KIND_CHARS] for text in asked.left_out):
            if kind not in self._logged and len(self._logged) < _MOST_KINDS:
                self._logged.add(kind)
                logger.warning("requests are served without it, by unserved=drop what=%s", kind)

    def replies(self, dialect: Dialect) -> Handler:
        """Makes the handler of a path at which the policy answers."""

        async def handle(request: web.Request) -> web.StreamResponse:
            key = key_of(request)
            settings = self._finder.settings_of(key)  # before anything is read of an unknown client
            asked = await _asked(dialect, request, settings.unserved)
            self._log_left_out(asked)
            async with self._finder.lent(key) as session:
                if asked.stream:
                    return await _streamed(request, session, asked, dialect)
                async with session.call(asked) as live:
                    result = await live.result()
                    response = json_body(dialect.body(result, asked))
                    await response.prepare(request)
                    await response.write_eof()
                    live.read()
                return response

        return handle

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        settings = self._finder.settings_of(key_of(request))
        asked = await _asked(anthropic_messages, request, settings.unserved)
        args = request_args(asked, settings.renderer)
        rendered = await beside_loop(
            lambda: settings.renderer.whole(
                asked.messages,
                asked.tools,
                args=args,
                continues=asked.continues and settings.renderer.can_continue,
            ),
            size=size_of(asked),
        )
        return json_body(anthropic_messages.count_tokens_body(len(rendered.tokens)))

    async def models(self, request: web.Request) -> web.StreamResponse:
        name = self._finder.settings_of(key_of(request)).model
        wanted = request.match_info.get("model")
        created = int(self._started)
        if "anthropic-version" in request.headers:
            return json_body(
                anthropic_model_list([name], created)
                if wanted is None
                else anthropic_model(wanted, created)
            )
        return json_body(
            openai_model_list([name], created) if wanted is None else openai_model(wanted, created)
        )


class _SessionLives:
    """What the paths do with which clients start, reward and end episodes."""

    def __init__(self, registry: SessionRegistry) -> None:
        self._registry = registry

    async def start_session(self, request: web.Request) -> web.StreamResponse:
        if not self._registry.is_admin(_sent_key(request)):
            raise _unauthorized("the administrator's key", "starting a session")
        body = _object(await read_body(request), "task_id", "api_key", "wait_s")
        key, started = await self._registry.start(
            task_id=str(body.get("task_id") or ""),
            key=self._own_key(body.get("api_key")),
            wait_s=min(MOST_WAIT_S, _number(body.get("wait_s", 0.0), "wait_s")),
        )
        base = f"{request.scheme}://{request.host}"
        return json_body(
            {
                "session_id": started.session.id,
                "api_key": key,
                "base_url": f"{base}/v1",
                "session_url": f"{base}/sessions/{key}/v1",
                "task": dict(started.task),
            }
        )

    def _own_key(self, given: Any) -> str:
        """Returns the key that a client wants its session to have; empty: one is made."""
        if given in (None, ""):
            return ""
        if (
            not isinstance(given, str)
            or not _KEY.fullmatch(given)
            or self._registry.is_admin(given)
        ):
            raise DataError(
                "this can't be a session's key",
                where="api_key",
                fix="send 8 to 256 letters, digits and . _ - that are not the administrator's key",
            )
        return given

    async def set_reward(self, request: web.Request) -> web.StreamResponse:
        session = self._registry.find(key_of(request))
        body = _object(await read_body(request), "reward", "interaction_id")
        reward = _number(body.get("reward"), "reward")
        if abs(reward) > LARGEST:
            raise DataError(
                f"{reward!r} is too large", where="reward", fix="send a number that float32 holds"
            )
        call_id = body.get("interaction_id")
        session.set_reward(reward, call_id=None if call_id is None else str(call_id))
        return json_body({"session_id": session.id, "reward": reward})

    async def end_session(self, request: web.Request) -> web.StreamResponse:
        ended = await self._registry.end(key_of(request))
        return json_body({"session_id": ended.id, "reward": ended.reward})


async def _asked(dialect: Dialect, request: web.Request, unserved: Unserved) -> ChatRequest:
    """Reads what a client asks for; a large body, as one with a large schema, beside other requests."""
    body = await read_body(request)
    if len(body) <= LARGE_BODY_BYTES:
        return dialect.read(body, request.headers, unserved=unserved)
    return await asyncio.to_thread(dialect.read, body, request.headers, unserved=unserved)


async def _streamed(
    request: web.Request, session: EpisodeSession, asked: ChatRequest, dialect: Dialect
) -> web.StreamResponse:
    """Writes a reply as server-sent events, its text as soon as it is sure.

    Nothing is written before there is something to write, so that an early error is a status.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    texts: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    async with session.call(asked, on_text=lambda i, text: texts.put_nowait((i, text))) as live:
        result = asyncio.ensure_future(live.result())
        try:
            encoder, sent, is_open = dialect.stream(asked), dict[int, str](), False

            def opening(num_prompt: int, num_cached: int) -> bytes:
                return encoder.opening(
                    live.id,
                    live.created,
                    session.model_of(asked),
                    num_prompt_tokens=num_prompt,
                    num_cached=num_cached,
                )

            while not result.done():
                text = await _next_text(texts, result)
                if result.done():
                    break
                if not response.prepared:
                    await response.prepare(request)
                if not is_open and (counts := live.prompt_tokens()) is not None:
                    is_open = True
                    await response.write(opening(*counts))
                event = encoder.ping() if text is None else _new(text, sent, encoder)
                if text is not None and event and _is_there(request):
                    live.wrote(*text)
                await response.write(event)
            if not response.prepared:
                await result  # raises what a status can tell
                await response.prepare(request)
            if not is_open and (counts := live.prompt_tokens()) is not None:
                await response.write(opening(*counts))
            if (error := result.exception()) is None:
                closing = encoder.closing(result.result())
                if _is_there(request):
                    live.read()
                await response.write(closing)
            else:  # the status has been sent
                ours = as_ours(error)
                await response.write(encoder.failed(ours, status_of(ours)))
            await response.write_eof()
        except ConnectionError:
            raise  # the client has left
        except Exception as error:
            if not response.prepared:
                raise
            # A status can't tell it any more, and who waits for the stream's end must not wait for ever
            logger.exception("stream failed path=%s", request.path)
            ours = as_ours(error)
            await response.write(encoder.failed(ours, status_of(ours)))
            await response.write_eof()
        finally:
            result.cancel()
            await asyncio.gather(result, return_exceptions=True)
    return response


def _is_there(request: web.Request) -> bool:
    """False if the client is known to have left: what is written now reaches nobody."""
    return request.transport is not None and not request.transport.is_closing()


async def _next_text(
    texts: asyncio.Queue[tuple[int, str]], result: asyncio.Future[ChatResult]
) -> tuple[int, str] | None:
    """Waits for text, the result, or the time of a sign of life; returns the text if there is any."""
    waiting = asyncio.ensure_future(texts.get())
    try:
        either: set[asyncio.Future[Any]] = {waiting, result}
        await asyncio.wait(either, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        waiting.cancel()


def _new(text: tuple[int, str], sent: dict[int, str], encoder: StreamEncoder) -> bytes:
    """Returns the event of what ``text`` has more than was sent of this reply."""
    index, whole = text
    before = sent.get(index, "")
    if len(whole) <= len(before) or not whole.startswith(before):
        return b""
    sent[index] = whole
    return encoder.text(index, whole[len(before) :])


# ---- keys, errors, JSON ---------------------------------------------------------------------------


async def _health(_: web.Request) -> web.StreamResponse:
    return json_body({"status": "ok"})


def _sent_key(request: web.Request) -> str:
    """Returns the key that a client has sent, as OpenAI's, Anthropic's or Azure's do."""
    sent = request.headers.get("Authorization", "")
    kind, _, key = sent.partition(" ")
    if kind.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key", "") or request.headers.get("api-key", "")


def key_of(request: web.Request) -> str:
    """Returns the key of the session that a request is for."""
    return request.match_info.get("key") or _sent_key(request)


async def read_body(request: web.Request) -> bytes:
    """Reads a request's body. Call it before the request takes a place that others wait for.

    Raises:
        SlowBody: it did not arrive in time. web.HTTPException: as ``request_body``.
    """
    size = MAX_BODY_BYTES if request.content_length is None else request.content_length
    limit_s = BODY_S + min(size, MAX_BODY_BYTES) / BODY_BYTES_PER_S
    try:
        async with asyncio.timeout(limit_s):
            return await request_body(request)
    except TimeoutError:
        raise SlowBody(
            f"the body was not there after {limit_s:.0f} s", where=request.path, fix="send it again"
        ) from None


def _unauthorized(what: str, whom: str) -> UnknownKey:
    return UnknownKey(
        f"{whom} needs {what}", where="header Authorization", fix="send Authorization: Bearer KEY"
    )


def _object(body: bytes, *known: str) -> dict[str, Any]:
    """Returns the fields of a request for an episode's life; refuses others than ``known``, if given."""
    read = body_fields.decoded(body or b"{}", dict[str, Any])
    if known:
        body_fields.known_fields(read, known)
    return read


def _number(value: Any, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -sys.float_info.max <= value <= sys.float_info.max:
        raise DataError(f"{value!r:.100} is no finite number", where=where, fix="send a number")
    return float(value)
