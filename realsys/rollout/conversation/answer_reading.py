"""How a session reads an answer: whether the prompt has opened its thoughts, and not on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from realsys.api.basics.thoughts import THINK
from realsys.rollout.conversation.answer_forms import AnswerForm, ParsedAnswer
from realsys.rollout.conversation.forms.call_syntax import Schemas

_LAST_TOKENS = 16  # of a prompt, enough for a mark at its end
_LONG_CHARACTERS = 16_384  # of an answer that others need not wait for


def opens_thoughts(
    form: AnswerForm, prompt: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> bool:
    """Returns whether a prompt ends with a mark of thoughts that the form alone knows.

    Renderers look for the usual one themselves.
    """
    openings = tuple(opening for opening, _ in form.thought_marks if opening != THINK[0])
    return bool(openings) and decode(prompt[-_LAST_TOKENS:]).rstrip().endswith(openings)


async def read_answer(
    form: AnswerForm, text: str, *, thinking: bool, tools: bool, schemas: Schemas
) -> ParsedAnswer:
    """Takes a whole answer apart, see ``AnswerForm.parse``; a long one in a thread."""
    if len(text) <= _LONG_CHARACTERS:
        return form.parse(text, thinking=thinking, tools=tools, schemas=schemas)
    return await asyncio.to_thread(
        form.parse, text, thinking=thinking, tools=tools, schemas=schemas
    )
