"""Walk through an answer's text: thoughts first, then stretches of content and blocks of calls in turn.

Whole answers and beginnings of answers (streaming) take the same walk, so that they cannot disagree. A
beginning's walk ends where more text could change what a stretch is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from realsys.api.basics.thoughts import THINK
from realsys.rollout.conversation.forms.call_syntax import (
    CallBlock,
    CallSyntax,
    Schemas,
    may_become,
)
from realsys.rollout.conversation.forms.parsed_answer import ParsedAnswer, ParsedCall


@dataclass(frozen=True, kw_only=True)
class MarkedForm:
    """A family of answers: the marks of its thoughts and the syntax of its calls.

    Args:
        thought_marks: pairs of marks; empty: thoughts are read only where the template opened them.
        syntax: None: the family has no calls.
    """

    name: str
    thought_marks: tuple[tuple[str, str], ...] = (THINK,)
    syntax: CallSyntax | None = None

    def parse(
        self, text: str, *, thinking: bool, tools: bool, schemas: Schemas | None = None
    ) -> ParsedAnswer:
        """Takes a whole answer apart; see ``AnswerForm.parse``."""
        walk = _Walk(text=text, syntax=self.syntax if tools else None, schemas=schemas or {})
        thoughts, start = self._thoughts(text, thinking=thinking)
        if start is None:
            faults = walk.faults_in_thoughts(thoughts)
            return ParsedAnswer(content="", reasoning=thoughts, calls=(), faults=faults)
        walk.run(start, whole=True)
        return ParsedAnswer(
            content=walk.content(),
            reasoning=thoughts,
            calls=tuple(walk.calls),
            faults=tuple(walk.faults),
        )

    def safe_prefix(self, text: str, *, thinking: bool, tools: bool) -> str:
        """Returns what is content of an answer's beginning for sure; see ``AnswerForm.safe_prefix``."""
        if not thinking and self._may_open_thoughts(text):
            return ""
        _, start = self._thoughts(text, thinking=thinking)
        if start is None:
            return ""
        walk = _Walk(text=text, syntax=self.syntax if tools else None, schemas={})
        walk.run(start, whole=False)
        return walk.content()

    def _thoughts(self, text: str, *, thinking: bool) -> tuple[str, int | None]:
        """Returns the thoughts and where they end: 0 without thoughts, None if they never end."""
        begin = len(text) - len(text.lstrip())
        marks = self.thought_marks or (THINK,) * thinking
        opened = next((pair for pair in marks if text.startswith(pair[0], begin)), None)
        if opened is None and not thinking:
            return "", 0
        inner = begin + len(opened[0]) if opened else 0
        closings = [closing for _, closing in ((opened,) if opened else marks)]
        found = [(at, mark) for mark in closings if (at := text.find(mark, inner)) >= 0]
        if not found:
            return text[inner:].strip(), None
        at, mark = min(found)
        return text[inner:at].strip(), at + len(mark)

    def _may_open_thoughts(self, text: str) -> bool:
        begin = len(text) - len(text.lstrip())
        return any(may_become(opening, text, begin) for opening, _ in self.thought_marks)


@dataclass(kw_only=True)
class _Walk:
    """The walk through what follows the thoughts, and what was found so far."""

    text: str
    syntax: CallSyntax | None
    schemas: Schemas
    stretches: list[str] = field(default_factory=list)
    calls: list[ParsedCall] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def run(self, start: int, *, whole: bool) -> None:
        """Walks from ``start`` to the end, or, if more text may follow, as far as all is decided."""
        begin = start  # of the stretch of content
        for at, block in self._blocks(start, whole=whole):
            if not whole and not block.decided:
                self._add(begin, at, touches_end=True)
                return
            if block.fault:
                self.faults.append(f"call {len(self.calls) + len(self.faults) + 1}: {block.fault}")
            elif not block.is_text:
                self._add(begin, at, touches_end=True)
                self.calls.extend(block.calls)
                begin = block.end
        end = len(self.text)
        if not whole and self.syntax:
            end -= _partial_mark_length(self.text, begin, self.syntax.marks)
        self._add(begin, end, touches_end=bool(self.syntax) and not whole)

    def content(self) -> str:
        return "\n".join(self.stretches)

    def faults_in_thoughts(self, thoughts: str) -> tuple[str, ...]:
        if self.syntax and any(mark in thoughts for mark in self.syntax.marks):
            return ("a call within thoughts that never end",)
        return ()

    def _blocks(self, start: int, *, whole: bool) -> Iterator[tuple[int, CallBlock]]:
        """Yields all blocks with where they begin. What follows a block is searched behind its end."""
        if not self.syntax:
            return
        at = start
        if self.syntax.begins_at_start(self.text, start, whole=whole):
            block = self.syntax.read_block(self.text, start, schemas=self.schemas)
            yield start, block
            at = block.end
        if not self.syntax.marks:
            return
        pattern = re.compile("|".join(map(re.escape, self.syntax.marks)))
        while found := pattern.search(self.text, at):
            block = self.syntax.read_block(self.text, found.start(), schemas=self.schemas)
            yield found.start(), block
            at = block.end

    def _add(self, begin: int, end: int, *, touches_end: bool) -> None:
        """Adds a stretch of content; one that does not begin at 0 follows thoughts or a call."""
        stretch = self.text[begin:end]
        if begin > 0:
            stretch = stretch.lstrip()
        if touches_end:
            stretch = stretch.rstrip()
        if stretch:
            self.stretches.append(stretch)


def _partial_mark_length(text: str, begin: int, marks: tuple[str, ...]) -> int:
    """Returns how many characters at the text's end, from ``begin`` on, may be the beginning of a mark."""
    longest = min(max(map(len, marks), default=0), len(text) - begin)
    for length in range(longest, 0, -1):
        if any(may_become(mark, text, len(text) - length) for mark in marks):
            return length
    return 0
