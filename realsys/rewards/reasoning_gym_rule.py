"""Rule ``reasoning_gym``: the scorer of the generator that made a question.

The answer is what stands in the last ``<answer>…</answer>``, else the whole response.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from realsys.data.sources.reasoning_gym_questions import entry_of
from realsys.rewards.guard.evaluated_answers import does_more_than_state

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_reward(*, response: str, record: Mapping[str, Any]) -> float:
    """Returns the scorer's number, from 0 to 1."""
    data, entry = entry_of(record)
    marked = _ANSWER.findall(response)
    text = marked[-1] if marked else response
    if does_more_than_state(record["generator"], text):
        return 0.0
    return float(data.score_answer(text.strip(), entry))
