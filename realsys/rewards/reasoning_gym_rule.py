"""Rule ``reasoning_gym``: the scorer of the generator that made a question.

The answer is what stands in the last ``<answer>…</answer>``, else the whole response.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realsys.data.sources.reasoning_gym_questions import entry_of
from realsys.rewards.guard.evaluated_answers import does_more_than_state

_OPENING, _CLOSING = "<answer>", "</answer>"


def reasoning_gym_reward(*, response: str, record: Mapping[str, Any]) -> float:
    """Returns the scorer's number, from 0 to 1; 0 for what a scorer would run. Raises whatever it does."""
    text = marked_answer(response).strip()
    if does_more_than_state(str(record.get("generator")), text):
        return 0.0
    data, entry = entry_of(record)
    return float(data.score_answer(text, entry))


def marked_answer(text: str) -> str:
    """Returns what stands in the last ``<answer>…</answer>``, else the whole text."""
    found, at = text, 0
    while (begin := text.find(_OPENING, at)) >= 0:
        begin += len(_OPENING)
        end = text.find(_CLOSING, begin)
        if end < 0:  # looked for once: not behind each of thousands that open
            break
        found, at = text[begin:end], end + len(_CLOSING)
    return found
