"""An answer that is nothing but JSON of calls: Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

import re

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
_SEPARATOR = re.compile(r"\s*+;\s*+")
_CALL_LIKE = re.compile(r'\s*+\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:')


class Llama3JsonCalls:
    """``{"name": …, "parameters": {…}}`` from the answer's start, or from a tag on, up to its end.

    Several are separated by ``;``. ``arguments`` for ``parameters`` is accepted, as servers do. Other JSON
    is content, and no fault unless it begins as calls do.
    """

    marks = (_TAG,)
    json_texts = JsonCallTexts(arguments="parameters")

    def begins_at_start(self, text: str, start: int, *, whole: bool) -> bool:
        at = skip_white(text, start)
        if whole:
            return bool(_CALL_LIKE.match(text, start)) or _calls_from(text, start)[1] == ""
        return text.startswith("{", at)

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        inner = start + len(_TAG) if text.startswith(_TAG, start) else start
        calls, fault = _calls_from(text, inner)
        return CallBlock(end=len(text), calls=calls, fault=fault, decided=False)


def _calls_from(text: str, start: int) -> tuple[tuple[ParsedCall, ...], str]:
    """Reads calls from ``start`` to the end of the text; returns them, or a fault in words."""
    calls, at = list[ParsedCall](), skip_white(text, start)
    try:
        while True:
            value, at = read_json_at(text, at)
            calls.append(call_of_object(value, "parameters", "arguments"))
            separator = _SEPARATOR.match(text, at)
            if not separator:
                break
            at = separator.end()
    except ValueError as error:
        return (), str(error)
    if skip_white(text, at) < len(text):
        return (), f"extra text behind it at character {at}"
    return tuple(calls), ""


LLAMA3_JSON = MarkedForm(name="llama3_json", thought_marks=(), syntax=Llama3JsonCalls())
