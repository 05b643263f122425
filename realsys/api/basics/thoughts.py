"""Thoughts of an answer: the marks that families of models have for them, and the text behind (pure).

What a rule compares is the text behind the thoughts. It is found by marks alone, so that a rule which gets
no more than a text finds the same as a worker that knows the prompt; linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

THINK = ("<think>", "</think>")
BRACKETED = ("[THINK]", "[/THINK]")  # Magistral
# The last pair is that of gpt-oss, whose answers are in channels: what is not in the final one is thoughts.
THOUGHT_MARKS: tuple[tuple[str, str], ...] = (
    THINK,
    BRACKETED,
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
_LAST_TOKENS = 24  # of a prompt hold a mark that ends it, however it is cut into tokens
_CLOSING: Mapping[str, str] = MappingProxyType(dict(THOUGHT_MARKS))
_ANY_MARK = re.compile("|".join(re.escape(mark) for pair in THOUGHT_MARKS for mark in pair))
_HINTS = (
    "think",
    "THINK",
    "_of_thought|>",
    "<|channel|>",
)  # one is in each mark: sooner looked for


def has_marks(text: str) -> bool:
    """Tells whether any mark stands in a text."""
    return any(hint in text for hint in _HINTS) and _ANY_MARK.search(text) is not None


def opening_at_end(prompt: str) -> str:
    """Returns the mark with which a prompt has opened the answer's thoughts; empty: it has not."""
    end = prompt.rstrip()
    return next((opening for opening in _CLOSING if end.endswith(opening)), "")


def opened_thoughts(tokenizer: Any, prompt: Sequence[int]) -> str:
    """As ``opening_at_end``, of a prompt's tokens."""
    last = list(prompt[-_LAST_TOKENS:])
    return opening_at_end(str(tokenizer.decode(last, skip_special_tokens=False)))


def without_marks(text: str) -> str:
    """Returns a text with blanks in place of its marks."""
    return _ANY_MARK.sub(" ", text)


def text_behind_thoughts(text: str, *, opened: str = "") -> str | None:
    """Returns an answer less its thoughts; itself, if it has no marks. None: its thoughts never end.

    An opening mark counts at the beginning of a line, and only its own closing mark ends what it opened,
    whatever opens in between. A closing mark that nothing opened says that all before it was thoughts: so
    it is with prompts that open them where ``opened`` is not known, and with thoughts in thoughts.
    Stretches of text between several thoughts are joined by a newline.

    Args:
        opened: the mark with which the prompt has opened thoughts.
    """
    if not opened and not has_marks(text):
        return text
    stretches: list[str] = []
    closing, begin = _CLOSING.get(opened, ""), 0
    for found in _ANY_MARK.finditer(text):
        mark = found[0]
        if closing:
            if mark == closing:
                closing, begin = "", found.end()
        elif mark not in _CLOSING:
            stretches.clear()
            begin = found.end()
        elif _begins_line(text, found.start(), begin):
            stretches.append(text[begin : found.start()])
            closing = _CLOSING[mark]
    if closing:
        return None
    stretches.append(text[begin:])
    return "\n".join(filter(str.strip, stretches)) or stretches[-1]


def _begins_line(text: str, at: int, begin: int) -> bool:
    """Tells whether only blanks stand before ``at`` in its line, of what follows ``begin``."""
    while at > begin and text[at - 1] in " \t":
        at -= 1
    return at == begin or text[at - 1] == "\n"
