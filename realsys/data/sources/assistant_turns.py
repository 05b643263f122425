"""Finds the assistant's turns in a chat template's renderings: where each begins, and what ends it. Pure.

Nothing is known of a template but what it renders. A turn's context is the rendering of the messages before
it with the opening of an answer, as sampling sees them; its target is what the model then has to say, with
the mark that ends the turn::

    context                                   target                behind it, of nobody
    <|im_start|>user\\nHi<|im_end|>\\n
    <|im_start|>assistant\\n                   Hello.<|im_end|>      \\n<|im_start|>user\\n…

Templates write a turn in several ways, and the target is looked for in this order:

- the context and then the turn: the target is what is added, without the opening of an answer, which some
  write behind a result only as soon as that is answered;
- otherwise than they open an answer (an opened thought, where the turn has none): the target is what the
  template writes behind a thought of that turn, without the thought;
- behind the same messages, with another opening: what both openings share is left out;
- behind messages that are written otherwise as soon as they are answered: the turn begins where the text
  before it is most like the context's end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.api.basics.thoughts import THINK
from realsys.api.errors import DataError
from realsys.data.sources.record_shape import THOUGHTS, Message, thought_of

Render = Callable[[Sequence[Message], bool], str]  # messages, whether an answer is opened → text
ANSWER_MARK = "realsys-answer-stands-here"
_LOOK_BACK = 4096  # characters in which a turn's beginning is looked for
_ASKED = {"role": "user", "content": "?"}


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """One turn, as texts.

    Attributes:
        context: what sampling sees before it.
        target: what is trained, up to the mark that ends it.
        left_out: fields of the message with a text that the template does not write.
        is_whole: it writes the calls, if there are some, and any of the rest.
    """

    context: str
    target: str
    left_out: tuple[str, ...] = ()
    is_whole: bool = True


def sequences_of(turns: Iterable[AssistantTurn]) -> list[list[tuple[str, bool]]]:
    """Joins turns to sequences: texts, and whether they are trained.

    A turn goes on the sequence of the turn before it where its context begins with that; else it begins
    one of its own. Turns that are not whole are not trained: they would teach an empty answer.
    """
    made: list[list[tuple[str, bool]]] = []
    text = ""  # of the last sequence
    for turn in turns:
        if not turn.is_whole:
            continue
        if not made or not turn.context.startswith(text):
            made.append([])
            text = ""
        made[-1] += [(turn.context[len(text) :], False), (turn.target, True)]
        text = turn.context + turn.target
    return made


def any_of(marks: Collection[str]) -> re.Pattern[str]:
    """Returns a pattern that finds these texts, the longest that fits; no white space, which some
    tokenizers have as tokens of their own."""
    longest_first = sorted((mark for mark in marks if mark.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


@dataclass(frozen=True, slots=True)
class _End:
    """How a template ends a turn without calls.

    Attributes:
        own: the mark that it writes behind a last turn; empty: there is none.
        closing: what it writes behind that mark, or in its place.
        later: the mark that it writes before the next message.
    """

    own: str
    closing: str
    later: str


class TurnReader:
    """Reads turns from the renderings of a template.

    Args:
        render: the template. Raises DataError where it refuses messages.
        marks: finds texts that are single tokens of their own, those that end turns among them.
        last_mark: ends a turn behind which the template writes no mark.
    """

    def __init__(self, render: Render, *, marks: re.Pattern[str], last_mark: str) -> None:
        self._render, self._marks, self._last_mark = render, marks, last_mark
        self._end: _End | None = None
        self._opening: str | None = None

    def read(self, messages: Sequence[Message], place: int) -> AssistantTurn:
        """Reads the turn that is message ``place``.

        Raises:
            DataError: the template refuses the messages up to there.
        """
        before, turn = [*messages[:place]], messages[place]
        context = self._render(before, True)
        whole = self._render([*before, turn], False)
        text = self._text(before, turn, context, whole)
        target = self._with_end(before, turn, text, whole)
        left_out = []
        for name, written in (("content", _without_thought(turn)), (THOUGHTS[0], _thought(turn))):
            if written.strip() and written.strip() not in target:
                left_out.append(name)
        names = Counter(str(_function(call).get("name")) for call in turn.get("tool_calls") or ())
        if any(target.count(name) < count for name, count in names.items()):
            left_out.append("tool_calls")
        is_left = bool(self._marks.sub("", target).strip())
        is_whole = "tool_calls" not in left_out and (not left_out or is_left)
        return AssistantTurn(context, target, tuple(left_out), is_whole)

    def read_all(self, messages: Sequence[Message]) -> list[AssistantTurn]:
        """Reads all turns of a conversation. Raises as ``read`` does."""
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return [self.read(messages, place) for place in places]

    def end_mark(self, prompt: Sequence[Message]) -> str:
        """Returns what ends a plain answer to ``prompt``. Raises as ``read`` does."""
        answer = {"role": "assistant", "content": ANSWER_MARK}
        return self.read([*prompt, answer], len(prompt)).target.rpartition(ANSWER_MARK)[2]

    def end_mark_of_calls(self, prompt: Sequence[Message], name: str) -> str:
        """Returns the mark that ends an answer which calls the tool ``name``; empty: the template writes no
        calls, or no mark behind them. Raises as ``read`` does."""
        call = {"name": name, "arguments": {ANSWER_MARK: ANSWER_MARK}}
        calls = [{"id": "realsys01", "type": "function", "function": call}]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        turn = self.read([*prompt, answer], len(prompt))
        return self._last(turn.target) if turn.is_whole and ANSWER_MARK in turn.target else ""

    # ---- where a turn begins ---------------------------------------------------------------------

    def _text(self, before: list[Message], turn: Message, context: str, whole: str) -> str:
        opened = _opened_thought(context)
        if whole.startswith(context):
            text = self._without_opening(context, whole[len(context) :])
            return _with_thought(turn, text) if opened else text
        if not _thought(turn):
            thought = dict.fromkeys(THOUGHTS[:2], ANSWER_MARK)
            thinking = self._render([*before, {**turn, **thought}], False)
            behind = thinking[len(context) :]
            if thinking.startswith(context) and behind.lstrip().startswith(ANSWER_MARK):
                return behind.replace(ANSWER_MARK, "", 1)
        if context.startswith(whole.rstrip()):
            return ""  # an empty turn, of which the template writes the opening alone
        text = self._otherwise_opened(before, turn, context, whole)
        if not opened:
            return text
        if text.lstrip().startswith(THINK[0]):
            return text.lstrip()[len(opened.strip()) :]
        if text.lstrip().startswith(THINK[1]):
            return _with_thought(turn, text)
        return f"{_thought(turn)}\n{THINK[1]}\n\n{text.lstrip()}"

    def _without_opening(self, context: str, text: str) -> str:
        """Returns a turn's text without the opening of an answer, which is not the model's to say."""
        opening = self._opening_of_answers()
        is_late = opening and not context.endswith(opening)
        return text.removeprefix(opening) if is_late else text

    def _opening_of_answers(self) -> str:
        """Returns with what the template opens an answer to a short question; empty: with no mark."""
        if self._opening is None:
            written, asked = self._followed([_ASKED]), self._followed([_ASKED], opens=True)
            opening = asked[len(written) :] if asked.startswith(written) else ""
            opening = opening[: len(opening) - len(_opened_thought(opening))]
            self._opening = opening if self._marks.search(opening) else ""
        return self._opening

    def _otherwise_opened(
        self, before: list[Message], turn: Message, context: str, whole: str
    ) -> str:
        """Returns a turn's text where the template does not write it behind its context."""
        core = context[: len(context) - len(_opened_thought(context))]
        written = self._render(before, False)
        if not (context.startswith(written) and whole.startswith(written)):
            marked = self._render([*before, _marked(turn)], False)
            return whole[_begins(core, whole, marked) :]
        opening = core[len(written) :]
        shared = self._shared(opening, whole[len(written) :])
        if shared < len(opening) and _thought(turn):  # the opening has closed it, and it is empty
            plain = {name: value for name, value in turn.items() if name not in THOUGHTS}
            whole = self._render([*before, plain], False)
            shared = self._shared(opening, whole[len(written) :])
        return whole[len(written) + shared :]

    def _shared(self, opening: str, text: str) -> int:
        """Returns with how many characters both begin, without a part of a mark."""
        count = len(_common_beginning(opening, text))
        if count == len(opening):
            return count
        spans = (found.span() for found in self._marks.finditer(opening))
        return next((start for start, end in spans if start < count < end), count)

    # ---- what ends a turn ------------------------------------------------------------------------

    def _with_end(self, before: list[Message], turn: Message, text: str, whole: str) -> str:
        """Returns a turn's text up to the mark that ends it, which the template may write only with the
        next message, or never."""
        end = self._end_of(before, turn)
        text = text.removesuffix(end.closing)
        ended = text.rstrip()
        last = self._last(ended)
        if last and (last == end.own or (turn.get("tool_calls") and not last.startswith("</"))):
            return ended
        if end.own:
            return text + end.own
        if calls := turn.get("tool_calls"):
            behind = whole.rstrip()
            results = self._followed([*before, turn, *map(_result_of, calls)])
            if results.startswith(behind) and (mark := self._first(results[len(behind) :])):
                return text.rstrip() + results[len(behind) :].partition(mark)[0] + mark
        return text + (end.later or self._last_mark)

    def _end_of(self, before: list[Message], turn: Message) -> _End:
        """Finds how turns end, once: behind a short question, or behind these messages where the template
        refuses that."""
        if self._end is None:
            for asked in ([_ASKED], before):
                alone = self._followed([*asked, _marked(turn)])
                followed = self._followed([*asked, _marked(turn), _ASKED])
                if ANSWER_MARK in alone:
                    break
            alone, followed = (text.rpartition(ANSWER_MARK)[2] for text in (alone, followed))
            shared = [*self._marks.finditer(_common_beginning(alone, followed))]
            own = shared[-1][0] if shared else self._last(alone)
            closing = alone[alone.rindex(own) + len(own) :] if own else alone
            self._end = _End(own, closing, self._first(followed))
        return self._end

    def _followed(self, messages: list[Message], *, opens: bool = False) -> str:
        try:
            return self._render(messages, opens)
        except DataError:  # a template without results, say: there is nothing to be read from it
            return ""

    def _first(self, text: str) -> str:
        found = self._marks.search(text)
        return found[0] if found else ""

    def _last(self, text: str) -> str:
        """Returns the mark with which a text ends, but for white space."""
        text = text.rstrip()
        return next((m[0] for m in self._marks.finditer(text) if m.end() == len(text)), "")


def _marked(turn: Message) -> dict[str, Any]:
    return {"role": turn["role"], "content": ANSWER_MARK}


def _thought(turn: Message) -> str:
    """Returns a turn's thoughts, also those that its content begins with."""
    inside, closed, _ = str(turn.get("content") or "").partition(THINK[1])
    opened = inside.lstrip().startswith(THINK[0])
    return thought_of(turn) or (inside.lstrip()[len(THINK[0]) :] if closed and opened else "")


def _without_thought(turn: Message) -> str:
    content = str(turn.get("content") or "")
    return content.rpartition(THINK[1])[2] if _thought(turn) and THINK[1] in content else content


def _with_thought(turn: Message, text: str) -> str:
    """Returns text behind an opened thought with the turn's own, which the template leaves out."""
    left_out = text.lstrip().startswith(THINK[1]) and _thought(turn) not in text
    return _thought(turn) + text.lstrip() if left_out else text


def _opened_thought(context: str) -> str:
    """Returns the end of a context that opens a thought."""
    text = context.rstrip()
    return context[len(text) - len(THINK[0]) :] if text.endswith(THINK[0]) else ""


def _common_beginning(one: str, other: str) -> str:
    shorter = min(len(one), len(other))
    count = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    return one[:count]


def _begins(core: str, whole: str, marked: str) -> int:
    """Returns where a turn begins in ``whole``: behind what its context begins with, not behind the first
    letter in which it differs from one with another text and no thoughts, and where most of what is before
    it ends the context, too."""
    latest = len(_common_beginning(whole, marked))
    earliest = len(_common_beginning(whole, core))
    best, place = 0, latest
    backwards = core[-_LOOK_BACK:][::-1]
    for at in range(latest, max(earliest, latest - _LOOK_BACK), -1):
        alike = _common_beginning(whole[max(0, at - _LOOK_BACK) : at][::-1], backwards)
        if len(alike) > best:
            best, place = len(alike), at
    return place


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _result_of(call: Mapping[str, Any]) -> dict[str, Any]:
    name = _function(call).get("name")
    return {"role": "tool", "content": "?", "tool_call_id": call.get("id"), "name": name}
