"""Calls as tags for the function and each parameter: Qwen3-Coder, Qwen3.5 and later, Nemotron 3."""

from __future__ import annotations

import re
from typing import Any

from realsys.rollout.conversation.forms.answer_scan import MarkedForm
from realsys.rollout.conversation.forms.bare_values import properties_of, read_value
from realsys.rollout.conversation.forms.call_syntax import (
    CallBlock,
    Schemas,
    block_between,
    may_become,
    skip_white,
    up_to,
)
from realsys.rollout.conversation.forms.parsed_answer import ParsedCall
from realsys.rollout.conversation.forms.strict_json import call_of

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_ARGUMENT = r"<parameter=(?:[^<\n]++|\n(?!<parameter=)|<(?!/parameter>))*+(?:</parameter>)?+"
_INSIDE = {mark: up_to(mark, argument=_ARGUMENT) for mark in (_CLOSING, _FUNCTION_END)}
_NAME = re.compile(r"[^<>\n]*+")


class Qwen3CoderCalls:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.

    A function without the outer tags is a call, too: these models forget them now and then, and servers
    forgive it. Values are bare text, so the tool's schema tells ``2`` the number from ``2`` the text.
    """

    marks = (_OPENING, _FUNCTION)
    json_texts = None  # values are bare text

    def begins_at_start(self, text: str, start: int, *, whole: bool) -> bool:
        return False

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        if text.startswith(_OPENING, start):
            inside = _INSIDE[_CLOSING]
            inner, end, decided = block_between(text, start, _OPENING, _CLOSING, inside)
            is_closed = decided or inner.rstrip().endswith(_FUNCTION_END)
        else:
            inside = _INSIDE[_FUNCTION_END]
            inner, end, is_closed = block_between(text, start, "", _FUNCTION_END, inside)
            end, decided = _skip_orphan(text, end) if is_closed else (end, False)
        try:
            call = _read_function(inner.strip(), schemas)
            if not is_closed:  # parameters may be missing
                raise ValueError("it was cut off")
        except ValueError as error:
            return CallBlock(end=end, fault=str(error), decided=decided)
        return CallBlock(end=end, calls=(call,), decided=decided)


def _skip_orphan(text: str, end: int) -> tuple[int, bool]:
    """Returns the end of a bare function, past the closing tag if one follows, and whether it is final."""
    behind = skip_white(text, end)
    if text.startswith(_CLOSING, behind):
        return behind + len(_CLOSING), True
    return end, not may_become(_CLOSING, text, behind)


def _read_function(text: str, schemas: Schemas) -> ParsedCall:
    """Reads ``<function=…`` up to the end of its last parameter; its own closing tag may be cut off."""
    name, at = _read_tag(text, 0, _FUNCTION)
    properties = properties_of(schemas.get(name))
    arguments: dict[str, Any] = {}
    while text.startswith(_PARAMETER, at := skip_white(text, at)):
        key, at = _read_tag(text, at, _PARAMETER)
        end = text.find(_PARAMETER_END, at)
        if end < 0 or text.find("\n" + _PARAMETER, at, end) >= 0:
            raise ValueError(f"parameter {key[:40]!r} is not closed")
        if key in arguments:
            raise ValueError(f"parameter {key[:40]!r} stands there twice")
        arguments[key] = read_value(_without_frame(text[at:end]), properties.get(key))
        at = end + len(_PARAMETER_END)
    if text[at:] not in (_FUNCTION_END, ""):
        raise ValueError("what follows its parameters is not the end of the function")
    return call_of(name, arguments)


def _read_tag(text: str, at: int, opening: str) -> tuple[str, int]:
    """Returns the name in ``<function=NAME>`` or ``<parameter=NAME>``, and where the tag ends."""
    found = _NAME.match(text, at + len(opening)) if text.startswith(opening, at) else None
    if not found or not found[0].strip() or not text.startswith(">", found.end()):
        raise ValueError(f"no {opening}NAME> where one must be")
    return found[0].strip(), found.end() + 1


def _without_frame(value: str) -> str:
    """Removes the newlines that the template puts around a value, one on each side."""
    return value.removeprefix("\n").removesuffix("\n")


QWEN3_CODER = MarkedForm(name="qwen3_coder", syntax=Qwen3CoderCalls())
