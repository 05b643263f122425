"""Exact values of terms (math_forms.py) that are rational, and which terms may stand as answers (pure)."""

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


def is_closed_form(term: Term) -> bool:
    """True for what people leave standing as a number: ``2^{10}``, ``5!``, ``1 - 1/2^{20}``, ``\\log_2 8``.

    Never plain sums, products and fractions of numbers (``40 + 2``, ``10/2``), roots and constants, which
    stand for what they are not (``\\sqrt{6889}`` for 83), or powers that change nothing (``42^1``).
    """
    return not names_of(term) and _has_closed_part(term) and not _has_open_part(term)


def _has_closed_part(term: Term) -> bool:
    kind = term[0]
    if kind == "power":
        has_trivial = any(_is_number(part) and exact(part) in (0, 1) for part in term[1:])
        return not has_trivial
    if kind in ("factorial", "binomial", "function"):
        return True
    return any(_has_closed_part(part) for part in term[1:] if isinstance(part, tuple))


def _has_open_part(term: Term) -> bool:
    kind, parts = term[0], [part for part in term[1:] if isinstance(part, tuple)]
    if kind in ("root", "constant"):
        return True
    if kind in ("add", "times") and sum(is_worked_out(part) for part in parts) > 1:
        return True
    if kind == "divide" and all(map(_is_number, parts)):
        values = [exact(part) for part in parts]
        return any(value is None or value.denominator != 1 for value in values) or (
            math.gcd(*(int(value or 0) for value in values)) != 1 or values[1] == 1
        )
    if kind == "power" and any(_is_number(part) and exact(part) in (0, 1) for part in parts):
        return True
    return any(map(_has_open_part, parts))


def may_stand(term: Term) -> bool:
    """True for what is an answer where a number is asked for."""
    return is_worked_out(term) or is_closed_form(term)


def numbers_of(term: Term) -> list[Fraction]:
    """Returns the numbers in a term, from left to right, without their signs."""
    if term[0] == "number":
        return [term[1]]
    return [value for part in term[1:] if isinstance(part, tuple) for value in numbers_of(part)]


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
