"""Scores a text by a registered reward rule in a thread, for environments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

from realsys.api.errors import DataError
from realsys.api.registry import find_reward
from realsys.rewards import scores

# Rules are called one at a time, as the model workers' reward interface calls them: a rule need not be
# thread-safe.
_one_at_a_time = threading.Lock()


async def score(rule: str, *, response: str, answer: str) -> float:
    """Returns the score that the reward interface would give this text: ``find_reward(rule)`` in a
    thread.

    Raises:
        UnknownName: no rule of that name. RewardError: the rule raised, or returned no finite number.
    """
    function = find_reward(rule)
    return await asyncio.to_thread(_call, rule, function, response, answer)


def _call(rule: str, function: Callable[..., float], response: str, answer: str) -> float:
    with _one_at_a_time:
        return scores.score(rule, function, response=response, answer=answer)


def known_answer(record: Mapping[str, Any]) -> str:
    """Returns the record's final answer.

    Raises:
        DataError: it has none.
    """
    if "answer" not in record:
        raise DataError(
            "no known answer to compare with",
            where=f"a record with the fields {sorted(record)}",
            fix='use a data set whose records have "answer", e.g. math_prompts',
        )
    return str(record["answer"])
