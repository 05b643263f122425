"""Answers of families that no form of ours reads: their calls are read by the package ``renderers``.

    answer ─ MarkedForm: thoughts, content ─ a block of calls ─ bound ─ the package ─ checks ─ calls
                                                 └──────────── else it stays content, a fault

The package sees one block at a time, as a few tokens: the family's marks, and the texts between them. So it
neither tokenises nor decodes what the policy wrote, and takes no time for each of its tokens.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from realsys.rollout.conversation.forms.answer_scan import MarkedForm
from realsys.rollout.conversation.forms.call_syntax import (
    JSON_STRING,
    CallBlock,
    CallSyntax,
    Schemas,
    block_between,
    may_become,
    skip_white,
    up_to,
)
from realsys.rollout.conversation.forms.family_calls import (
    FAMILY_CALLS,
    FamilyCalls,
    checked_calls,
    has_shape,
)
from realsys.rollout.conversation.forms.parsed_answer import ParsedAnswer, ParsedCall
from realsys.rollout.conversation.package_renderer import made_by_package

# Of one block: that of a call which writes a file of 1,000 lines has 40,000. The package may take time
# quadratic in a block; of this length none was found that takes over a twentieth of a second.
MOST_CHARACTERS = 65_536
_FIRST_ID = 1 << 40  # above all tokenizers' ids


class PackageForm:
    """An ``AnswerForm`` of one of FAMILY_CALLS.

    A block is read as a whole: if one of its calls can't be read, all of it stays content. While an answer
    grows, the package is not asked: a block is open until the answer has ended.

    Raises:
        ConfigError: the package is not installed, or has no such family for this tokenizer.
    """

    def __init__(self, tokenizer: Any, family: str, *, where: str) -> None:
        calls = FAMILY_CALLS[family]
        self.name = form_name(family)
        self.thought_marks = calls.thought_marks
        reader = _PackageReader(tokenizer, family, where=where)
        syntax = _InklingCalls(reader) if family == "inkling" else _SectionCalls(reader)
        self.syntax: CallSyntax = syntax
        self._whole = MarkedForm(name=self.name, thought_marks=calls.thought_marks, syntax=syntax)
        self._growing = MarkedForm(
            name=self.name, thought_marks=calls.thought_marks, syntax=_Unread(syntax)
        )

    def parse(
        self, text: str, *, thinking: bool, tools: bool, schemas: Schemas | None = None
    ) -> ParsedAnswer:
        """Takes a whole answer apart; see ``AnswerForm.parse``."""
        return self._whole.parse(text, thinking=thinking, tools=tools, schemas=schemas)

    def safe_prefix(self, text: str, *, thinking: bool, tools: bool) -> str:
        """Returns what is content of an answer's beginning for sure; see ``AnswerForm.safe_prefix``."""
        return self._growing.safe_prefix(text, thinking=thinking, tools=tools)


def form_name(family: str) -> str:
    """Returns how the form of a family of the package is called."""
    return f"renderers: {family}"


class _PackageReader:
    """One block's text → its calls."""

    def __init__(self, tokenizer: Any, family: str, *, where: str) -> None:
        self.calls: FamilyCalls = FAMILY_CALLS[family]
        self._pieces = _Pieces(tokenizer, self.calls.atoms)
        self._package = made_by_package(self._pieces, family, where=where)

    def read(self, block: str, schemas: Schemas) -> list[ParsedCall]:
        """Returns the calls of a block with its marks.

        Raises:
            ValueError: it is too long, or its calls can't be read.
        """
        if len(block) > MOST_CHARACTERS:
            raise ValueError(f"a block of {len(block)} characters, over {MOST_CHARACTERS}")
        if block.count(self.calls.opening) + block.count(self.calls.closing) > 2:
            raise ValueError("a mark of calls stands in an argument")
        if not has_shape(self.calls, block):
            raise ValueError("it is not written as this family's calls are")
        try:
            tokens = self._pieces.cut(block)
            parsed = self._package.parse_response(tokens, tools=_tools(schemas))
            return checked_calls(self.calls, block, parsed.tool_calls)
        except ValueError:
            raise
        except Exception as error:  # the package may raise anything
            raise ValueError(f"the package raised {type(error).__name__}: {error}"[:200]) from error


def _tools(schemas: Schemas) -> list[dict[str, Any]] | None:
    made = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in schemas.items()
    ]
    return made or None


class _Pieces:
    """A tokenizer to the package, whose tokens are marks and whatever stands between them."""

    def __init__(self, tokenizer: Any, atoms: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._ids = {atom: tokenizer.convert_tokens_to_ids(atom) for atom in atoms}
        self._pattern = re.compile(f"({'|'.join(map(re.escape, atoms))})") if atoms else None
        self._of_thread = threading.local()  # texts of the block's tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._tokenizer(*args, **more)

    def cut(self, block: str) -> list[int]:
        """Returns the tokens of a block, which ``decode`` knows in this thread up to the next one."""
        pieces = self._pattern.split(block) if self._pattern else [block]
        fresh = count(_FIRST_ID)
        tokens = [self._ids[p] if p in self._ids else next(fresh) for p in pieces if p]
        texts = dict(zip(tokens, filter(None, pieces), strict=True))
        self._of_thread.texts = texts
        return tokens

    def decode(self, tokens: Any, **more: Any) -> str:
        """Returns the text of tokens, which are a block's, or the tokenizer's own."""
        texts: Mapping[int, str] = getattr(self._of_thread, "texts", {})
        if isinstance(tokens, list) and all(token in texts for token in tokens):
            return "".join(texts[token] for token in tokens)
        return str(self._tokenizer.decode(tokens, **more))


class _SectionCalls:
    """A section of calls between two marks, wherever it stands."""

    json_texts = None  # what the package reads can't be written as a grammar here

    def __init__(self, reader: _PackageReader) -> None:
        self._reader = reader
        self._marks = (reader.calls.opening, reader.calls.closing)
        self._inside = up_to(reader.calls.closing, argument=reader.calls.argument)
        self.marks: tuple[str, ...] = self._marks[:1]

    def begins_at_start(self, text: str, start: int, *, whole: bool) -> bool:
        return False

    def passed_mark(self, text: str, start: int) -> int | None:
        """Returns where a mark ends that means nothing itself; None: a call may begin there."""
        return None

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        _, end, closed = block_between(text, start, *self._marks, self._inside)
        if not closed:
            return CallBlock(end=end, fault="it was cut off", decided=False)
        return _read(self._reader, text[start:end], end, schemas)


def _read(reader: _PackageReader, block: str, end: int, schemas: Schemas) -> CallBlock:
    try:
        return CallBlock(end=end, calls=tuple(reader.read(block, schemas)))
    except ValueError as error:
        return CallBlock(end=end, fault=str(error))


_MODEL, _END, _TEXT = "<|message_model|>", "<|end_message|>", "<|content_text|>"
_THINKING, _CALL = "<|content_thinking|>", "<|content_invoke_tool_json|>"
_INSIDE = up_to(_END, _MODEL, argument=JSON_STRING)  # of a call
_MESSAGE_END = re.compile(f"{re.escape(_END)}|{re.escape(_MODEL)}|{re.escape(_CALL)}")
_THOUGHTS_END = re.compile(f"{re.escape(_END)}|{re.escape(_MODEL)}")


class _InklingCalls(_SectionCalls):
    """Messages of the model: texts, thoughts, calls. The first one's mark stands in the prompt."""

    def __init__(self, reader: _PackageReader) -> None:
        super().__init__(reader)
        self.marks = (_MODEL, _TEXT, _END)

    def begins_at_start(self, text: str, start: int, *, whole: bool) -> bool:
        at = skip_white(text, start)
        mark = text.find("<|", at)
        if mark < 0 or text.startswith(_CALL, mark):
            return mark >= 0 or not whole
        return not whole and may_become(_CALL, text, mark)

    def passed_mark(self, text: str, start: int) -> int | None:
        for mark in (f"{_MODEL}{_TEXT}", _TEXT, _END):
            if text.startswith(mark, start):
                return start + len(mark)
        return None

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        if (passed := self.passed_mark(text, start)) is not None:
            return CallBlock(end=passed)
        begin = start + len(_MODEL) if text.startswith(_MODEL, start) else start
        is_thoughts = text.startswith(_THINKING, begin)
        found = (_THOUGHTS_END if is_thoughts else _MESSAGE_END).search(text, begin)
        if found and found[0] == _CALL:
            inside = _INSIDE.match(text, found.end())
            found = _MESSAGE_END.match(text, inside.end() if inside else found.end())
        is_closed = found is not None and found[0] == _END
        end = found.start() if found else len(text)
        behind = found.end() if found and is_closed else end
        if is_thoughts:  # later ones: no content, and calls within are none
            return CallBlock(end=behind, decided=found is not None)
        if text.find(_CALL, begin, end) < 0:
            return CallBlock(end=begin, decided=found is not None)
        if not is_closed:
            return CallBlock(end=behind, fault="it was cut off", decided=found is not None)
        return _read(self._reader, f"{_MODEL}{text[begin:behind]}", behind, schemas)


class _Unread:
    """The syntax of an answer that grows: all calls are open."""

    json_texts = None

    def __init__(self, syntax: _SectionCalls) -> None:
        self._syntax = syntax
        self.marks = syntax.marks

    def begins_at_start(self, text: str, start: int, *, whole: bool) -> bool:
        return self._syntax.begins_at_start(text, start, whole=whole)

    def read_block(self, text: str, start: int, *, schemas: Schemas) -> CallBlock:
        if (passed := self._syntax.passed_mark(text, start)) is not None:
            return CallBlock(end=passed)
        return CallBlock(end=len(text), decided=False)
