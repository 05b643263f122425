"""Detects whether an answer's newest token completes one of its stop texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopTexts:
    """Searches for ``texts`` at the end of a growing answer; a text may span tokens."""

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self.texts = tuple(texts)
        self.tokenizer = tokenizer
        # A token spells at least one byte, a rare few none; the first one's may be a part of a letter.
        self.reach = max(len(text.encode()) for text in self.texts) + 8

    def completed(self, answer: Sequence[int]) -> bool:
        """True if the last token of ``answer`` completes a stop text."""
        tail = list(answer[-self.reach :])
        return self._found(tail) > self._found(tail[:-1])

    def _found(self, tokens: Sequence[int]) -> int:
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return sum(text.count(stop) for stop in self.texts)
