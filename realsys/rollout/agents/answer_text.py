"""Between tokens and text: what the policy said, and how somebody else's words are put behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realsys.api.errors import DataError

_PLACE = "realsys-answer-stands-here"


def said(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The policy's tokens as text, without special ones: what the reward interface would score."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def inline(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that is put into the policy's own turn."""
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def next_turn(tokenizer: Any, text: str, *, last_token: int) -> list[int]:
    """Tokens of ``text`` as the user's next message, up to where the policy's next answer begins.

    With a chat template: the end of the answer's turn (not twice, if the answer's ``last_token`` is it
    already), the message, and the template's opening of an answer. Without: the text on lines of its own.

    Raises:
        DataError: the chat template does not show the answers of earlier turns.
    """
    if not getattr(tokenizer, "chat_template", None):
        return inline(tokenizer, f"\n{text}\n")
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _PLACE},
        {"role": "user", "content": text},
    ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    _, found, behind = whole.partition(_PLACE)
    if not found:
        raise DataError(
            "the chat template leaves out what the assistant said before",
            where="the tokenizer's chat_template",
            fix="use an agent of one turn, or another template",
        )
    tokens = inline(tokenizer, behind)
    return tokens[1:] if tokens[:1] == [last_token] else tokens
