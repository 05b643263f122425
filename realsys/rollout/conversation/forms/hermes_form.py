"""Calls as JSON between tags: Hermes, Qwen2.5, Qwen3, SmolLM2 and SmolLM3."""

from __future__ import annotations

from realsys.rollout.conversation.forms.answer_scan import MarkedForm
from realsys.rollout.conversation.forms.call_syntax import (
    JSON_STRING_IN_LINE,
    CallBlock,
    JsonCallTexts,
    Schemas,
    block_between,
    up_to,
)
from realsys.rollout.conversation.forms.strict_json import call_of_object, read_json

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_INSIDE = up_to(_CLOSING, argument=JSON_STRING_IN_LINE)


class HermesCalls:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of times.

    A missing closing tag at the end of the text is forgiven, as servers do: it may have been a stop text.
    """

    marks = (_OPENING,)
    json_texts = JsonCallTexts(
        arguments="arguments",
        before=_OPENING + "\n",
        between=f"\n{_CLOSING}\n{_OPENING}\n",
        after="\n" + _CLOSING,
    )

    def begins_at_start(self, text: str, start: int, *, whole: bool) -> bool:
        return False

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        inner, end, closed = block_between(text, start, _OPENING, _CLOSING, _INSIDE)
        try:
            call = call_of_object(read_json(inner), "arguments")
        except ValueError as error:
            return CallBlock(end=end, fault=str(error), decided=closed)
        return CallBlock(end=end, calls=(call,), decided=closed)


HERMES = MarkedForm(name="hermes", syntax=HermesCalls())
