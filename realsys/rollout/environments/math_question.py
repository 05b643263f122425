"""Environment that compares an answer with the known one; with several turns it gives feedback and
retries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realsys.api.agent import Answer, Environment, Observation
from realsys.api.errors import ConfigError
from realsys.rollout.environments.scoring import AnswerScoring, info_of

FEEDBACK = "That is not right. Look for the mistake and answer again."


@dataclass(kw_only=True)
class MathVerify(Environment):
    """One question.

    With ``turns=1`` the reward is the rule's score. With more, an answer that scores less than
    ``right`` gets ``feedback`` instead, until the last turn; turn t (from 0) earns ``discount**t`` times
    its score.

    Args:
        reward, reward_args: registered reward rules.
        right: lowest score of a correct answer; None: the rule's own notion.
    """

    reward: str = "math_verify"
    reward_args: Mapping[str, Any] = field(default_factory=dict)
    turns: int = 1
    discount: float = 1.0
    right: float | None = None
    feedback: str = FEEDBACK
    _scoring: AnswerScoring = field(init=False, repr=False)
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
        self._scoring = AnswerScoring(self.reward, self.reward_args)

    async def reset(self, record: Mapping[str, Any]) -> None:
        self._scoring.begin(record)
        self._turn = 0

    def sampled(self, answer: Answer) -> None:
        self._scoring.sampled(answer)

    async def step(self, action: str) -> Observation:
        score = await self._scoring.score(action)
        turn, self._turn = self._turn, self._turn + 1
        correct = score.correct if self.right is None else score.value >= self.right
        if not correct and self._turn < self.turns:
            return Observation(text=self.feedback, done=False)
        # A factor of 1 keeps every bit of the score, so the first turn equals the synchronous reward.
        return Observation(
            reward=score.value * self.discount**turn,
            info={"turns": float(self._turn), **info_of(score)},
        )
