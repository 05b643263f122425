"""Calls behind ``[TOOL_CALLS]``: Mistral, both the list of JSON and the newer name with arguments."""

from __future__ import annotations

import re

from realsys.api.basics.thoughts import BRACKETED, THINK
from realsys.rollout.conversation.forms.answer_scan import MarkedForm
from realsys.rollout.conversation.forms.call_syntax import (
    JSON_STRING,
    CallBlock,
    JsonCallTexts,
    Schemas,
    skip_white,
    up_to,
)
from realsys.rollout.conversation.forms.parsed_answer import ParsedCall
from realsys.rollout.conversation.forms.strict_json import call_of, call_of_object, read_json_at

_MARK = "[TOOL_CALLS]"
# No JSON goes on at a backslash outside of strings; going on there, each block could take all of the text.
_INSIDE = up_to(_MARK, "\\", argument=JSON_STRING)
# NAME{…}, NAME[ARGS]{…} and NAME[CALL_ID]ID[ARGS]{…}
_HEAD = re.compile(
    r"\s*+([^\s\[\]{}\"<>]++)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?+(?:\[ARGS\]\s*+)?+(?=\{)"
)


class MistralCalls:
    """``[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]NAME[ARGS]{…}`` for each call.

    A block that cannot be read ends at the next mark which does not stand in a string.
    """

    marks = (_MARK,)
    json_texts = JsonCallTexts(arguments="arguments", before=f"{_MARK}[", between=", ", after="]")

    def begins_at_start(self, text: str, start: int, *, whole: bool) -> bool:
        return False

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        inner = start + len(_MARK)
        found = _INSIDE.match(text, inner)
        limit = found.end() if found else inner
        try:
            calls, length = _read_calls(text[inner:limit])
        except ValueError as error:
            next_mark = text.find(_MARK, limit)
            end = next_mark if next_mark >= 0 else len(text)
            return CallBlock(end=end, fault=str(error), decided=next_mark >= 0)
        return CallBlock(end=inner + length, calls=calls)


def _read_calls(text: str) -> tuple[tuple[ParsedCall, ...], int]:
    """Reads the calls at the beginning of ``text``; returns them and where they end."""
    if head := _HEAD.match(text):
        arguments, end = read_json_at(text, head.end())
        return (call_of(head[1], arguments),), end
    value, end = read_json_at(text, skip_white(text, 0))
    if not isinstance(value, list) or not value:
        raise ValueError("it is not a list of calls")
    return tuple(call_of_object(item, "arguments") for item in value), end


# Magistral has thoughts between marks of its own.
MISTRAL = MarkedForm(name="mistral", thought_marks=(THINK, BRACKETED), syntax=MistralCalls())
