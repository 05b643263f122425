"""Exact values of terms (math_forms.py) that are rational, and which terms are worked out (pure)."""

from __future__ import annotations

import math
from fractions import Fraction

from realsys.rewards.final_answers.term_parser import Term

_MAX_BITS = 100_000  # of a value's numerator or denominator
_MAX_FACTORIAL = 500


def exact(term: Term) -> Fraction | None:
    """Returns the value of a term of whole numbers and their arithmetic; None if it is anything else,
    undefined, or larger than 100,000 bits.
    """
    try:
        return _exact(term)
    except (_NotRational, ZeroDivisionError, OverflowError):
        return None


class _NotRational(Exception):
    """The term has a name, a root or a function, or is too large."""


def _exact(term: Term) -> Fraction:
    kind = term[0]
    if kind == "number":
        return term[1]  # type: ignore[no-any-return]
    if kind not in ("neg", "add", "times", "divide", "power", "factorial", "binomial", "abs", "floor",
                    "ceiling", "many", "group"):  # fmt: skip
        raise _NotRational(kind)
    values = [_exact(part) for part in term[1:] if isinstance(part, tuple)]
    return _bounded(_applied(kind, term, values))


def _applied(kind: str, term: Term, values: list[Fraction]) -> Fraction:
    first = values[0]
    if kind == "neg":
        return -first
    if kind == "add":
        return sum(values, Fraction(0))
    if kind == "times":
        return math.prod(values, start=Fraction(1))
    if kind == "divide":
        return first / values[1]
    if kind == "power":
        return _raised(first, values[1])
    if kind == "factorial":
        return Fraction(math.factorial(_whole(first, _MAX_FACTORIAL)))
    if kind == "binomial":
        return Fraction(math.comb(_whole(first, _MAX_FACTORIAL), _whole(values[1], _MAX_FACTORIAL)))
    if kind == "many":
        return _of_many(term[1], values)
    if kind in ("floor", "ceiling"):
        return Fraction(math.floor(first) if kind == "floor" else math.ceil(first))
    return abs(first) if kind == "abs" else first


def _of_many(name: str, values: list[Fraction]) -> Fraction:
    if name in ("max", "min"):
        return max(values) if name == "max" else min(values)
    whole = [int(value) for value in values if value.denominator == 1]
    if len(whole) != len(values):
        raise _NotRational(name)
    return Fraction(math.gcd(*whole) if name == "gcd" else math.lcm(*whole))


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _NotRational("root")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and abs(exponent) * bits > _MAX_BITS:
        raise _NotRational("too large")
    return base ** (int(exponent) if bits > 1 else int(exponent) % 2 if base else int(exponent))


def _whole(value: Fraction, most: int) -> int:
    if value.denominator != 1 or not 0 <= value <= most:
        raise _NotRational("not a small whole number")
    return int(value)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise _NotRational("too large")
    return value


def is_worked_out(term: Term) -> bool:
    """True for a number that needs no more arithmetic: ``-3``, ``2/3``, ``1.5 * 10^3``."""
    kind = term[0]
    if kind == "neg":
        return is_worked_out(term[1])
    if kind == "divide":
        return all(_is_number(part) for part in term[1:])
    if kind == "times" and len(term) == 3:
        return _is_number(term[1]) and _is_power_of_ten(term[2])
    return _is_number(term)


def is_fraction(term: Term) -> bool:
    """True for ``166/2``, also with a minus sign."""
    return term[0] == "divide" or (term[0] == "neg" and is_fraction(term[1]))


def _is_number(term: Term) -> bool:
    return bool(term[0] == "number" or (term[0] == "neg" and term[1][0] == "number"))


def _is_power_of_ten(term: Term) -> bool:
    return bool(
        term[0] == "power" and term[1][:2] == ("number", Fraction(10)) and _is_number(term[2])
    )


def names_of(term: Term) -> frozenset[str]:
    """Returns the names of the variables in a term."""
    if term[0] == "name":
        return frozenset((term[1],))
    parts = (names_of(part) for part in term[1:] if isinstance(part, tuple))
    return frozenset().union(*parts)
