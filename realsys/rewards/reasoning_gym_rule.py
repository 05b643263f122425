"""Rule ``reasoning_gym``: the scorer of the generator that made a question.

The answer is the one that the response states (stated_answer.py): in the last ``<answer>…</answer>``, else
behind another common mark, else the whole response.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realsys.data.sources.reasoning_gym_questions import entry_of
from realsys.rewards.final_answers.stated_answer import stated_answer
from realsys.rewards.guard.evaluated_answers import does_more_than_state

_SMALL = 1e-9


def reasoning_gym_reward(*, response: str, record: Mapping[str, Any]) -> float:
    """Returns the scorer's number, from 0 to 1; 0 for what a scorer would run. Raises whatever it does."""
    text = stated_answer(response).strip()
    if does_more_than_state(str(record.get("generator")), text):
        return 0.0
    data, entry = entry_of(record)
    return whole_score(data, entry, text)


def whole_score(data: Any, entry: Any, answer: str) -> float:
    """Returns the scorer's number; 0 where it is for an answer that only contains the right one.

    Many scorers give a text that contains the right answer the right one's share of its length: they pay
    for "42 or 43".
    """
    score = float(data.score_answer(answer, entry))
    known = entry["answer"]
    if isinstance(known, str) and known and answer != known and known in answer:
        lengths = {len(answer), len(answer.replace(",", ""))}  # some leave them out
        return 0.0 if any(abs(score - len(known) / n) < _SMALL for n in lengths if n) else score
    return score
