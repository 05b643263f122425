"""Marks of a chat template within texts stay text: what a tool or a user writes opens and ends no turn.

A template puts texts together with its marks (``<|im_end|>``), and a tokenizer makes control tokens of
these wherever they stand, in a web page that a tool has read too. So before the template is filled, each
mark within such a text is broken by a character that no text has; of what comes out, the parts between
these characters are made tokens one by one, and the characters go away. Pure, no torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from realsys.data.sources.assistant_turns import any_of

# A noncharacter: never to be interchanged (The Unicode Standard, 23.7). Where a text has it all the same,
# it is left out.
BREAK = "\ufdd0"
ROLES: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "tools": frozenset({"tool"}),
    "all": frozenset({"tool", "user", "system", "developer"}),
}


def marks_of(
    added: Iterable[tuple[str, bool]], special: Collection[str], template: str
) -> re.Pattern[str]:
    """Returns a pattern that finds a template's marks, of two characters at least.

    Args:
        added: texts that the tokenizer keeps whole, and whether they are special. Others than special ones
            are marks where the template writes them: some tokenizers keep HTML's tags whole.
        special: texts of special tokens, as of the end token.
    """
    found = {text for text, is_special in added if is_special or text in template}
    return any_of([text for text in {*found, *special} if len(text) > 1])


def tokenizers_marks(tokenizer: Any, template: str) -> re.Pattern[str]:
    """Returns ``marks_of`` a tokenizer of transformers."""
    added = [(str(t), t.special) for t in getattr(tokenizer, "added_tokens_decoder", {}).values()]
    special = [str(token) for token in getattr(tokenizer, "all_special_tokens", ())]
    return marks_of(added, special, template)


class MarksAsText:
    """Breaks marks in the texts of some roles.

    Args:
        marks: finds them.
        of: a key of ROLES.
    Attributes:
        text: returns a text whose marks are broken.
    """

    def __init__(self, marks: re.Pattern[str], *, of: str) -> None:
        self._marks, self._roles = marks, ROLES[of]
        # The same texts come again with each request of a conversation
        self.text = functools.lru_cache(maxsize=256)(self._text)

    def is_of(self, role: str) -> bool:
        """Returns whether texts of this role are broken."""
        return role in self._roles

    def _text(self, text: str) -> str:
        """Returns a text whose marks are broken, also those that begin within others."""
        parts, begin, at = [], 0, 0
        while found := self._marks.search(text, at):
            at = found.start() + 1
            parts.append(text[begin:at])
            begin = at
        return BREAK.join([*parts, text[begin:]])

    def messages(self, messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns messages whose marks are broken, where their roles say so."""
        return [
            {**m, "content": self.text(m["content"])}
            if self.is_of(m["role"]) and isinstance(m.get("content"), str)
            else m
            for m in messages
        ]


def tokens_of(text: str, tokenize: Callable[[str], Sequence[int]]) -> list[int]:
    """Tokenizes a text with broken marks."""
    return [token for part in text.split(BREAK) if part for token in tokenize(part)]
