"""The HTTP side of /v1/completions: answers all prompts of a request together (text_completions.py)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from realsys.api.errors import DataError
from realsys.policy_server.open_sessions import OpenSessions
from realsys.policy_server.text_completions import (
    Completed,
    CompletionRequest,
    CompletionStream,
    Prompt,
    body,
    read,
)
from realsys.rollout.conversation.episode_session import (
    ContextFull,
    SessionPolicy,
    SessionSettings,
)
from realsys.rollout.conversation.growing_answer import HALF_LETTER, GrowingAnswer, GrowingText
from realsys.rollout.conversation.large_texts import beside_loop, text_size
from realsys.rollout.conversation.stop_cut import before_stops, cut_at_stop
from realsys.rollout.dialects.error_bodies import openai_error
from realsys.rollout.dialects.server_sent_events import DONE, data_event
from realsys.rollout.endpoint.endpoint_app import (
    as_ours,
    json_body,
    key_of,
    read_body,
    status_of,
)
from realsys.runtime.first_error import first_error

OnText = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CompletionHandler:
    """Answers requests for completions.

    Args:
        encode: text → tokens, with those that the model's texts begin with.
    """

    sessions: OpenSessions
    encode: Callable[[str], Sequence[int]]

    def add_to(self, app: web.Application) -> None:
        """Adds the paths."""
        for path in ("/v1/completions", "/completions"):
            app.router.add_post(path, self.handle)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers one request, whole or as server-sent events."""
        key = key_of(request)
        settings = self.sessions.settings_of(key)
        asked = read(await read_body(request))
        with self.sessions.place(key) as policy:
            prompts = await beside_loop(
                lambda: [self._tokens(prompt) for prompt in asked.prompts],
                size=text_size(asked.prompts),
            )
            head: dict[str, Any] = {
                "id": f"cmpl-{secrets.token_hex(8)}",
                "created": int(time.time()),
                "model": settings.model,
            }
            if asked.stream:
                return await _streamed(request, policy, settings, prompts, asked, head)
            made = await _completed(policy, settings, prompts, asked)
            return json_body(body(made, asked, **head))

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        tokens = self.encode(prompt) if isinstance(prompt, str) else prompt
        if not tokens:
            raise DataError("a prompt has no tokens", where="prompt", fix="send some text")
        return tokens


async def _completed(
    policy: SessionPolicy,
    settings: SessionSettings,
    prompts: Sequence[Sequence[int]],
    asked: CompletionRequest,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Completed]:
    """Samples all answers at the same time."""

    def text_sink(index: int) -> OnText | None:
        return None if on_text is None else lambda text: on_text(index, text)

    rows = [prompt for prompt in prompts for _ in range(asked.n)]
    async with first_error(), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                _one(policy, settings, prompt, asked, text_sink(i)), name=f"completion {i}"
            )
            for i, prompt in enumerate(rows)
        ]
    return [task.result() for task in tasks]


async def _one(
    policy: SessionPolicy,
    settings: SessionSettings,
    prompt: Sequence[int],
    asked: CompletionRequest,
    on_text: OnText | None,
) -> Completed:
    def text_of(tokens: Sequence[int]) -> str:
        ended = bool(tokens) and tokens[-1] in settings.end_ids
        return settings.decode(tokens[:-1] if ended else tokens)

    growing, growing_text = GrowingAnswer(), GrowingText(settings.decode)

    def on_tokens(tokens: Sequence[int]) -> None:
        if on_text is None or not growing.is_due(len(tokens)):
            return
        ended = tokens[-1] in settings.end_ids
        text = growing_text.of(tokens[:-1] if ended else tokens)
        if not text.endswith(HALF_LETTER):
            on_text(before_stops(text, asked.stop))

    answer = await policy.sample(
        prompt,
        limit=asked.max_tokens,
        stop=asked.stop,
        sampling=asked.sampling,
        on_tokens=None if on_text is None else on_tokens,
    )
    if answer.is_none:
        raise ContextFull(
            f"a prompt of {len(prompt)} tokens fills the model's context length",
            where="prompt",
            fix="send a shorter one",
        )
    count, stop_text = cut_at_stop(answer.tokens, asked.stop, settings.decode)
    text = text_of(answer.tokens[:count])
    pieces = [settings.decode([token]) for token in answer.tokens[:count]] if asked.logprobs else ()
    return Completed(
        text=text[: text.find(stop_text)] if stop_text else text,
        stopped=bool(stop_text) or answer.stopped,
        num_tokens=count,
        num_prompt_tokens=len(prompt),
        token_texts=tuple(pieces),
        token_logprobs=answer.logprobs[:count] if asked.logprobs else (),
    )


async def _streamed(
    request: web.Request,
    policy: SessionPolicy,
    settings: SessionSettings,
    prompts: Sequence[Sequence[int]],
    asked: CompletionRequest,
    head: dict[str, Any],
) -> web.StreamResponse:
    """Writes text as soon as it is sure.

    Nothing is written before there is some, so that an early error is a status.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    texts: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
    stream = CompletionStream(asked, **head)
    making = asyncio.create_task(
        _completed(policy, settings, prompts, asked, lambda i, text: texts.put_nowait((i, text))),
        name="answers of a stream",
    )
    making.add_done_callback(lambda _: texts.put_nowait(None))
    try:
        while (item := await texts.get()) is not None:
            if chunk := stream.text(*item):
                if not response.prepared:
                    await response.prepare(request)
                await response.write(chunk)
        if not response.prepared:
            await making  # raises what a status can tell
            await response.prepare(request)
        if (error := making.exception()) is None:
            await response.write(stream.closing(making.result()))
        else:  # the status has been sent
            ours = as_ours(error)
            await response.write(data_event(openai_error(ours, status_of(ours))) + DONE)
        await response.write_eof()
    finally:
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
    return response
