"""Rule ``math_verify``: the final value of an answer, read behind its thoughts, equals the known one."""

from __future__ import annotations

from dataclasses import dataclass

from realsys.api.basics.thoughts import FinalTextRule
from realsys.rewards.math_verify import math_verify_reward


@dataclass(kw_only=True)
class MathRule(FinalTextRule):
    """Scores 1 or 0 (math_verify.py)."""

    def __call__(self, response: str, answer: str, final: str | None = None) -> float:
        """Returns the score. Never raises."""
        text = self.text_of(response, final)
        return 0.0 if text is None else math_verify_reward(response=text, answer=answer)
