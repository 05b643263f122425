"""What became of conversations under a template: what is trained, how turns end, what is refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from realsys.data.sources.assistant_turns import AssistantTurn

FIELDS = {"content": "content", "thoughts": "reasoning_content", "calls": "tool_calls"}
MOST_MESSAGES = 4  # of a template, by which it refuses conversations
Messages = Sequence[Mapping[str, Any]]


class Tally:
    """Counts of one template.

    Args:
        marks: finds texts that are single tokens.
    """

    def __init__(self, marks: re.Pattern[str]) -> None:
        self._marks = marks
        self._counts: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._has: Counter[str] = Counter()
        self._trained: Counter[str] = Counter()
        self._ends: dict[str, Counter[str]] = {"answers": Counter(), "calls": Counter()}

    def refused(self, why: str) -> None:
        """Counts a conversation of which the template refuses a turn: nothing of it is trained."""
        self._counts["conversations"] += 1
        self._refusals[why] += 1

    def taken(self, messages: Messages, turns: Mapping[int, AssistantTurn]) -> None:
        """Counts a conversation and its turns, by their places."""
        self._counts["conversations"] += 1
        text = None  # of the last sequence
        for place, turn in turns.items():
            self._turn(messages[place], turn)
            if turn.is_whole:
                self._counts["sequences"] += text is None or not turn.context.startswith(text)
                text = turn.context + turn.target

    def _turn(self, message: Mapping[str, Any], turn: AssistantTurn) -> None:
        self._counts["turns"] += 1
        self._counts["turns_trained"] += turn.is_whole
        thinks = any(message.get(name) for name in ("reasoning_content", "thinking", "reasoning"))
        for name, field in FIELDS.items():
            has = thinks if name == "thoughts" else bool(message.get(field))
            self._has[name] += has
            self._trained[name] += has and turn.is_whole and field not in turn.left_out
        if turn.is_whole:
            *_, last = self._marks.finditer(turn.target)
            self._ends["calls" if message.get("tool_calls") else "answers"][last[0]] += 1

    def found(self) -> dict[str, Any]:
        """Returns the counts, for a result in JSON."""
        refused = self._refusals.total()
        taken = self._counts["conversations"] - refused
        return {
            "conversations": self._counts["conversations"],
            "refused": refused,
            "refused_because": dict(self._refusals.most_common(MOST_MESSAGES)),
            "turns": self._counts["turns"],
            "turns_trained": self._counts["turns_trained"],
            "fields": {name: [self._trained[name], self._has[name]] for name in FIELDS},
            "ends": {name: dict(ends) for name, ends in self._ends.items() if ends},
            "sequences_a_conversation": round(self._counts["sequences"] / taken, 2) if taken else 0,
        }
