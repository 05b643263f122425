"""Calls as a name and pairs of tags for each argument: GLM 4.5 and later."""

from __future__ import annotations

from typing import Any

from realsys.rollout.conversation.forms.answer_scan import MarkedForm
from realsys.rollout.conversation.forms.bare_values import properties_of, read_value
from realsys.rollout.conversation.forms.call_syntax import (
    CallBlock,
    Schemas,
    block_between,
    skip_white,
)
from realsys.rollout.conversation.forms.parsed_answer import ParsedCall
from realsys.rollout.conversation.forms.strict_json import call_of

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_KEY, _VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")


class GlmCalls:
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>``, with line breaks
    between them or without. Values are texts as they are, and all else as JSON.
    """

    marks = (_OPENING,)
    json_texts = None  # values are bare text

    def begins_at_start(self, text: str, start: int, *, whole: bool) -> bool:
        return False

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        inner, end, decided = block_between(text, start, _OPENING, _CLOSING)
        try:
            call = _read_function(inner, schemas)
        except ValueError as error:
            return CallBlock(end=end, fault=str(error), decided=decided)
        return CallBlock(end=end, calls=(call,), decided=decided)


def _read_function(text: str, schemas: Schemas) -> ParsedCall:
    name = text.partition(_KEY[0])[0]
    at, name = len(name), name.strip()
    if not name or any(letter.isspace() or letter in '<{"' for letter in name):
        raise ValueError("no name of a function where one must be")
    properties = properties_of(schemas.get(name))
    arguments: dict[str, Any] = {}
    while (at := skip_white(text, at)) < len(text):
        key, at = _read_tagged(text, at, _KEY, "a key")
        key = key.strip()
        value, at = _read_tagged(text, skip_white(text, at), _VALUE, f"the value of {key[:40]!r}")
        if key in arguments:
            raise ValueError(f"argument {key[:40]!r} stands there twice")
        arguments[key] = read_value(value, properties.get(key))
    return call_of(name, arguments)


def _read_tagged(text: str, at: int, tags: tuple[str, str], what: str) -> tuple[str, int]:
    """Returns the text between two tags, the first of which must stand at ``at``, and where they end."""
    opening, closing = tags
    end = text.find(closing, at)
    if not text.startswith(opening, at) or end < 0:
        raise ValueError(f"{what} is not between {opening} and {closing}")
    return text[at + len(opening) : end], end + len(closing)


GLM = MarkedForm(name="glm", syntax=GlmCalls())
