"""Environment that compares an answer with the known one; with several turns it gives feedback and
retries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realsys.api.agent import Environment, Observation
from realsys.api.errors import ConfigError
from realsys.api.registry import right_score
from realsys.rollout.environments.scoring import known_answer, score

FEEDBACK = "That is not right. Look for the mistake and answer again."


@dataclass(kw_only=True)
class MathVerify(Environment):
    """One question.

    With ``turns=1`` the reward is the rule's score. With more, an answer that scores less than
    ``right`` gets ``feedback`` instead, until the last turn; turn t (from 0) earns ``discount**t`` times
    its score.

    Args:
        reward: name of a registered reward rule.
        right: lowest score of a correct answer; None: the rule's own.
    """

    reward: str = "math_verify"
    turns: int = 1
    discount: float = 1.0
    right: float | None = None
    feedback: str = FEEDBACK
    _answer: str = field(init=False, repr=False, default="")
    _turn: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ConfigError(
                f"turns is {self.turns}", where="environment math_verify", fix="use 1 or more"
            )
        if not 0 <= self.discount <= 1:
            raise ConfigError(
                f"discount is {self.discount}",
                where="environment math_verify",
                fix="use a number from 0 to 1",
            )

    async def reset(self, record: Mapping[str, Any]) -> None:
        self._answer, self._turn = known_answer(record), 0

    async def step(self, action: str) -> Observation:
        worth = await score(self.reward, response=action, answer=self._answer)
        turn, self._turn = self._turn, self._turn + 1
        right = right_score(self.reward) if self.right is None else self.right
        if worth < right and self._turn < self.turns:
            return Observation(text=self.feedback, done=False)
        # A factor of 1 keeps every bit of the score, so the first turn equals the synchronous reward.
        return Observation(reward=worth * self.discount**turn, info={"turns": float(self._turn)})
