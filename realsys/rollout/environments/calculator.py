"""Works out what the policy writes between ``<<`` and ``>>``; what comes without a call is scored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realsys.api.agent import Environment, Observation
from realsys.rollout.environments.arithmetic_parser import NotArithmetic, evaluate
from realsys.rollout.environments.scoring import known_answer, score

# <<12+30>> or <<12+30=>>. GSM8K's own worked answers have the result inside, <<12+30=42>>: such a one is
# text, not a question.
_CALL = re.compile(r"<<([^<>=]*)=?>>")


@dataclass(kw_only=True)
class Calculator(Environment):
    """One question and a calculator.

    A text with a call is answered with its first call's result, or with the reason why there is none;
    any other text is the final answer and is scored. After ``max_calls`` calls everything is.

    Args:
        reward: name of a registered reward rule; it sees the policy's text since the last call.
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
