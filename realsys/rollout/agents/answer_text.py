"""Conversion between tokens and text of a conversation: decodes answers, encodes what follows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realsys.api.basics.thoughts import decoded_answer
from realsys.api.errors import DataError

_PLACE = "realsys-answer-stands-here"


def decode_answer(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decodes the policy's tokens without special ones, as the reward interface would score them."""
    return decoded_answer(tokenizer, tokens)


def encode_inline(tokenizer: Any, text: str) -> list[int]:
    """Tokenizes text that is inserted into the policy's own turn."""
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def encode_next_turn(tokenizer: Any, text: str, *, last_token: int) -> list[int]:
    """Tokenizes ``text`` as the user's next message, up to where the policy's next answer begins.

    With a chat template: the end of the answer's turn (not twice, if the answer's ``last_token`` is it
    already), the message, and the template's opening of an answer. Without: the text on lines of its own.

    Raises:
        DataError: the chat template does not show the answers of earlier turns.
    """
    if not getattr(tokenizer, "chat_template", None):
        return encode_inline(tokenizer, f"\n{text}\n")
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _PLACE},
        {"role": "user", "content": text},
    ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    _, found, behind = whole.partition(_PLACE)
    if not found:
        raise DataError(
            "the chat template omits earlier assistant turns",
            where="the tokenizer's chat_template",
            fix="use an agent of one turn, or another template",
        )
    tokens = encode_inline(tokenizer, behind)
    return tokens[1:] if tokens[:1] == [last_token] else tokens
