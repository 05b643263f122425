"""Thoughts of an answer: the marks that families of models have for them, and the text behind, for rules.

What a rule compares is the text behind the thoughts. It is found by marks alone, so that a rule which gets
no more than a text finds the same as a worker that knows the prompt. Pure, and linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from realsys.api.basics.option_fields import option

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
_HINTS = ("think", "THINK", "_of_thought|>", "<|channel|>")  # one is in each mark


def has_marks(text: str) -> bool:
    """Tells whether any mark stands in a text."""
    if not ("<" in text or "[" in text or "◁" in text):  # what marks begin with is found soonest
        return False
    return any(hint in text for hint in _HINTS) and _ANY_MARK.search(text) is not None


def opening_at_end(prompt: str) -> str:
    """Returns the mark with which a prompt has opened the answer's thoughts; empty: it has not."""
    end = prompt.rstrip()
    return next((opening for opening in _CLOSING if end.endswith(opening)), "")


def opened_thoughts(tokenizer: Any, prompt: Sequence[int]) -> str:
    """As ``opening_at_end``, of a prompt's tokens."""
    last = list(prompt[-_LAST_TOKENS:])
    return opening_at_end(str(tokenizer.decode(last, skip_special_tokens=False)))


def decoded_answer(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Returns the text of tokens that the policy wrote, as rules get it.

    Marks of thoughts stay in it, also where they are special tokens; no other special token does.
    """
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


@dataclass(kw_only=True)
class FinalTextRule:
    """Base of such rules. An answer with thoughts and nothing behind them scores 0, unread."""

    score_unfinished_thoughts: bool = option(
        False,
        "an answer with nothing behind its thoughts, such as one that was cut off within them, is scored "
        "by its thoughts; else 0",
    )

    def text_of(self, response: str, final: str | None = None) -> str | None:
        """Returns what is read of an answer; None: it scores 0.

        Args:
            final: the text behind the thoughts, as ``Completion`` has it; None: found in ``response``.
        """
        if final is None:
            final = text_behind_thoughts(response) or ""
        if final is response or final.strip() or final == response:
            return final
        if not self.score_unfinished_thoughts:
            return None
        return without_marks(response) if has_marks(response) else response
