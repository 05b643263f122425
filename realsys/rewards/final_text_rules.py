"""Rules that are functions of a text, on the text behind an answer's thoughts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realsys.api.basics.thoughts import FinalTextRule
from realsys.rewards.math_verify import math_verify_reward
from realsys.rewards.reasoning_gym_rule import reasoning_gym_reward


@dataclass(kw_only=True)
class MathRule(FinalTextRule):
    """Rule ``math_verify``: 1 if the final value equals the known one, else 0 (math_verify.py)."""

    def __call__(
        self, response: str, answer: str, final: str | None = None, question: str = ""
    ) -> float:
        """Returns the score. Never raises."""
        text = self.text_of(response, final)
        if text is None:
            return 0.0
        return math_verify_reward(response=text, answer=answer, question=question)


@dataclass(kw_only=True)
class ReasoningGymRule(FinalTextRule):
    """Rule ``reasoning_gym``: the number of the question's own scorer (reasoning_gym_rule.py)."""

    def __call__(self, response: str, record: Mapping[str, Any], final: str | None = None) -> float:
        """Returns the score. Raises whatever the scorer does."""
        text = self.text_of(response, final)
        return 0.0 if text is None else reasoning_gym_reward(response=text, record=record)
