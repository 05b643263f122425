"""An answer that ends with JSON of calls: Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

import re
from dataclasses import dataclass

from realsys.api.basics.thoughts import THINK
from realsys.rollout.conversation.forms.answer_scan import MarkedForm
from realsys.rollout.conversation.forms.call_syntax import (
    CallBlock,
    JsonCallTexts,
    Schemas,
    skip_white,
)
from realsys.rollout.conversation.forms.parsed_answer import ParsedCall
from realsys.rollout.conversation.forms.strict_json import call_of_object, read_json_at

_TAG = "<|python_tag|>"
_BEGINNINGS = (
    '{"name":',
    '{"type": "function", "name":',
)  # behind a text; at the start see _CALL_LIKE
_SEPARATOR = re.compile(r"\s*+;\s*+")
_CALL_LIKE = re.compile(r'\s*+\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:')


class Llama3JsonCalls:
    """``{"name": …, "parameters": {…}}`` up to the answer's end: from its start, a tag, or within a text.

    Several are separated by ``;``. ``arguments`` for ``parameters`` is accepted, as servers do. Other JSON
    is content, and no fault unless it begins as calls do. Within a text no mark tells a call from JSON that
    the policy talks about, so there it must be of a tool that the request has.
    """

    marks = (_TAG, *_BEGINNINGS)
    json_texts = JsonCallTexts(arguments="parameters")

    def begins_at_start(self, text: str, start: int, *, whole: bool) -> bool:
        at = skip_white(text, start)
        if whole:
            return bool(_CALL_LIKE.match(text, start)) or not _calls_from(text, start).fault
        return text.startswith("{", at)

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        tagged = text.startswith(_TAG, start)
        found = _calls_from(text, start + len(_TAG) if tagged else start)
        if tagged or start == 0 or text.endswith(THINK[1], 0, start):
            calls = () if found.fault else found.calls
            return CallBlock(end=len(text), calls=calls, fault=found.fault, decided=False)
        offered = not schemas or all(call.name in schemas for call in found.calls)
        if not offered or found.is_other_json:
            return CallBlock(end=found.end, is_text=True, decided=False)
        if found.fault:
            return CallBlock(end=found.end, fault=found.fault, decided=False)
        return CallBlock(end=found.end, calls=found.calls, decided=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Calls:
    """What was read from a place on.

    Attributes:
        calls: those before the fault, if there is one.
        end: where the text goes on; its end where it can't be known.
        is_other_json: the fault is that valid JSON is no call.
    """

    calls: tuple[ParsedCall, ...]
    end: int
    fault: str = ""
    is_other_json: bool = False


def _calls_from(text: str, start: int) -> _Calls:
    """Reads calls from ``start`` to the end of the text."""
    calls, at = list[ParsedCall](), skip_white(text, start)
    while True:
        try:
            value, at = read_json_at(text, at)
        except ValueError as error:
            return _Calls(calls=tuple(calls), end=len(text), fault=str(error))
        try:
            calls.append(call_of_object(value, "parameters", "arguments"))
        except ValueError as error:
            return _Calls(calls=tuple(calls), end=at, fault=str(error), is_other_json=True)
        separator = _SEPARATOR.match(text, at)
        if not separator:
            break
        at = separator.end()
    if skip_white(text, at) < len(text):
        return _Calls(calls=tuple(calls), end=at, fault=f"extra text behind it at character {at}")
    return _Calls(calls=tuple(calls), end=len(text))


LLAMA3_JSON = MarkedForm(name="llama3_json", thought_marks=(), syntax=Llama3JsonCalls())
