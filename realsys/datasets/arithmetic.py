"""Arithmetic word problems with step-by-step answers, for the demo that needs no download.

For `realsys launch ppo-math` and the tests: `split="train"` feeds supervised fine-tuning and PPO,
`split="test"` the held-out evaluation. Answers end in ``#### N`` as in GSM8K (Cobbe et al.,
arXiv:2110.14168). The text is a pure function of the arguments: no file, no clock, no `hash()`.
Scoring an answer is realsys/algorithms' business, tokenizing it realsys/models'.

A problem's split is drawn from its first two operands alone, in whatever order. So no equation
between two-digit operands of the test set is ever seen in training, in any problem or step.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from realsys.api.errors import DataError, did_you_mean

Operands = tuple[int, ...]

SPLITS = ("train", "test")
_TEST_PERCENT = 10  # of the operand pairs
_TWO_DIGITS = range(10, 100)  # the first two operands
_ONE_DIGIT = range(2, 10)  # the third: no equation with it can be that of a held-out pair
_RESULTS = range(10, 100)  # of every step: numbers look alike, and an answer has two digits

_NAMES = [
    "Ada",
    "Amy",
    "Anna",
    "Ben",
    "Clara",
    "Diego",
    "Emma",
    "Eva",
    "Grace",
    "Hugo",
    "Ida",
    "Ivan",
    "James",
    "Kai",
    "Leo",
    "Lily",
    "Max",
    "Mia",
    "Nina",
    "Noah",
    "Omar",
    "Ravi",
    "Rosa",
    "Sam",
    "Tom",
    "Yuki",
    "Zoe",
]
_THINGS = [
    "apples",
    "beads",
    "books",
    "bottles",
    "buttons",
    "candles",
    "cards",
    "coins",
    "cookies",
    "cups",
    "eggs",
    "flowers",
    "lemons",
    "marbles",
    "pencils",
    "photos",
    "plums",
    "shells",
    "stamps",
    "stickers",
    "stones",
    "tickets",
    "toys",
]


@dataclass(frozen=True, slots=True)
class _Template:
    """One wording. ``signs`` joins the operands from left to right: ``a + b - c`` is ``"+-"``."""

    signs: str
    text: str


_TEMPLATES = (
    _Template("+", "{name} has {a} {things} and buys {b} more. How many does {name} have now?"),
    _Template("+", "{name} has {a} {things}. {other} has {b}. How many do they have together?"),
    _Template("+", "{name} finds {a} {things} on Monday and {b} on Friday. How many in total?"),
    _Template("-", "{name} has {a} {things} and sells {b} of them. How many {things} are left?"),
    _Template("-", "{name} has {a} {things}. {other} has {b} fewer. How many does {other} have?"),
    _Template("-", "There were {a} {things} in a box. {name} took {b}. How many are left?"),
    _Template("+-", "{name} has {a} {things}, buys {b} and gives away {c}. How many are left?"),
    _Template("-+", "{name} has {a} {things}, loses {b} and finds {c}. How many are there now?"),
)


def arithmetic_word_problems(*, num_problems: int, seed: int, split: str) -> list[dict[str, str]]:
    """Distinct word problems, every template equally often, in an order drawn from ``seed``.

    Args:
        num_problems: how many; at most `num_distinct_problems(split)`.
        seed: which of them, in which order, with which names and things.
        split: ``"train"`` or ``"test"``; no operand pair is in both, whatever the seeds.
    Returns:
        Records ``{"prompt": ..., "answer": ...}``. A prompt ends in a newline, so that prompt +
        answer is the training text; an answer holds an equation a line and ends in ``#### N``.
    Raises:
        DataError: no such split, or it holds fewer problems than asked for.
    """
    if num_problems > (most := num_distinct_problems(split)):
        what = f"num_problems={num_problems}, but split {split!r} holds {most}"
        raise DataError(what, where="arithmetic_word_problems", fix=f"ask for at most {most}")
    rng = random.Random(f"{seed}/{split}")
    per_template = -(-num_problems // len(_TEMPLATES))
    problems = [
        (template, operands)
        for template in _TEMPLATES
        for operands in rng.sample(_operands_of(template.signs, split), per_template)
    ]
    rng.shuffle(problems)
    return [_record(template, operands, rng) for template, operands in problems[:num_problems]]


def num_distinct_problems(split: str) -> int:
    """How many problems ``split`` holds that differ in template or operands.

    Raises:
        DataError: no such split.
    """
    if split not in SPLITS:
        raise DataError(
            f"no split {split!r}", where="arithmetic problems", fix=did_you_mean(split, SPLITS)
        )
    smallest = min(len(_operands_of(template.signs, split)) for template in _TEMPLATES)
    return smallest * len(_TEMPLATES)


@cache
def _operands_of(signs: str, split: str) -> list[Operands]:
    """Every operand tuple that ``signs`` allows in ``split``, each step's result in _RESULTS."""
    pairs = [(a, b) for a, b in product(_TWO_DIGITS, _TWO_DIGITS) if _split_of(a, b) == split]
    longer = [(*pair, c) for pair in pairs for c in _ONE_DIGIT] if len(signs) == 2 else pairs
    return [
        operands
        for operands in longer
        if all(result in _RESULTS for _, result in _steps(signs, operands))
    ]


def _split_of(a: int, b: int) -> str:
    """The split that owns the pair, in either order. CRC-32, as it is the same everywhere."""
    low, high = sorted((a, b))
    return "test" if zlib.crc32(f"{low},{high}".encode()) % 100 < _TEST_PERCENT else "train"


def _steps(signs: str, operands: Operands) -> Iterator[tuple[str, int]]:
    """Each equation from left to right, as text and result: ``("23 + 45 = 68", 68)``."""
    total = operands[0]
    for sign, operand in zip(signs, operands[1:], strict=True):
        result = total + operand if sign == "+" else total - operand
        yield f"{total} {sign} {operand} = {result}", result
        total = result


def _record(template: _Template, operands: Operands, rng: random.Random) -> dict[str, str]:
    name, other = rng.sample(_NAMES, 2)
    numbers = dict(zip("abc", operands, strict=False))
    text = template.text.format(name=name, other=other, things=rng.choice(_THINGS), **numbers)
    equations, results = zip(*_steps(template.signs, operands), strict=True)
    return {"prompt": text + "\n", "answer": "\n".join([*equations, f"#### {results[-1]}"])}
