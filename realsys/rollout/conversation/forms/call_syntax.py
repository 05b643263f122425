"""How a family writes tool calls: marks at which a block begins, and a function that reads the block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from realsys.rollout.conversation.forms.parsed_answer import ParsedCall

Schemas = Mapping[str, Mapping[str, Any]]  # JSON schema of a tool's arguments, by the tool's name

_WHITE = re.compile(r"\s*+")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallBlock:
    """What begins at a mark.

    Attributes:
        end: where the text goes on behind it.
        calls: none: a mark without a meaning of its own, or a fault.
        fault: why it could not be read, in words; empty: it could.
        decided: False: it was cut off by the end of the text, so that more text could change what it is.
        is_text: what stands there is content after all, and no fault.
    """

    end: int
    calls: tuple[ParsedCall, ...] = ()
    fault: str = ""
    decided: bool = True
    is_text: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonCallTexts:
    """Texts around calls ``{"name": …, ARGUMENTS: {…}}``; without any, an answer is one call."""

    arguments: str
    before: str = ""
    between: str = ""
    after: str = ""


class CallSyntax(Protocol):
    """The calls of one family.

    A block must be read in time linear in its length. What is ``decided`` must stay so whatever follows the
    text: streaming relies on it.
    """

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts at which a block begins, wherever they stand."""
        ...

    def begins_at_start(self, text: str, start: int, *, whole: bool) -> bool:
        """Tells whether a block without a mark begins at ``start``, where thoughts are over.

        Args:
            whole: False: more text may follow; then the answer is also True as long as one may begin.
        """
        ...

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        """Reads the block that begins at ``start``, as if the text ended where it does."""
        ...

    @property
    def json_texts(self) -> JsonCallTexts | None:
        """What stands around calls that are JSON; None: they are written otherwise."""
        ...


def may_become(mark: str, text: str, start: int) -> bool:
    """Tells whether the text from ``start`` on, maybe empty, may still become ``mark``."""
    length = len(text) - start
    return length < len(mark) and mark.startswith(text[start:])


def skip_white(text: str, at: int) -> int:
    """Returns where the white space that begins at ``at`` ends."""
    found = _WHITE.match(text, at)
    return found.end() if found else at


# A string of JSON, in which marks mean nothing: at any length, or up to the end of its line, as valid ones.
JSON_STRING = r'"(?:[^"\\]++|\\.)*+"?+'
JSON_STRING_IN_LINE = r'"(?:[^"\\\n]++|\\[^\n])*+"?+'


def up_to(*marks: str, argument: str) -> re.Pattern[str]:
    """Returns the pattern of a text up to the first of ``marks`` that stands in no argument's own text.

    Args:
        argument: the pattern of such a text, from its opening on; it must take linear time.
    """
    first = re.escape("".join(text[0] for text in (argument, *marks)))
    ends = "|".join(map(re.escape, marks))
    return re.compile(f"(?:[^{first}]++|{argument}|(?!{ends}).)*+", re.DOTALL)


def block_between(
    text: str, start: int, opening: str, closing: str, inside: re.Pattern[str]
) -> tuple[str, int, bool]:
    """Returns what stands between a block's marks, the block's end, and whether its closing mark is there.

    Without a closing mark the block takes all text that is left; so does one with an argument whose own
    text does not end: what looks like a call behind it could be that text.

    Args:
        inside: ``up_to`` the closing mark.
    """
    inner = start + len(opening)
    found = inside.match(text, inner)
    closed_at = found.end() if found else inner
    if closed_at == len(text):
        return text[inner:], len(text), False
    return text[inner:closed_at], closed_at + len(closing), True
