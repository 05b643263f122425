"""Who scores the answers of this process, if it does not do so itself: the run's reward workers. No torch.

A worker's ``build.py`` sets it for its process; realsys.rewards.rule asks here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from realsys.api.basics.reward import Completion, Score
from realsys.api.errors import RewardError


class Grader(Protocol):
    """Scores answers elsewhere. Each is tried twice, by two processes if there are as many."""

    def score_all(self, answers: Sequence[Completion]) -> list[Score | RewardError]:
        """Scores answers, in order; blocks."""
        ...

    async def score(self, answer: Completion) -> Score:
        """Scores one answer without blocking the event loop. Raises RewardError."""
        ...


_graders: dict[str, Grader] = {}


def key_of(expression: str, args: Mapping[str, Any] | None) -> str:
    """Returns what is the same for equal rules with equal arguments."""
    return json.dumps([expression, args or {}], sort_keys=True, default=dict)


def set_grader(expression: str, args: Mapping[str, Any], grader: Grader | None) -> None:
    """Makes ``grader`` score for these rules in this process; None: it does so itself."""
    if grader is None:
        _graders.pop(key_of(expression, args), None)
    else:
        _graders[key_of(expression, args)] = grader


def grader_of(expression: str, args: Mapping[str, Any] | None) -> Grader | None:
    """Returns who scores for these rules; None: this process."""
    return _graders.get(key_of(expression, args))
