"""Calls between special tokens: DeepSeek V3 and R1 with a fence around the JSON, V3.1 without."""

from __future__ import annotations

from realsys.rollout.conversation.forms.answer_scan import MarkedForm
from realsys.rollout.conversation.forms.call_syntax import (
    JSON_STRING,
    CallBlock,
    Schemas,
    block_between,
    may_become,
    skip_white,
    up_to,
)
from realsys.rollout.conversation.forms.parsed_answer import ParsedCall
from realsys.rollout.conversation.forms.strict_json import call_of, read_json

_LIST, _LIST_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_INSIDE = up_to(_CALL_END, argument=JSON_STRING)
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE, _FENCE_END = "\n```json\n", "\n```"


class DeepseekCalls:
    """``CALL function SEPARATOR NAME fence {…} fence CALL_END``, or ``CALL NAME SEPARATOR {…} CALL_END``.

    The marks around the list of calls mean nothing themselves; the first of them is a fault unless a call
    follows.
    """

    marks = (_LIST, _LIST_END, _CALL)
    json_texts = None  # one of two ways, by the template

    def begins_at_start(self, text: str, start: int, *, whole: bool) -> bool:
        return False

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        if text.startswith(_LIST_END, start):
            return CallBlock(end=start + len(_LIST_END))
        if text.startswith(_LIST, start):
            return _list_mark(text, start + len(_LIST))
        inner, end, closed = block_between(text, start, _CALL, _CALL_END, _INSIDE)
        try:
            call = _read_call(inner)
        except ValueError as error:
            return CallBlock(end=end, fault=str(error), decided=closed)
        return CallBlock(end=end, calls=(call,), decided=closed)


def _list_mark(text: str, end: int) -> CallBlock:
    """Reads the mark before the first call, which may be followed by white space."""
    behind = skip_white(text, end)
    if text.startswith(_CALL, behind):
        return CallBlock(end=behind)
    decided = not may_become(_CALL, text, behind)
    return CallBlock(end=end, fault="no call follows the mark of a list of calls", decided=decided)


def _read_call(text: str) -> ParsedCall:
    head, separator, rest = text.partition(_SEPARATOR)
    if not separator:
        raise ValueError(f"it has no {_SEPARATOR}")
    if rest.lstrip().startswith("{"):
        return call_of(head.strip(), read_json(rest))
    name, fence, body = rest.rstrip().partition(_FENCE)
    if head.strip() != "function" or not fence or not body.endswith(_FENCE_END):
        raise ValueError("it is not a function's name with a block of JSON")
    return call_of(name.strip(), read_json(body.removesuffix(_FENCE_END)))


DEEPSEEK = MarkedForm(name="deepseek", syntax=DeepseekCalls())
