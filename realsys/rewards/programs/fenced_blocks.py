"""Fenced blocks of a text in Markdown, as policies write them (pure, linear in the text).

Read as CommonMark does, and where policies are careless as their reader would:

- a fence may stand in a list item, however deep, also right behind its mark; so much of the indentation
  of its lines goes as the fence has;
- a fence with a language, before the last block was closed, begins a new block;
- in Python, a fence within a string of three quotes belongs to the string.

What of the blocks is an answer is the rule's affair.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_TAB = 4  # columns
# All quantifiers are possessive, and no pattern is tried at more than one place of a line.
_FENCE = re.compile(
    r"(?P<before>[ \t]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)*+)(?P<fence>`{3,}+|~{3,}+)(?P<info>.*+)",
    re.S,
)
_LANGUAGE = re.compile(r"[\s{.]*+([\w+#-]*+)")
_UP_TO_QUOTES = re.compile(  # outside of strings: up to three quotes, a comment or the line's end
    r"""(?:[^"'#]++|"(?!"")(?:\\.|[^"\\])*+(?:"|$)|'(?!'')(?:\\.|[^'\\])*+(?:'|$))*+(\"{3}|'{3})?""",
    re.S,
)
_PYTHON = ("python", "python3", "py")


@dataclass(frozen=True, kw_only=True, slots=True)
class FencedBlock:
    """One block.

    Attributes:
        language: the first word behind the fence, in small letters; empty: there is none.
        text: its lines, less the fence's indentation, each with a newline.
        is_closed: its closing fence is there; else the text ended, or the next block began.
    """

    language: str
    text: str
    is_closed: bool


@dataclass(frozen=True, slots=True)
class _Fence:
    """A line that may open a block, or close one.

    Attributes:
        indent: columns before the mark; a list's signs are some.
        is_bare: there are blanks beside the mark, no signs and no words.
    """

    indent: int
    mark: str
    info: str
    is_bare: bool

    @property
    def language(self) -> str:
        found = _LANGUAGE.match(self.info)
        return found[1].lower() if found else ""

    def counts_in(self, opened: _Fence) -> bool:
        """Tells whether it may end the block; what is shorter or further in is a line of it."""
        return (
            self.mark.startswith(opened.mark)
            and self.indent <= opened.indent + 3
            and (self.is_bare or bool(self.language))
        )


def fenced_blocks(text: str) -> list[FencedBlock]:
    """Returns the blocks in their order; none lies in another."""
    if "```" not in text and "~~~" not in text:
        return []
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    blocks: list[FencedBlock] = []
    number = read_twice = 0
    while number < len(lines):
        opened = _fence(lines[number])
        number += 1
        if opened is None:
            continue
        # A string that never ends makes lines be read again: seldom, else this were quadratic.
        heeds_strings = opened.language in _PYTHON and read_twice <= len(lines)
        end, is_closed, read = _end(lines, number, opened, heeds_strings=heeds_strings)
        inside = "".join(f"{_dedented(line, opened.indent)}\n" for line in lines[number:end])
        blocks.append(FencedBlock(language=opened.language, text=inside, is_closed=is_closed))
        number = end + is_closed
        read_twice += read - end
    return blocks


def last_block(text: str, languages: Collection[str]) -> str | None:
    """Returns the last closed block of these languages; without one, the last that names none."""
    named = unnamed = None
    for block in fenced_blocks(text):
        if block.is_closed and not block.language:
            unnamed = block.text
        elif block.is_closed and block.language in languages:
            named = block.text
    return unnamed if named is None else named


def fenced(text: str, language: str = "") -> str:
    """Returns the text as one block, whose fence is longer than any in it."""
    longest = max((len(fence.mark) for fence in map(_fence, text.split("\n")) if fence), default=0)
    mark = "`" * max(3, longest + 1)
    return f"{mark}{language}\n{text.rstrip()}\n{mark}"


def _end(
    lines: Sequence[str], begin: int, opened: _Fence, *, heeds_strings: bool
) -> tuple[int, bool, int]:
    """Returns which line ends a block, whether as its closing fence, and how far was read for it."""
    quotes = ""  # of the string that is open
    passed: tuple[int, bool] | None = None  # the first fence in this string, and whether it is bare
    is_nested = False
    for number in range(begin, len(lines)):
        fence = _fence(lines[number])
        if fence and fence.counts_in(opened):
            if not quotes:
                return number, fence.is_bare, number
            if is_nested and passed and not fence.is_bare:  # two that open: it is no string
                return *passed, number
            passed, is_nested = passed or (number, fence.is_bare), not is_nested
        if heeds_strings:
            quotes = _open_string(lines[number], quotes)
            if not quotes:
                passed, is_nested = None, False
    return *(passed or (len(lines), False)), len(lines)


def _fence(line: str) -> _Fence | None:
    found = _FENCE.match(line)
    if not found or (found["fence"][0] == "`" and "`" in found["info"]):  # code in a line
        return None
    before, info = found["before"].expandtabs(_TAB), found["info"]
    is_bare = not before.strip() and not info.strip()
    return _Fence(indent=len(before), mark=found["fence"], info=info, is_bare=is_bare)


def _dedented(line: str, columns: int) -> str:
    """Takes away so many columns of blanks, or all that there are."""
    blanks = line[: len(line) - len(line.lstrip(" \t"))]
    if "\t" not in blanks:
        return line[min(columns, len(blanks)) :]
    return blanks.expandtabs(_TAB)[columns:] + line[len(blanks) :]


def _open_string(line: str, quotes: str) -> str:
    """Returns the quotes of the string that is open behind a line of Python; empty: none is."""
    at = 0
    while True:
        if quotes:
            end = line.find(quotes, at)
            if end < 0:
                return quotes
            at = end + 3
        found = _UP_TO_QUOTES.match(line, at)
        if found is None or not found[1]:
            return ""
        quotes, at = found[1], found.end()
