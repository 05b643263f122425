"""Samples one reply of a request, publishes its text while it grows, and reads it when it has ended."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from realsys.api.agent import Answer, AnswerSoFar
from realsys.rollout.conversation.answer_reading import read_answer
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatReply,
    ChatRequest,
    FinishReason,
    TokenLogprob,
    ToolCall,
    ToolChoice,
)
from realsys.rollout.conversation.continued_answer import last_of, text_behind
from realsys.rollout.conversation.forms.parsed_answer import ParsedAnswer
from realsys.rollout.conversation.full_context import context_full
from realsys.rollout.conversation.growing_answer import HALF_LETTER, GrowingAnswer, GrowingText
from realsys.rollout.conversation.pending_call import CallPlace, PendingCall
from realsys.rollout.conversation.session_settings import SessionPolicy, SessionSettings
from realsys.rollout.conversation.stop_cut import before_stops, cut_at_stop


@dataclass(frozen=True, kw_only=True)
class SampledReply:
    """What came of sampling a reply.

    Attributes:
        answer: what was sampled now; None: nothing was left to sample.
        reply: all of it.
        num_faults: texts in it that looked like calls and could not be read.
    """

    answer: Answer | None
    reply: ChatReply
    num_faults: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplySampler:
    """Samples the replies of a session.

    Attributes:
        session: its id, of which those of calls of tools are made.
        asked: when, of answers that are on their way.
    """

    session: str
    policy: SessionPolicy
    settings: SessionSettings
    asked: list[float] = field(default_factory=list)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        began_s = asyncio.get_running_loop().time()
        self.asked.append(began_s)
        try:
            yield
        finally:
            self.asked.remove(began_s)

    async def reply(
        self, call_number: int, number: int, request: ChatRequest, work: PendingCall
    ) -> SampledReply:
        """Samples reply ``number`` of a call, or the rest of one that was left."""
        place, growing_reply = work.places[number], work.replies[number]
        context, thinking = place.context, place.prompt.thinking
        prefix = growing_reply.prefix_answer()
        has_tools = bool(request.tools) and request.tool_choice is not ToolChoice.NONE
        form, growing = self.settings.form_of(request), GrowingAnswer()
        growing_text: GrowingText | None = None
        # What is kept here for as long as the session must not hold the context, or it grows by its square
        last = last_of(context) if request.continues or request.prompts else []
        settings, stops = self.settings, request.stop

        def text_of(tokens: Sequence[int]) -> str:
            text = settings.without_end(tokens)
            if last:  # what it goes on with may end with such a token, too
                return text_behind(settings.decode, last, text)
            return settings.decode(text)

        def sure(text: str) -> str:
            kept = before_stops(text, stops)
            return form.safe_prefix(kept, thinking=thinking, tools=has_tools)

        def on_tokens(tokens: Sequence[int]) -> None:
            growing_reply.sampled = tokens if isinstance(tokens, AnswerSoFar) else None
            if not growing.is_due(len(tokens)):
                return
            nonlocal growing_text
            if growing_text is None:
                growing_text = GrowingText(settings.decode, whole=text_of, before=last)
            grown = (*prefix.tokens, *tokens) if prefix.tokens else tokens
            text = growing_text.of(settings.without_end(grown))
            if not text.endswith(HALF_LETTER):
                work.publish(number, sure(text), len(prefix.tokens) + len(tokens))

        growing_reply.sure = lambda tokens: sure(text_of(tokens))
        growing_reply.thoughts = lambda tokens: (
            form.parse(text_of(tokens), thinking=thinking, tools=has_tools).reasoning
        )
        answer = prefix
        if not _is_whole(prefix, request, text_of):
            with self._noted():
                answer = await self.policy.sample(
                    [*context, *prefix.tokens],
                    limit=request.max_tokens,
                    stop=request.stop,
                    sampling=request.sampling,
                    on_tokens=on_tokens if work.is_streamed else None,
                    grammar=place.grammar,
                    **({"answer_prefix": len(prefix.tokens)} if prefix.tokens else {}),
                )
            answer = prefix.joined(answer)
        if answer.is_none:
            raise context_full(
                len(context),
                num_answer=request.max_tokens,
                context_length=answer.context_length,
                what="prompt" if request.prompts else "conversation",
                where="prompt" if request.prompts else "messages",
            )
        count, stop_text = cut_at_stop(answer.tokens, stops, text_of)
        answer = replace(answer.part(0, count), stopped=bool(stop_text) or answer.stopped)
        rest = answer.part(len(prefix.tokens), count)
        growing_reply.sampled = AnswerSoFar.of(rest)
        text = text_of(answer.tokens)
        if stop_text:
            text = text[: text.find(stop_text)]
        parsed = await read_answer(
            form, text, thinking=thinking, tools=has_tools, schemas=_schemas(request)
        )
        reply = self._read(answer, parsed, request, place, (call_number, number), stop_text)
        return SampledReply(
            answer=rest if rest.tokens or not prefix.tokens else None,
            reply=reply,
            num_faults=len(parsed.faults),
        )

    def _read(
        self,
        answer: Answer,
        parsed: ParsedAnswer,
        request: ChatRequest,
        place: CallPlace,
        number: tuple[int, int],
        stop_text: str,
    ) -> ChatReply:
        """Returns the reply of an answer that was parsed; ``number`` is its call's and its own."""
        calls = tuple(
            ToolCall(id=self._tool_call_id(*number, i), name=c.name, arguments=c.arguments)
            for i, c in enumerate(parsed.calls)
        )
        message = ChatMessage(
            role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=calls
        )
        finish = FinishReason.STOP if answer.stopped else FinishReason.LENGTH
        if calls and answer.stopped:
            finish = FinishReason.TOOL_CALLS
        return ChatReply(
            message=message,
            finish=finish,
            stop_text=stop_text,
            logprobs=self._logprobs(answer) if request.logprobs else (),
            num_tokens=len(answer.tokens),
            token_ids=answer.tokens if request.token_ids else (),
            prompt_ids=tuple(place.context) if request.token_ids else (),
        )

    def _tool_call_id(self, *place: int) -> str:
        """Returns an id of nine letters and digits, as some templates want them."""
        text = "/".join((self.session, *map(str, place)))
        return hashlib.blake2b(text.encode()).hexdigest()[:9]

    def _logprobs(self, answer: Answer) -> tuple[TokenLogprob, ...]:
        return tuple(
            TokenLogprob(text=self.settings.decode([token]), logprob=logprob)
            for token, logprob in zip(answer.tokens, answer.logprobs, strict=True)
        )


def _is_whole(
    prefix: Answer, request: ChatRequest, text_of: Callable[[Sequence[int]], str]
) -> bool:
    """Whether nothing may follow on what a client had got of a reply."""
    _, stop_text = cut_at_stop(prefix.tokens, request.stop, text_of)
    limit = request.max_tokens
    return bool(stop_text) or (limit is not None and len(prefix.tokens) >= limit)


def _schemas(request: ChatRequest) -> dict[str, Any]:
    """Returns the schemas of the tools' arguments by the tools' names."""
    functions = [tool.get("function", {}) for tool in request.tools]
    return {f["name"]: f.get("parameters") or {} for f in functions if "name" in f}
