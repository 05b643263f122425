"""Calls as a name and pairs of tags for each argument: GLM 4.5 and later, and Hy3's preview."""

from __future__ import annotations

from typing import Any

from realsys.rollout.conversation.forms.answer_scan import MarkedForm
from realsys.rollout.conversation.forms.bare_values import properties_of, read_value
from realsys.rollout.conversation.forms.call_syntax import (
    CallBlock,
    Schemas,
    block_between,
    skip_white,
    up_to,
)
from realsys.rollout.conversation.forms.parsed_answer import ParsedCall
from realsys.rollout.conversation.forms.strict_json import call_of

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_LIST, _NAME_END = ("<tool_calls>", "</tool_calls>"), "<tool_sep>"
_KEY, _VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
_INSIDE = up_to(_CLOSING, argument=r"<arg_value>(?:[^<]++|<(?!/?arg_value>))*+(?:</arg_value>)?+")


class GlmCalls:
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>``, with line breaks
    between them or without. Values are texts as they are, and all else as JSON.
    """

    marks: tuple[str, ...] = (_OPENING,)
    json_texts = None  # values are bare text

    def begins_at_start(self, text: str, start: int, *, whole: bool) -> bool:
        return False

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        inner, end, decided = block_between(text, start, _OPENING, _CLOSING, _INSIDE)
        try:
            head = inner.partition(_KEY[0])[0]
            call = _read_function(self.name_of(head), inner, len(head), schemas)
        except ValueError as error:
            return CallBlock(end=end, fault=str(error), decided=decided)
        return CallBlock(end=end, calls=(call,), decided=decided)

    def name_of(self, head: str) -> str:
        """Returns the function's name in what stands before its arguments."""
        return head.strip()


def _read_function(name: str, text: str, at: int, schemas: Schemas) -> ParsedCall:
    if not name or any(letter.isspace() or letter in '<{"' for letter in name):
        raise ValueError("no name of a function where one must be")
    properties = properties_of(schemas.get(name))
    arguments: dict[str, Any] = {}
    while (at := skip_white(text, at)) < len(text):
        key, at = _read_tagged(text, at, _KEY, "a key")
        key = key.strip()
        value, at = _read_tagged(text, skip_white(text, at), _VALUE, f"the value of {key[:40]!r}")
        if _VALUE[0] in value:
            raise ValueError(f"two values of {key[:40]!r} begin, and one ends")
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


class Hy3PreviewCalls(GlmCalls):
    """GLM's calls with a mark behind the name, in a list: ``<tool_calls><tool_call>NAME<tool_sep>…``.

    The marks around the list mean nothing themselves.
    """

    marks = (_OPENING, *_LIST)

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        for mark in _LIST:
            if text.startswith(mark, start):
                return CallBlock(end=start + len(mark))
        return super().read_block(text, start, schemas=schemas)

    def name_of(self, head: str) -> str:
        """Returns the function's name in what stands before its arguments.

        Raises:
            ValueError: the mark behind it is missing.
        """
        name, mark, behind = head.partition(_NAME_END)
        if not mark or behind.strip():
            raise ValueError(f"no {_NAME_END} behind the name of the function")
        return name.strip()


HY3_PREVIEW = MarkedForm(name="hy3_preview", syntax=Hy3PreviewCalls())
GLM = MarkedForm(name="glm", syntax=GlmCalls())
