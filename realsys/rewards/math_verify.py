"""Scores a worked answer by whether its final value equals the known one.

The value is the text after the last ``####`` (GSM8K's sign) on that line; else in the last
``\\boxed{…}``; else whatever the math-verify library finds at the end of the text. Numbers, in all common
spellings (plain_numbers.py), are compared exactly and fast, everything else by the library in a separate
process (guarded.py), because generated text can make it run for ever. What it can't decide within ``CPU_S``
seconds of CPU time scores 0; so does text that is known to keep it busy, such as 9^9^9^9 or 99999999!,
without a call.

If a number is expected, only a number is an answer, never unevaluated arithmetic: the
library finds ``86 - 3`` equal to 83, and ``18 - 6 =`` to 12, and a policy learns within a hundred steps
to repeat the question. Behind ``####`` or in ``\\boxed`` there must be one number; in plain prose the last
number counts.
"""

from __future__ import annotations

import itertools
import logging
import re

from realsys.api.basics.thoughts import text_behind_thoughts
from realsys.data.sources.record_shape import FINAL
from realsys.rewards.guarded import RAISED, CallFailed, Guarded
from realsys.rewards.plain_numbers import (
    NUMBERS,
    PlainNumber,
    as_fraction,
    plain_number,
    tidy,
)

logger = logging.getLogger(__name__)

_BOXED = "\\boxed{"
CPU_S = 3.0  # the library needs milliseconds, or much longer than this
MEMORY_BYTES = 1 << 30  # the loaded libraries take 64 MiB of it
_MAX_CHARACTERS = 500  # length of a text's end that the library searches
_MAX_LATEX_CHARACTERS = 100  # length of a bare value; 400 open brackets take its parser seconds
_POWER = r"(?:\^|\*\*)\s*"
_EXPLOSIVE = re.compile(
    rf"{_POWER}[-\w.]+\s*{_POWER}"  # 9^9^9
    rf"|{_POWER}[{{(][^}})]*(?:\^|\*\*)"  # 9^{9^9}
    rf"|{_POWER}[{{(]?\s*-?\d{{5}}"  # 9^{99999}
    rf"|[)\]}}]\s*{_POWER}[{{(]?\s*-?\d{{2}}"  # (x+y)^{99}
    r"|\\(?:[dt]?binom|prod|sum|i?int|lim)\b"
)
_OPERATION = re.compile(r"[\d)\]}]\s*(?:[-+*×·÷^]|\\(?:times|cdot|div|pm)\b)\s*[-+(\[{\d\\]")
_DIVIDED = re.compile(r"\d\s*/\s*\d|\\[dt]?frac\b")
_FACTORIAL = re.compile(r"[\d)}\]]\s*!")  # in LaTeX; in prose it is an exclamation mark

_library = Guarded("realsys.rewards.math_library:is_one_of", cpu_s=CPU_S, memory_bytes=MEMORY_BYTES)
_num_stopped = itertools.count(1)


def math_verify_reward(*, response: str, answer: str) -> float:
    """Returns 1.0 if the final value of ``response`` equals that of ``answer``, else 0.0.

    Never raises: a response that can't be parsed, or on which the library fails, scores 0; so does one
    whose thoughts never end (realsys.api.basics.thoughts).
    """
    response = text_behind_thoughts(response) or ""
    value = final_value(response)
    is_part = value != response.strip()
    whole, known = tidy(value), tidy(final_value(answer))
    found = whole
    number = plain_number(known)
    if number is not None:
        found = _stated_value(found, is_marked=FINAL in response or _BOXED in response)
        stated = plain_number(found)
        if stated is not None:
            return float(stated.equals(number))
        if _is_unworked(found, number):
            return 0.0
    found, known = as_fraction(found), as_fraction(known)
    if not found or not known:
        return 0.0
    if found == known:
        return 1.0
    try:
        return float(_equal(found, known, is_bare=is_part or found != whole))
    except CallFailed as error:  # a third-party parser on generated text
        if error.why == RAISED:
            logger.debug("answer not parsed error=%s", error)
        elif (count := next(_num_stopped)) & (count - 1) == 0:  # 1, 2, 4, 8, …
            logger.warning(
                "answer scored 0 why=%s so_far=%d answer=%r", error.text, count, found[:100]
            )
        return 0.0


def _stated_value(found: str, *, is_marked: bool) -> str:
    """Returns the number that a text states: after its last ``=``; in prose without LaTeX the last
    number.
    """
    if is_marked or "$" in found or "\\" in found:
        return found.rpartition("=")[2].strip()
    numbers = NUMBERS.findall(found)
    return numbers[-1] if numbers else ""


def _is_unworked(found: str, known: PlainNumber) -> bool:
    """True if ``found`` is not a single number: ``86 - 3``, ``82 83``, or ``166/2`` for a whole 83."""
    if _DIVIDED.search(found):
        return known.is_whole or bool(_OPERATION.search(found))
    return bool(_OPERATION.search(found)) or len(NUMBERS.findall(found)) != 1


def final_value(text: str) -> str:
    """Returns the part of ``text`` that holds its final value."""
    if FINAL in text:
        lines = text.rpartition(FINAL)[2].strip().splitlines()
        text = lines[0] if lines else ""
    if _BOXED in text:
        text = _up_to_closing_brace(text.rpartition(_BOXED)[2])
    return text.strip()[-_MAX_CHARACTERS:]


def _up_to_closing_brace(text: str) -> str:
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:i]
    return text


def _equal(found: str, known: str, *, is_bare: bool) -> bool:
    """True if the library considers the two equal, as LaTeX or as text."""
    readings = [found]
    if is_bare and len(found) <= _MAX_LATEX_CHARACTERS:
        readings.insert(0, _as_latex(found))
    safe = [reading for reading in readings if not _may_never_end(reading)]
    return bool(safe) and bool(_library.call(known=_as_latex(known), readings=safe))


def _may_never_end(reading: str) -> bool:
    is_latex = "$" in reading or "\\" in reading
    return bool(_EXPLOSIVE.search(reading) or (is_latex and _FACTORIAL.search(reading)))


def _as_latex(value: str) -> str:
    """Wraps a bare value in dollar signs: the library reads LaTeX only between them."""
    return value if "$" in value else f"${value}$"
