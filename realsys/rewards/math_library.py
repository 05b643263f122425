"""Comparison of answers that needs more than rational numbers, for a process of its own (guard/).

Terms are evaluated to 100 digits and more, functions at several points; what our own parser
(math_forms.py) doesn't read is left to the math-verify library. Nothing else imports this file: the
libraries take seconds to load, and may never return on some texts.
"""

from __future__ import annotations

import itertools
import logging
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import mpmath
from math_verify import parse, verify

from realsys.rewards.final_answers.answer_comparison import (
    Rationals,
    Undecided,
    digits_of,
    is_left_undone,
    is_rounded,
    same,
)
from realsys.rewards.final_answers.answer_terms import (
    exact,
    is_fraction,
    is_worked_out,
    may_stand,
    names_of,
)
from realsys.rewards.final_answers.math_forms import readings as readings_of
from realsys.rewards.final_answers.term_parser import Term

for _module in ("parser", "grader"):  # each would warn once that it has no timeout
    logging.getLogger(f"math_verify.{_module}").setLevel(logging.CRITICAL)

_DIGITS, _MORE_DIGITS = 200, 600
_MAX_EXPONENT = 1 << 24  # bits of a value's size
_MAX_ANGLE = 1 << 12
_POINTS = 4
_MAX_BRACKETS = 8
_POWER = r"(?:\^|\*\*)\s*"
EXPLOSIVE = re.compile(
    rf"{_POWER}[-\w.]+\s*{_POWER}"  # 9^9^9
    rf"|{_POWER}[{{(][^}})]*(?:\^|\*\*)"  # 9^{9^9}
    rf"|{_POWER}[{{(]?\s*-?\d{{5}}"  # 9^{99999}
    rf"|[)\]}}]\s*{_POWER}[{{(]?\s*-?\d{{2}}"  # (x+y)^{99}
    r"|\\(?:[dt]?binom|prod|sum|i?int|lim)\b"
)
FACTORIAL = re.compile(r"[\d)}\]]\s*!")

_COMMON = (
    ("\\frac{3\\sqrt{2}}{4}", "3\\sqrt{2}/4"),
    ("x^2+2x-3", "-3+2x+x^2"),
    ("\\{1,2\\pi,3\\}", "{3,2\\pi,1}"),
    ("3+2i", "2i+3"),
    ("\\log_{2} 7", "\\frac{\\ln 7}{\\ln 2}"),
    ("\\pi", "3.14159265"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
)


def is_one_of(*, known: str, readings: Sequence[str]) -> bool:
    """True if one of ``readings`` equals ``known``: values as people or LaTeX write them."""
    terms = _Terms()
    ours = readings_of(known)
    if ours:
        pairs = itertools.product(ours, (form for text in readings for form in readings_of(text)))
        return any(same(one, other, terms) for one, other in pairs)
    gold = parse(_as_latex(known), parsing_timeout=None)
    return any(
        verify(gold, parse(_as_latex(reading), parsing_timeout=None), timeout_seconds=None)
        for reading in readings
        if not _may_never_end(reading)
    )


def prepare() -> None:
    """Compares some values of each kind, so that a guard's forks find the libraries' tables filled."""
    for known, found in _COMMON:
        is_one_of(known=known, readings=[found])


def _may_never_end(text: str) -> bool:
    """True for what the math-verify library computes or parses for ever."""
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest > _MAX_BRACKETS or bool(EXPLOSIVE.search(text) or FACTORIAL.search(text))


def _as_latex(value: str) -> str:
    """Wraps a bare value in dollar signs: the library reads LaTeX only between them."""
    return value if "$" in value else f"${value}$"


class _TooLarge(Exception):
    """A value that would take for ever, such as 9^9^9^9."""


class _Terms:
    """Compares terms by their values to many digits."""

    def __init__(self) -> None:
        self._rationals = Rationals()

    def same(self, known: Term, found: Term) -> bool:
        try:
            return self._rationals.same(known, found)
        except Undecided:
            pass
        if is_worked_out(known) or is_worked_out(found):
            return self._is_rounding(known, found)
        if is_left_undone(known, found):
            return False
        return self._agree_at_points(known, found)

    def proportional(self, known: Term, found: Term, *, by_positive: bool) -> bool:
        names = sorted(names_of(known) | names_of(found))
        ratios = []
        try:
            with mpmath.workdps(_DIGITS):
                for point in range(_POINTS):
                    values = _values(names, point)
                    ours, theirs = _value(known, values), _value(found, values)
                    if not ours or not theirs:
                        if bool(ours) != bool(theirs):
                            return False
                        continue
                    ratios.append(theirs / ours)
        except (_TooLarge, ValueError, ZeroDivisionError, OverflowError, TypeError):
            return False
        if not ratios or not all(_near(ratio, ratios[0]) for ratio in ratios):
            return False
        ratio = ratios[0]
        return not by_positive or (abs(mpmath.im(ratio)) < 1e-60 and mpmath.re(ratio) > 0)

    def _agree_at_points(self, known: Term, found: Term) -> bool:
        names = sorted(names_of(known) | names_of(found))
        compared = 0
        for point in range(_POINTS if names else 1):
            try:
                agree = self._agree(known, found, _values(names, point))
            except (_TooLarge, ValueError, ZeroDivisionError, OverflowError, TypeError):
                return False
            if agree is None:
                continue
            if not agree:
                return False
            compared += 1
        return compared > 0

    def _agree(self, known: Term, found: Term, values: dict[str, Fraction]) -> bool | None:
        """Compares at one point; None where one is real and the other isn't, of variables below 0."""
        with mpmath.workdps(_DIGITS):
            ours, theirs = _value(known, values), _value(found, values)
            if _near(ours, theirs):
                return True
            is_small = abs(ours - theirs) < mpmath.mpf(10) ** -60
            has_negative = any(value < 0 for value in values.values())
            if has_negative and (abs(mpmath.im(ours)) > 0 or abs(mpmath.im(theirs)) > 0):
                return None
        if not is_small:
            return False
        with mpmath.workdps(_MORE_DIGITS):  # both may be 0
            ours, theirs = _value(known, values), _value(found, values)
            return bool(abs(ours - theirs) < mpmath.mpf(10) ** -(_MORE_DIGITS - 100))

    def _is_rounding(self, known: Term, found: Term) -> bool:
        """True if one is a decimal number, of six digits or more, to which the other rounds.

        The other must have no end as a decimal number: a root, pi, 1/3.
        """
        decimal, other = (known, found) if is_rounded(known) else (found, known)
        if not is_rounded(decimal) or names_of(other):
            if is_worked_out(known) and not may_stand(found):
                return False
            return self._agree_at_points(known, found)
        value = exact(other)
        if value is not None and (_ends(value) or not is_fraction(other)):
            return False
        stated = exact(decimal)
        assert stated is not None
        places = _places(stated)
        try:
            with mpmath.workdps(_DIGITS):
                difference = abs(
                    _value(other, {}) - mpmath.mpf(stated.numerator) / stated.denominator
                )
                return bool(difference <= mpmath.mpf(10) ** -places / 2 and digits_of(stated) >= 6)
        except (_TooLarge, ValueError, ZeroDivisionError, OverflowError, TypeError):
            return False


def _ends(value: Fraction) -> bool:
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below == 1


def _places(value: Fraction) -> int:
    places = 0
    while value.denominator != 1 and places < 60:
        value *= 10
        places += 1
    return places


def _near(one: Any, other: Any) -> bool:
    if one == other or mpmath.isinf(one) or mpmath.isinf(other):
        return bool(one == other)
    return bool(abs(one - other) <= max(abs(one), abs(other)) * mpmath.mpf(10) ** -150)


def _values(names: Sequence[str], point: int) -> dict[str, Fraction]:
    """Returns values for variables: two points above 0, then of both signs."""
    values = {}
    for name in names:
        draw = random.Random(f"{name}/{point}")
        size = Fraction(draw.randrange(1, 1 << 30), 1 << 30) + (point % 2)
        values[name] = -size if point >= 2 and draw.random() < 0.7 else size
    if point >= 2 and values and all(value > 0 for value in values.values()):
        values[names[0]] *= -1
    return values


def _value(term: Term, values: dict[str, Fraction]) -> Any:
    kind = term[0]
    if kind == "number":
        return mpmath.mpf(term[1].numerator) / term[1].denominator
    if kind == "name":
        return mpmath.mpf(values[term[1]].numerator) / values[term[1]].denominator
    if kind == "constant":
        constants = {"pi": mpmath.pi, "e": mpmath.e, "i": mpmath.mpc(0, 1), "infinity": mpmath.inf}
        return +constants[term[1]]
    parts = [_value(part, values) for part in term[1:] if isinstance(part, tuple)]
    return _sized(_applied(kind, term, parts))


def _sized(value: Any) -> Any:
    if mpmath.isnan(value):
        raise ValueError("not a number")
    if not mpmath.isinf(value) and value and abs(mpmath.mag(value)) > _MAX_EXPONENT:
        raise _TooLarge
    return value


def _applied(kind: str, term: Term, parts: list[Any]) -> Any:
    first = parts[0]
    if kind == "neg":
        return -first
    if kind == "add":
        return sum(parts[1:], first)
    if kind == "times":
        return mpmath.fprod(parts)
    if kind == "divide":
        return first / parts[1]
    if kind == "power":
        return _raised(first, parts[1])
    if kind == "root":
        return _root(*parts)
    if kind == "degree":
        return first * mpmath.pi / 180
    if kind == "abs":
        return abs(first)
    if kind in ("floor", "ceiling"):
        return mpmath.floor(first) if kind == "floor" else mpmath.ceil(first)
    if kind == "factorial":
        return mpmath.factorial(_limited(first, 20))
    if kind == "binomial":
        return mpmath.binomial(_limited(first, 20), _limited(parts[1], 20))
    if kind == "function":
        return _function(term[1], _limited(first, _MAX_ANGLE))
    if kind == "many" and term[1] in ("max", "min"):
        return max(parts) if term[1] == "max" else min(parts)
    if kind == "group":
        return first
    raise ValueError(kind)


def _limited(value: Any, bits: int) -> Any:
    if mpmath.isinf(value) or (value and mpmath.mag(value) > bits):
        raise _TooLarge
    return value


def _raised(base: Any, exponent: Any) -> Any:
    if base and not mpmath.isinf(base) and exponent:
        _limited(exponent, 40)
        if abs(exponent) * max(1, abs(mpmath.mag(base))) > _MAX_EXPONENT:
            raise _TooLarge
    return mpmath.power(base, exponent)


def _root(degree: Any, value: Any) -> Any:
    """The real root of odd degree of a number below 0, as schools have it; else the principal one."""
    if mpmath.im(value) == 0 and mpmath.re(value) < 0 and mpmath.isint(degree) and int(degree) % 2:
        return -mpmath.root(-value, int(degree))
    return mpmath.power(value, 1 / degree)


def _function(name: str, value: Any) -> Any:
    functions = {
        "ln": mpmath.log, "log": mpmath.log, "lg": mpmath.log10, "exp": mpmath.exp,
        "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot,
        "sec": mpmath.sec, "csc": mpmath.csc, "arcsin": mpmath.asin, "arccos": mpmath.acos,
        "arctan": mpmath.atan, "sinh": mpmath.sinh, "cosh": mpmath.cosh, "tanh": mpmath.tanh,
        "Re": mpmath.re, "Im": mpmath.im, "arg": mpmath.arg,
    }  # fmt: skip
    if name not in functions:
        raise ValueError(name)
    if name == "exp":
        _limited(value, 24)
    return functions[name](value)
