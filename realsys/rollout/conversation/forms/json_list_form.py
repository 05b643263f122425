"""Calls as one list of JSON between tags: Nemotron's, Jamba's and Hunyuan's, Granite's and Phi's."""

from __future__ import annotations

from realsys.rollout.conversation.forms.answer_scan import MarkedForm
from realsys.rollout.conversation.forms.call_syntax import (
    JSON_STRING,
    CallBlock,
    JsonCallTexts,
    Schemas,
    block_between,
    up_to,
)
from realsys.rollout.conversation.forms.strict_json import call_of_object, read_json


class JsonListCalls:
    """``OPENING[{"name": …, "arguments": {…}}, …]CLOSING``.

    A missing closing tag at the end of the text is forgiven: Granite writes none, and it may have been a
    stop text.

    Args:
        openings: the first is the family's own, others are read as well.
    """

    def __init__(self, *openings: str, closing: str) -> None:
        self._closing = closing
        self._inside = up_to(closing, argument=JSON_STRING)
        self.marks: tuple[str, ...] = openings
        self.json_texts: JsonCallTexts | None = JsonCallTexts(
            arguments="arguments", before=f"{openings[0]}[", between=", ", after=f"]{closing}"
        )

    def begins_at_start(self, text: str, start: int, *, whole: bool) -> bool:
        return False

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        opening = next(mark for mark in self.marks if text.startswith(mark, start))
        inner, end, closed = block_between(text, start, opening, self._closing, self._inside)
        try:
            listed = read_json(inner)
            if not isinstance(listed, list) or not listed:
                raise ValueError("it is not a list of calls")
            calls = tuple(call_of_object(one, "arguments") for one in listed)
        except ValueError as error:
            return CallBlock(end=end, fault=str(error), decided=closed)
        return CallBlock(end=end, calls=calls, decided=closed)


NEMOTRON_LIST = MarkedForm(
    name="nemotron_list", syntax=JsonListCalls("<TOOLCALL>", closing="</TOOLCALL>")
)
JAMBA_LIST = MarkedForm(
    name="jamba_list", syntax=JsonListCalls("<tool_calls>", closing="</tool_calls>")
)
# Granite 3.1 and later write their own mark as a text, too.
GRANITE_LIST = MarkedForm(
    name="granite_list",
    syntax=JsonListCalls("<|tool_call|>", "<tool_call>", closing="<|/tool_call|>"),
)
