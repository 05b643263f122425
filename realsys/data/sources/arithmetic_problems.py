"""Generates arithmetic word problems with step-by-step answers, for the demo that needs no download.

For ``realsys launch ppo-math`` and the tests: ``split="train"`` feeds supervised fine-tuning and PPO,
``split="test"`` the held-out evaluation. Answers end in ``#### N`` as in GSM8K (Cobbe et al.,
arXiv:2110.14168). The text is a pure function of the arguments: no file, no clock, no ``hash()``.

About half of the problems need a carry (or a borrow), as ``57 + 8`` does. ``slip_share`` makes some of
their worked answers forget it, as pupils do: ``57 + 8 = 55``. A policy fine-tuned on such answers
learns both habits, and the reward teaches it which one is right.

A problem's split is drawn from its operands alone: no equation of the test set is ever seen in
training, whatever the wording.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from functools import cache

from realsys.api.errors import DataError, did_you_mean

SPLITS = ("train", "test")
_TEST_PERCENT = 10  # of the operand pairs
_FIRST, _SECOND = range(10, 100), range(2, 10)
_RESULTS = range(10, 100)  # an answer has two digits

_NAMES = tuple(
    "Ada Amy Anna Ben Clara Diego Emma Eva Grace Hugo Ida Ivan James Kai Leo Lily Max Mia Nina "
    "Noah Omar Ravi Rosa Sam Tom Yuki Zoe".split()
)
_THINGS = tuple(
    "apples beads books bottles buttons candles cards coins cookies cups eggs flowers lemons "
    "marbles pencils photos plums shells stamps stickers stones tickets toys".split()
)


@dataclass(frozen=True, slots=True)
class _Template:
    """A wording of ``a + b`` or ``a - b``."""

    sign: str
    text: str


_TEMPLATES = (
    _Template("+", "{name} has {a} {things} and buys {b} more. How many does {name} have now?"),
    _Template("+", "{name} has {a} {things}. {other} has {b}. How many do they have together?"),
    _Template("+", "{name} finds {a} {things} on Monday and {b} on Friday. How many in total?"),
    _Template("-", "{name} has {a} {things} and sells {b} of them. How many {things} are left?"),
    _Template("-", "{name} has {a} {things}. {other} has {b} fewer. How many does {other} have?"),
    _Template("-", "There were {a} {things} in a box. {name} took {b}. How many are left?"),
)


def arithmetic_word_problems(
    *, num_problems: int, seed: int, split: str, slip_share: float = 0.0
) -> list[dict[str, str]]:
    """Generates word problems in an order drawn from ``seed``, every template equally often.

    Args:
        num_problems: number of problems; beyond the number of equations, equations repeat in other words.
        seed: seed of operands, names, things and order.
        split: ``"train"`` or ``"test"``; no equation is in both, whatever the seeds.
        slip_share: share of the problems with a carry whose answer forgets it.
    Returns:
        Records ``{"prompt": ..., "answer": ...}``. A prompt ends in a newline, so that prompt +
        answer is the training text; an answer is the equation and ``#### N``.
    Raises:
        DataError: no such split, or a share outside 0 … 1.
    """
    if split not in SPLITS:
        raise DataError(
            f"no split {split!r}", where="arithmetic problems", fix=did_you_mean(split, SPLITS)
        )
    if not 0 <= slip_share <= 1:
        raise DataError(
            f"slip_share is {slip_share}", where="arithmetic problems", fix="use a share, 0 to 1"
        )
    rng = random.Random(f"{seed}/{split}")
    order = [_TEMPLATES[i % len(_TEMPLATES)] for i in range(num_problems)]
    rng.shuffle(order)
    return [_record(template, slip_share, split, rng) for template in order]


def needs_carry(a: int, sign: str, b: int) -> bool:
    """True if the units digits' result carries (or borrows) into the tens."""
    return a % 10 + b % 10 >= 10 if sign == "+" else a % 10 < b % 10


@cache
def _pairs(sign: str, split: str) -> tuple[tuple[int, int], ...]:
    """Lists every operand pair of ``split`` whose result is allowed."""
    return tuple(
        (a, b)
        for a in _FIRST
        for b in _SECOND
        if _split_of(a, b) == split and (a + b if sign == "+" else a - b) in _RESULTS
    )


def _split_of(a: int, b: int) -> str:
    """Returns the split of an operand pair, drawn by CRC-32, which is the same on every machine."""
    return "test" if zlib.crc32(f"{a},{b}".encode()) % 100 < _TEST_PERCENT else "train"


def _record(
    template: _Template, slip_share: float, split: str, rng: random.Random
) -> dict[str, str]:
    a, b = rng.choice(_pairs(template.sign, split))
    name, other = rng.sample(_NAMES, 2)
    text = template.text.format(name=name, other=other, things=rng.choice(_THINGS), a=a, b=b)
    result = a + b if template.sign == "+" else a - b
    # Drawn for every problem, so that the share changes no other draw
    slips = rng.random() < slip_share
    if slips and needs_carry(a, template.sign, b):
        result += -10 if template.sign == "+" else 10
    return {
        "prompt": text + "\n",
        "answer": f"{a} {template.sign} {b} = {result}\n#### {result}",
    }
