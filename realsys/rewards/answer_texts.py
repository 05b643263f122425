"""Text of an answer's tokens, as rules get it.

Marks of thoughts stay in it, also where they are special tokens; no other special token does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realsys.api.basics.thoughts import THOUGHT_MARKS


def decoded_answer(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Returns the text of tokens that the policy wrote."""
    kept = _special_marks(tokenizer)
    if not kept or kept.keys().isdisjoint(tokens):
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
    pieces: list[str] = []
    begin = 0
    for at, token in enumerate(tokens):
        if token in kept:
            pieces += [_decoded(tokenizer, tokens[begin:at]), kept[token]]
            begin = at + 1
    return "".join([*pieces, _decoded(tokenizer, tokens[begin:])])


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True)) if tokens else ""


def _special_marks(tokenizer: Any) -> dict[int, str]:
    """Returns the special tokens of which the template's marks consist, with their texts."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    marks = [mark for pair in THOUGHT_MARKS if pair[0] in template for mark in pair]
    if not marks:
        return {}
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return {
        number: str(token.content)
        for number, token in added
        if token.special and any(str(token.content) in mark for mark in marks)
    }
