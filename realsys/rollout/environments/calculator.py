"""Environment that evaluates arithmetic between ``<<`` and ``>>``; text without a call is scored."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from realsys.api.agent import Answer, Environment, Observation
from realsys.rollout.environments.scoring import AnswerScoring, info_of

# <<12+30>> or <<12+30=>>. GSM8K's worked answers include the result, <<12+30=42>>: these are
# text, not calls.
_CALL = re.compile(r"<<([^<>=]*)=?>>")


@dataclass(kw_only=True)
class Calculator(Environment):
    """One question and a calculator.

    A text with a call is answered with its first call's result, or with the reason of its failure; any
    other text is the final answer and is scored, as is every text after ``max_calls`` calls.

    Args:
        reward, reward_args: registered reward rules, applied to the policy's text since the last call.
    """

    reward: str = "math_verify"
    reward_args: Mapping[str, Any] = field(default_factory=dict)
    max_calls: int = 8
    _scoring: AnswerScoring = field(init=False, repr=False)
    _calls: int = field(init=False, repr=False, default=0)
    _failed: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        self._scoring = AnswerScoring(self.reward, self.reward_args)

    async def reset(self, record: Mapping[str, Any]) -> None:
        self._scoring.begin(record)
        self._calls = self._failed = 0

    def sampled(self, answer: Answer) -> None:
        self._scoring.sampled(answer)

    async def step(self, action: str) -> Observation:
        call = _CALL.search(action)
        if call is not None and self._calls < self.max_calls:
            self._calls += 1
            return Observation(text=self._result(call[1]), done=False)
        score = await self._scoring.score(action)
        info = {"calls": float(self._calls), "failed_calls": float(self._failed)}
        return Observation(reward=score.value, info={**info, **info_of(score)})

    def _result(self, text: str) -> str:
        try:
            return evaluate(text)
        except NotArithmetic as error:
            self._failed += 1
            return f"({error})"


# ---- Evaluates arithmetic in text with a parser of its own: generated text is never run as code (pure).


MAX_CHARACTERS = 100
MAX_DIGITS = 30  # limit on numerators and denominators of intermediate results
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


_WRITTEN = str.maketrans("×÷−", "*/-")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_ALLOWED = re.compile(r"[\d\s.+\-*/()]*")  # other characters never reach the parser


class NotArithmetic(ValueError):
    """The text is not arithmetic, or its result is out of bounds; carries the reason."""


def evaluate(text: str) -> str:
    """Evaluates numbers joined by + - * / and brackets, as text: ``42``, ``0.5``, or ``1/3``.

    Exact, with fractions throughout. Powers and names are rejected, to bound time and size.

    Raises:
        NotArithmetic: anything else, a division by zero, or a number of more than 30 digits.
    """
    if len(text) > MAX_CHARACTERS:
        raise NotArithmetic(f"longer than {MAX_CHARACTERS} characters")
    text = _THOUSANDS.sub("", text.translate(_WRITTEN)).strip()
    if not _ALLOWED.fullmatch(text):
        raise NotArithmetic("not arithmetic")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise NotArithmetic("not arithmetic") from error
    return _text(_value(tree.body))


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        if not math.isfinite(node.value):
            raise NotArithmetic(f"more than {MAX_DIGITS} digits")
        # A float's shortest text is the original: 0.1 is a tenth, not its nearest binary number.
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Div) and not right:
            raise NotArithmetic("division by zero")
        return _bounded(_OPERATIONS[type(node.op)](left, right))
    raise NotArithmetic("not arithmetic")


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise NotArithmetic(f"more than {MAX_DIGITS} digits")
    return value


def _text(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    as_float = float(value)
    return repr(as_float) if Fraction(repr(as_float)) == value else str(value)
