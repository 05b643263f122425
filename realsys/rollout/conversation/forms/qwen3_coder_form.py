"""Calls as tags for the function and each parameter: Qwen3-Coder, Qwen3.5 and later, Nemotron 3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from realsys.rollout.conversation.forms.answer_scan import MarkedForm
from realsys.rollout.conversation.forms.call_syntax import (
    CallBlock,
    Schemas,
    block_between,
    may_become,
    skip_white,
)
from realsys.rollout.conversation.forms.parsed_answer import ParsedCall
from realsys.rollout.conversation.forms.strict_json import call_of, read_json

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*+")
# How templates spell these without JSON: as Python does.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


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
            inner, end, decided = block_between(text, start, _OPENING, _CLOSING)
        else:
            inner, end, closed = block_between(text, start, "", _FUNCTION_END)
            end, decided = _skip_orphan(text, end) if closed else (end, False)
        try:
            call = _read_function(inner.strip(), schemas)
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
    properties = _properties(schemas.get(name))
    arguments: dict[str, Any] = {}
    while text.startswith(_PARAMETER, at := skip_white(text, at)):
        key, at = _read_tag(text, at, _PARAMETER)
        end = text.find(_PARAMETER_END, at)
        if end < 0 or text.find("\n" + _PARAMETER, at, end) >= 0:
            raise ValueError(f"parameter {key[:40]!r} is not closed")
        if key in arguments:
            raise ValueError(f"parameter {key[:40]!r} stands there twice")
        arguments[key] = _read_value(_without_frame(text[at:end]), properties.get(key))
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


def _properties(schema: object) -> Mapping[str, Any]:
    """Returns the schemas of a tool's parameters. Clients write them, so that they may be anything."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _read_value(value: str, schema: object) -> Any:
    """Reads a value as its schema says; without schema as JSON if it is, otherwise as text."""
    types = _types(schema)
    if types == {"string"}:
        return value
    if types and value in _PYTHON_WORDS and types & {"boolean", "null"}:
        return _PYTHON_WORDS[value]
    try:
        read = read_json(value)
    except ValueError:
        return value
    # Where texts are allowed, what looks like JSON is one unless its own type is allowed as well.
    return value if "string" in types and not _json_types(read) & types else read


def _types(schema: object) -> set[str]:
    """Returns the JSON types that a schema names, in ``type`` or in the branches of ``anyOf``."""
    branches = schema.get("anyOf") if isinstance(schema, Mapping) else None
    types = set[str]()
    for branch in (schema, *(branches if isinstance(branches, list) else ())):
        named = branch.get("type") if isinstance(branch, Mapping) else None
        types.update(
            n for n in (named if isinstance(named, list) else [named]) if isinstance(n, str)
        )
    return types


def _json_types(value: object) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case None:
            return {"null"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}


QWEN3_CODER = MarkedForm(name="qwen3_coder", syntax=Qwen3CoderCalls())
