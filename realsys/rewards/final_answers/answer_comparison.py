"""Decides whether two forms of answers (math_forms.py) say the same (pure).

What an answer states counts, what it leaves out does not: ``5`` is ``5 cm``, and ``5 m`` is not; ``1`` is
``x = 1``, and ``y = 1`` is not. A set has no order, a pair has one. Whether two terms are equal is asked of
the caller: a quick one knows rational numbers (``Rationals``), the one in math_library.py everything else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol, TypeVar

from realsys.rewards.final_answers.answer_terms import (
    exact,
    is_fraction,
    is_worked_out,
    may_stand,
    names_of,
)
from realsys.rewards.final_answers.math_forms import Form
from realsys.rewards.final_answers.term_parser import Term

T = TypeVar("T")
_INFINITY: Term = ("constant", "infinity")
_MINUS_INFINITY: Term = ("neg", _INFINITY)
_REALS = {
    "all \\mathbb{r}",
    "all \\mathbb{R}",
    "all real numbers",
    "all reals",
    "real numbers",
    "reals",
}
_NOTHING = {
    "no solution",
    "no solutions",
    "no real solution",
    "no real solutions",
    "empty set",
    "none",
}
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_FUNCTION_NAMES = frozenset("fghpqPQFG")
_MAX_ITEMS = 40


class Undecided(Exception):
    """Terms that only more mathematics can compare."""


class Terms(Protocol):
    """How terms are compared."""

    def same(self, known: Term, found: Term) -> bool:
        """True for equal values, or functions."""

    def proportional(self, known: Term, found: Term, *, by_positive: bool) -> bool:
        """True if one is a constant, not 0, times the other."""


class Rationals:
    """Compares rational numbers.

    Raises:
        Undecided: for all other terms that aren't spelt alike.
    """

    def same(self, known: Term, found: Term) -> bool:
        """True for equal numbers."""
        if known == found:
            return True
        if is_worked_out(known) and not may_stand(found) and not is_rounded(known):
            return False
        value, other = exact(known), exact(found)
        if value is None or other is None:
            raise Undecided
        has_rounded = is_rounded(known) or is_rounded(found)
        if value != other and has_rounded and (is_fraction(known) or is_fraction(found)):
            raise Undecided
        return value == other and not is_left_undone(known, found)

    def proportional(self, known: Term, found: Term, *, by_positive: bool) -> bool:
        """Never decides, unless the two are spelt alike."""
        if known == found:
            return True
        raise Undecided


def is_left_undone(known: Term, found: Term) -> bool:
    """True if a worked-out number is known, and ``found`` has yet to be worked out: 86 - 3, or 166/2.

    What people leave standing, 2^{10} or 5!, is worked out enough.
    """
    if not is_worked_out(known):
        return False
    value = exact(known)
    is_whole = value is not None and value.denominator == 1
    if not is_worked_out(found):
        return not may_stand(found)
    return is_whole and is_fraction(found) and not is_fraction(known)


def is_rounded(term: Term) -> bool:
    """True for a decimal number that may be the rounding of a root: six digits or more."""
    if term[0] == "neg":
        return is_rounded(term[1])
    return bool(term[0] == "number" and term[2] and digits_of(term[1]) >= 6)


def digits_of(value: Fraction) -> int:
    """Returns the number of significant digits of a decimal number."""
    digits = str(abs(value.numerator) * 10**40 // value.denominator).lstrip("0").rstrip("0")
    return len(digits)


def same(known: Form, found: Form, terms: Terms) -> bool:
    """True if ``found`` is a right answer where ``known`` is."""
    if known == found:
        return True
    kinds = (known[0], found[0])
    if "choice" in kinds:
        return _same_choice(known, found, terms)
    if "equation" in kinds:
        return _same_equations(known, found, terms)
    if "in" in kinds:
        return _same_memberships(known, found, terms)
    if "list" in kinds or "set" in kinds:
        return _same_collections(known, found, terms)
    if kinds == ("tuple", "tuple"):
        return known[1] == found[1] and _same_in_order(known[2], found[2], terms)
    if kinds == ("inequality", "inequality"):
        return _same_inequalities(known, found, terms)
    if (pieces := _pieces(known)) is not None and (others := _pieces(found)) is not None:
        return _matched(pieces, others, lambda one, other: _same_piece(one, other, terms))
    if "matrix" in kinds or "determinant" in kinds:
        return _same_matrices(known, found, terms)
    if "ratio" in kinds:
        return _same_ratios(known, found, terms)
    if kinds[0] == kinds[1] and kinds[0] in ("cup", "cap", "setminus", "both", "either"):
        return _same_in_order(known[1], found[1], terms)
    if "based" in kinds:
        return _same_based(known, found)
    if kinds == ("text", "text"):
        return bool(known[1] == found[1] or {known[1], found[1]} <= _NOTHING)
    return _same_amounts(known, found, terms)


# ---- letters, names ------------------------------------------------------------------------------


def _same_choice(known: Form, found: Form, terms: Terms) -> bool:
    if known[0] == "choice" and found[0] == "choice" and known[1] == found[1]:
        return True
    if found[0] == "choice":
        found = found[2] or ("none",)
    if known[0] == "choice":
        if known[2] is None:
            return False
        known = known[2]
    return found != ("none",) and same(known, found, terms)


def _named(form: Form) -> tuple[str, Form] | None:
    """Returns name and value of ``x = 1`` or ``f(x) = x^2``, or ``1 = x``."""
    sides = form[1]
    if name := _name(sides[0]):
        return name, sides[-1]
    if len(sides) == 2 and (name := _name(sides[1])):
        return name, sides[0]
    return None


def _name(side: Form) -> str:
    if side[0] == "label" or side[0] == "text":
        return str(side[1])
    if side[0] == "choice" and side[2] is None:
        return str(side[1])
    if side[0] == "tuple":
        names = [_name(part) for part in side[2]]
        return f"({','.join(names)})" if all(names) else ""
    if side[0] != "term":
        return ""
    term = side[1]
    if term[0] == "name":
        return str(term[1])
    is_call = term[0] == "times" and len(term) == 3 and term[1][0] == "name"
    if is_call and term[1][1] in _FUNCTION_NAMES and term[2][0] in ("name", "number"):
        return f"{term[1][1]}({term[2][1]})"
    return ""


def _same_names(known: str, found: str) -> bool:
    """True for one name; ``y`` is also what functions are plotted as."""
    return (
        known == found
        or (known == "y" and found[1:] == "(x)")
        or (found == "y" and known[1:] == "(x)")
    )


def _is_closed(form: Form) -> bool:
    """True for a value without variables."""
    return form[0] != "term" or not names_of(form[1])


def _same_equations(known: Form, found: Form, terms: Terms) -> bool:
    if known[0] != "equation":
        return _same_as_equation(known, found, terms)
    mine = _named(known)
    if found[0] != "equation":
        if found[0] in ("list", "set") and len(found[1]) == 1:
            return same(known, found[1][0], terms)
        return mine is not None and found[0] != "inequality" and same(mine[1], found, terms)
    other = _named(found)
    if mine and other and _same_names(mine[0], other[0]):
        return same(mine[1], other[1], terms)
    if mine and _is_closed(mine[1]):
        return False  # 2x = 2 is the question
    pair = [_difference(form) for form in (known, found)]
    if pair[0] is None or pair[1] is None:
        return False
    return terms.proportional(pair[0], pair[1], by_positive=False)


def _same_as_equation(known: Form, found: Form, terms: Terms) -> bool:
    """Compares a known value with what an equation states at its end: ``x = 5``, ``40 + 7 = 47``."""
    if known[0] == "inequality":
        return False
    if known[0] in ("list", "set") and len(known[1]) == 1:
        return same(known[1][0], found, terms)
    if named := _named(found):
        return same(known, named[1], terms)
    last = found[1][-1]
    is_number = known[0] in ("term", "measure", "percent") and is_worked_out(known[1])
    if not is_number:
        first = found[1][0]
        if first[0] != "term" or last[0] != "term" or not terms.same(first[1], last[1]):
            return False
    return same(known, last, terms)


def _difference(form: Form) -> Term | None:
    sides = form[-1]
    if len(sides) != 2 or any(side[0] != "term" for side in sides):
        return None
    return ("add", sides[0][1], ("neg", sides[1][1]))


def _same_memberships(known: Form, found: Form, terms: Terms) -> bool:
    if known[0] == found[0] == "in" and known[1] != found[1]:
        return False
    return same(
        known[2] if known[0] == "in" else known, found[2] if found[0] == "in" else found, terms
    )


# ---- several values ------------------------------------------------------------------------------


def _same_collections(known: Form, found: Form, terms: Terms) -> bool:
    ours, theirs = _items(known), _items(found)
    if ours is None or theirs is None:
        if _is_empty(known) and _is_empty(found):
            return True
        if ours is not None and len(ours) == 1:
            return same(ours[0], found, terms)
        if theirs is not None and len(theirs) == 1:
            return same(known, theirs[0], terms)
        if known[0] == "tuple" or found[0] == "tuple":
            return _same_as_tuple(known, found, terms)
        return False
    if len(ours) > _MAX_ITEMS or len(theirs) > _MAX_ITEMS:
        return False
    names = [_name_of_item(item) for item in ours]
    if len(set(names)) > 1 and all(names) and not any(map(_name_of_item, theirs)):
        return _same_in_order(ours, theirs, terms)
    return _matched(ours, theirs, lambda one, other: same(one, other, terms))


def _items(form: Form) -> Sequence[Form] | None:
    return form[1] if form[0] in ("list", "set") else None


def _is_empty(form: Form) -> bool:
    return form == ("set", ()) or (form[0] == "text" and form[1] in _NOTHING)


def _name_of_item(form: Form) -> str:
    if form[0] != "equation":
        return ""
    named = _named(form)
    return named[0] if named else ""


def _same_as_tuple(known: Form, found: Form, terms: Terms) -> bool:
    """Compares (1, 2) with ``1, 2`` in this order, or with ``x = 1, y = 2``; never with a set."""
    if "set" in (known[0], found[0]):
        return False
    pair = known if known[0] == "tuple" else found
    if pair[1] != "()":
        return False
    orders = []
    for form in (known, found):
        items = form[2] if form[0] == "tuple" else form[1]
        names = [_name_of_item(item) for item in items]
        if all(names) and len(set(names)) == len(names):
            values = sorted(
                (_named(item) or ("", item) for item in items), key=lambda each: each[0]
            )
            items = [value for _, value in values]
        orders.append(items)
    return _same_in_order(orders[0], orders[1], terms)


def _same_in_order(ours: Sequence[Form], theirs: Sequence[Form], terms: Terms) -> bool:
    return len(ours) == len(theirs) and all(
        same(one, other, terms) for one, other in zip(ours, theirs, strict=True)
    )


def _matched(ours: Sequence[T], theirs: Sequence[T], is_same: Callable[[T, T], bool]) -> bool:
    """True if each of ours has one of theirs, and none is left."""
    left = list(theirs)
    for one in ours:
        at = next((i for i, other in enumerate(left) if is_same(one, other)), None)
        if at is None:
            return False
        del left[at]
    return not left


def _same_matrices(known: Form, found: Form, terms: Terms) -> bool:
    if known[0] == found[0]:
        rows, others = known[1], found[1]
        return len(rows) == len(others) and all(
            _same_in_order(row, other, terms) for row, other in zip(rows, others, strict=True)
        )
    matrix, other = (known, found) if known[0] == "matrix" else (found, known)
    if matrix[0] != "matrix" or other[0] != "tuple" or other[1] not in ("()", "[]"):
        return False
    entries = [entry for row in matrix[1] for entry in row]
    if len(matrix[1]) != 1 and any(len(row) != 1 for row in matrix[1]):
        return False
    if matrix is known:
        return _same_in_order(entries, other[2], terms)
    return _same_in_order(other[2], entries, terms)


def _same_ratios(known: Form, found: Form, terms: Terms) -> bool:
    if known[0] == found[0]:
        return _same_in_order(known[1], found[1], terms)
    ratio, other = (known, found) if known[0] == "ratio" else (found, known)
    if len(ratio[1]) != 2 or other[0] != "term" or any(part[0] != "term" for part in ratio[1]):
        return False
    parts = [exact(part[1]) for part in ratio[1]]
    if None not in parts and math.gcd(*(int(part or 0) for part in parts)) != 1:
        return False
    quotient = ("divide", ratio[1][0][1], ratio[1][1][1])
    return same(
        ("term", quotient) if known[0] == "ratio" else known,
        ("term", quotient) if found[0] == "ratio" else found,
        terms,
    )


# ---- intervals and inequalities ------------------------------------------------------------------

Piece = tuple[Term, bool, Term, bool]  # from, is it in, to, is it in


def _pieces(form: Form) -> list[Piece] | None:
    """Returns the intervals that a form is, if it can be some."""
    kind = form[0]
    if kind == "tuple" and len(form[2]) == 2 and all(part[0] == "term" for part in form[2]):
        low, high = form[2][0][1], form[2][1][1]
        return [(low, form[1][0] == "[", high, form[1][1] == "]")]
    if kind == "inequality":
        return _solved(form)
    if kind in ("cup", "either"):
        pieces: list[Piece] = []
        for part in form[1]:
            if (more := _pieces(part)) is None:
                return None
            pieces += more
        return pieces
    if kind == "both":
        return _intersection(form)
    if kind == "text" and form[1] in _REALS:
        return [(_MINUS_INFINITY, False, _INFINITY, False)]
    if kind == "setminus" and len(form[1]) == 2:
        return _without(form[1][0], form[1][1])
    return None


def _without(whole: Form, points: Form) -> list[Piece] | None:
    """Returns the intervals between points."""
    if whole[0] != "text" or whole[1] not in _REALS or points[0] != "set":
        return None
    values = [(exact(point[1]), point[1]) for point in points[1] if point[0] == "term"]
    if len(values) > 1:
        if any(value is None for value, _ in values):
            return None
        values.sort(key=lambda pair: pair[0] or Fraction(0))
    ends = [_MINUS_INFINITY, *(term for _, term in values), _INFINITY]
    return [(low, False, high, False) for low, high in itertools.pairwise(ends)]


def _solved(form: Form) -> list[Piece] | None:
    """Returns what x may be in ``x < 3``, ``1 <= x < 2`` or ``x != 1``."""
    signs, sides = form[1], form[2]
    if any(side[0] != "term" for side in sides):
        return None
    values = [side[1] for side in sides]
    if len(signs) == 1:
        sign = signs[0]
        if values[0][0] != "name":
            values, sign = values[::-1], _FLIPPED.get(sign, sign)
        if values[0][0] != "name" or names_of(values[1]):
            return None
        if sign == "!=":
            return [
                (_MINUS_INFINITY, False, values[1], False),
                (values[1], False, _INFINITY, False),
            ]
        if sign in ("<", "<="):
            return [(_MINUS_INFINITY, False, values[1], sign == "<=")]
        return [(values[1], sign == ">=", _INFINITY, False)]
    if len(signs) != 2 or values[1][0] != "name" or names_of(values[0]) or names_of(values[2]):
        return None
    if {sign[0] for sign in signs} == {"<"}:
        return [(values[0], signs[0] == "<=", values[2], signs[1] == "<=")]
    if {sign[0] for sign in signs} == {">"}:
        return [(values[2], signs[1] == ">=", values[0], signs[0] == ">=")]
    return None


def _intersection(form: Form) -> list[Piece] | None:
    """Returns the interval of ``x > 1 and x < 2``."""
    bounds = [_solved(part) for part in form[1]]
    if any(bound is None or len(bound) != 1 for bound in bounds):
        return None
    low, high = [bound[0] for bound in bounds if bound]
    if low[0] == _MINUS_INFINITY:
        low, high = high, low
    if (
        low[2] != _INFINITY
        or high[0] != _MINUS_INFINITY
        or _variable(form[1][0]) != _variable(form[1][1])
    ):
        return None
    return [(low[0], low[1], high[2], high[3])]


def _same_piece(known: Piece, found: Piece, terms: Terms) -> bool:
    return (
        known[1] == found[1]
        and known[3] == found[3]
        and terms.same(known[0], found[0])
        and terms.same(known[2], found[2])
    )


def _same_inequalities(known: Form, found: Form, terms: Terms) -> bool:
    pieces, others = _solved(known), _solved(found)
    if pieces is not None and others is not None:
        return _variable(known) == _variable(found) and _matched(
            pieces, others, lambda one, other: _same_piece(one, other, terms)
        )
    if len(known[1]) != 1 or len(found[1]) != 1:
        return known[1] == found[1] and _same_in_order(known[2], found[2], terms)
    pair = []
    for form in (known, found):
        difference, sign = _difference(form), form[1][0]
        if difference is None:
            return False
        is_less = sign in ("<", "<=")
        pair.append(
            (("neg", difference) if is_less else difference, sign in ("<=", ">="), sign == "!=")
        )
    if pair[0][1:] != pair[1][1:]:
        return False
    return terms.proportional(pair[0][0], pair[1][0], by_positive=not pair[0][2])


def _variable(form: Form) -> Term | None:
    return next((side[1] for side in form[2] if side[1][0] == "name"), None)


# ---- numbers with something behind them ----------------------------------------------------------


def _same_based(known: Form, found: Form) -> bool:
    """Bases count if both state one: 101 is right for 101_2; 101_3 is not, nor is 5."""
    if known[0] == found[0]:
        return bool(known[1:] == found[1:])
    digits = []
    for form in (known, found):
        if form[0] == "based":
            digits.append(form[1])
        elif form[0] == "term" and form[1][0] == "number" and form[1][1].denominator == 1:
            digits.append(str(form[1][1]))
        else:
            return False
    return bool(digits[0] == digits[1])


def _same_amounts(known: Form, found: Form, terms: Terms) -> bool:
    if known[0] == "modulo" or found[0] == "modulo":
        if known[0] == found[0]:
            return terms.same(known[1], found[1]) and terms.same(known[2], found[2])
        return _same_amounts(_without_modulus(known), _without_modulus(found), terms)
    kinds = ("term", "measure", "percent")
    if known[0] not in kinds or found[0] not in kinds:
        return False
    if "percent" in (known[0], found[0]) and "measure" not in (known[0], found[0]):
        return _same_percentages(known, found, terms)
    if known[0] == "measure" and found[0] == "measure":
        return _same_measures(known, found, terms)
    if known[0] == "measure":
        return found[0] == "term" and _same_bare(known, known[1], found[1], terms)
    if found[0] == "measure":
        return known[0] == "term" and _same_scaled(known[1], found, terms)
    return terms.same(known[1], found[1])


def _without_modulus(form: Form) -> Form:
    return ("term", form[1]) if form[0] == "modulo" else form


def _same_percentages(known: Form, found: Form, terms: Terms) -> bool:
    """A percentage is its number and its share: 72% equals 72 and 0.72."""
    if known[0] == found[0] or terms.same(known[1], found[1]):
        return terms.same(known[1], found[1])
    percent, bare = (known, found) if known[0] == "percent" else (found, known)
    value, share = exact(percent[1]), exact(bare[1])
    is_done = is_worked_out(known[1]) <= is_worked_out(found[1])
    return value is not None and share is not None and is_done and value / 100 == share


def _same_measures(known: Form, found: Form, terms: Terms) -> bool:
    unit, other = known[2], found[2]
    if not unit.agrees(other):
        return False
    is_known = unit.dimensions is not None and other.dimensions is not None
    ours = unit.scale * (unit.factor if is_known else 1)
    theirs = other.scale * (other.factor if is_known else 1)
    if ours == theirs:
        return terms.same(known[1], found[1])
    if is_left_undone(known[1], found[1]):
        return False
    value, stated = exact(known[1]), exact(found[1])
    return value is not None and stated is not None and value * ours == stated * theirs


def _same_bare(known: Form, value: Term, found: Term, terms: Terms) -> bool:
    """Compares a known 5 million dollars with 5, and with 5,000,000."""
    if terms.same(value, found):
        return True
    amount, stated = exact(value), exact(found)
    is_scaled = amount is not None and amount * known[2].scale == stated
    return known[2].scale != 1 and is_scaled and is_worked_out(found)


def _same_scaled(known: Term, found: Form, terms: Terms) -> bool:
    """Compares a known 5,000,000 with 5 million, and 5 or 60 with 5 dozen."""
    scale = found[2].scale
    if scale in (1, 12) and terms.same(known, found[1]):
        return True
    value, stated = exact(known), exact(found[1])
    return stated is not None and is_worked_out(found[1]) and stated * scale == value and scale != 1
