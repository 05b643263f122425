"""Tells an answer that is the question again: equal to the known one, and nothing was worked out (pure).

A policy that is paid for ``2^{10}`` where 1024 is known, or for ``x^2+2x+1`` where its factors are, learns
to copy what it was asked. So what people leave standing is a number only where the question is known,
and doesn't state it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from realsys.rewards.final_answers.answer_comparison import is_rounded
from realsys.rewards.final_answers.answer_spelling import closed_up, spelt
from realsys.rewards.final_answers.answer_terms import is_closed_form, is_worked_out, numbers_of
from realsys.rewards.final_answers.math_forms import Form, readings

NUMBER = re.compile(r"\d{1,30}(?:,\d{3}){0,9}(?:\.\d{1,30})?")
_MAX_CHARACTERS = 20_000  # of a question: of its end, where the task stands
_SHORTEST = 3  # characters: an operator has something on both sides
_AMOUNTS = ("term", "measure", "percent")


def is_question_again(text: str, known: Sequence[Form], question: str) -> bool:
    """True if ``text``, a right answer, is not worked out, and stands in the question or may do so.

    So do ``5!`` and ``\\binom{10}{3}`` where a number is known, and the question gives the 5, or the 10 and
    the 3. Where the question is empty it isn't known.
    """
    found = readings(text)
    if any(form in known for form in found) or not any(map(_has_work, found)):
        return False
    wants_number = any(
        form[0] in _AMOUNTS and is_worked_out(form[1]) and not is_rounded(form[1]) for form in known
    )
    if not question:
        return wants_number and any(f[0] in _AMOUNTS and is_closed_form(f[1]) for f in found)
    asked = _spelling(question[-_MAX_CHARACTERS:])
    spelling = _spelling(text)
    if len(spelling) >= _SHORTEST and spelling in asked:
        return True
    return wants_number and any(_is_of_given_numbers(form, asked) for form in found)


def _spelling(text: str) -> str:
    return closed_up(spelt(text)).replace("{", "").replace("}", "")


def _has_work(form: Form) -> bool:
    """True if something in a form has still to be worked out."""
    kind = form[0]
    if kind in _AMOUNTS:
        return form[1][0] not in ("name", "constant") and not is_worked_out(form[1])
    if kind in ("list", "set", "equation"):
        return any(map(_has_work, form[1]))
    return kind == "tuple" and any(map(_has_work, form[2]))


def _is_of_given_numbers(form: Form, asked: str) -> bool:
    if form[0] not in _AMOUNTS:
        return False
    numbers = [number for number in numbers_of(form[1]) if number != 1]
    given = {Fraction(number.replace(",", "")) for number in NUMBER.findall(asked)}
    count = sum(number in given for number in numbers)
    return count > 1 or (count > 0 and count == len(numbers))
