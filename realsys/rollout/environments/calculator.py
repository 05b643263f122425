"""Environment that evaluates arithmetic between ``<<`` and ``>>``; text without a call is scored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realsys.api.agent import Environment, Observation
from realsys.rollout.environments.arithmetic_parser import NotArithmetic, evaluate
from realsys.rollout.environments.scoring import known_answer, score

# <<12+30>> or <<12+30=>>. GSM8K's worked answers include the result, <<12+30=42>>: these are
# text, not calls.
_CALL = re.compile(r"<<([^<>=]*)=?>>")


@dataclass(kw_only=True)
class Calculator(Environment):
    """One question and a calculator.

    A text with a call is answered with its first call's result, or with the reason of its failure; any
    other text is the final answer and is scored, as is every text after ``max_calls`` calls.

    Args:
        reward: name of a registered reward rule, applied to the policy's text since the last call.
    """

    reward: str = "math_verify"
    max_calls: int = 8
    _answer: str = field(init=False, repr=False, default="")
    _calls: int = field(init=False, repr=False, default=0)
    _failed: int = field(init=False, repr=False, default=0)

    async def reset(self, record: Mapping[str, Any]) -> None:
        self._answer, self._calls, self._failed = known_answer(record), 0, 0

    async def step(self, action: str) -> Observation:
        call = _CALL.search(action)
        if call is not None and self._calls < self.max_calls:
            self._calls += 1
            return Observation(text=self._result(call[1]), done=False)
        worth = await score(self.reward, response=action, answer=self._answer)
        info = {"calls": float(self._calls), "failed_calls": float(self._failed)}
        return Observation(reward=worth, info=info)

    def _result(self, text: str) -> str:
        try:
            return evaluate(text)
        except NotArithmetic as error:
            self._failed += 1
            return f"({error})"
