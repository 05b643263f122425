"""Answers that go on with the last message of a request: what is refused, told and remembered (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from realsys.api.errors import DataError
from realsys.rollout.conversation.answer_forms import AnswerForm
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest, ToolChoice

_LAST_TOKENS = 8  # of a context: a decoder looks back no further


def check_continued(request: ChatRequest, text: str, form: AnswerForm, *, is_held: bool) -> None:
    """Refuses what would be read otherwise than it is meant.

    Args:
        text: what is to go on, as the policy or the client wrote it.
        is_held: answers are held to schemas.
    Raises:
        DataError: a call was begun, or the answer is to follow a schema.
    """
    syntax = form.syntax if request.tools else None
    if syntax is not None and any(mark in text for mark in syntax.marks):
        raise DataError(
            "an answer with a call can't go on",
            where="messages, the last one",
            fix="end with a question or a tool's result",
        )
    chosen = request.tool_choice in (ToolChoice.REQUIRED, ToolChoice.ONE)
    if is_held and (request.has_form or chosen or request.allowed_tools):
        raise DataError(
            "an answer that goes on can't be held to a schema",
            where=request.schema_field if request.has_form else "tool_choice",
            fix="leave it out, or end with a question",
        )


def last_of(context: Sequence[int]) -> list[int]:
    """Returns the tokens of a context with which those behind it are decoded."""
    return [*context[-_LAST_TOKENS:]]


def text_behind(
    decode: Callable[[Sequence[int]], str], last: Sequence[int], tokens: Sequence[int]
) -> str:
    """Decodes tokens that go on with a text: alone, some decoders leave out a first blank.

    Args:
        last: ``last_of`` what they go on with.
    """
    before, text = decode(last), decode([*last, *tokens])
    return text[len(before) :] if text.startswith(before) else decode(tokens)


def with_reply(
    request: ChatRequest, reply: ChatMessage, cut: ChatMessage | None
) -> list[ChatMessage]:
    """Returns the conversation with the reply, which may be the rest of its last message.

    Args:
        cut: the answer of the policy that goes on, with its thoughts, which most clients don't send back;
            None: a message of the client's.
    """
    if not request.continues:
        return [*request.messages, reply]
    *before, last = request.messages
    prefill = cut or last
    content, reasoning = prefill.content + reply.content, prefill.reasoning + reply.reasoning
    return [*before, replace(reply, content=content, reasoning=reasoning)]
