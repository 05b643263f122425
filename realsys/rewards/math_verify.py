"""Scores a worked answer by whether its final value equals the known one.

The value is what stands behind the last ``####`` (GSM8K's sign) on that line; else in the last
``\\boxed{…}``; else whatever the math-verify library finds at the end of the text. Numbers, in the ways
that people write them (plain_numbers.py), are compared exactly and fast, all else by the library in a
process of its own (guarded.py): text that a policy made up can keep it busy for ever. What it can't decide
within ``CPU_S`` seconds of computing, however busy the machine, scores 0; so does text that is known to
keep it busy, such as 9^9^9^9 or 99999999!, without asking.

Where a number is asked for, only a number is an answer, never arithmetic left to the reader: the
library finds ``86 - 3`` equal to 83, and ``18 - 6 =`` to 12, and a policy learns within a hundred steps
to repeat the question. Behind ``####`` or in ``\\boxed`` there must be one number; in plain prose the last
number counts.
"""

from __future__ import annotations

import itertools
import logging
import re
from typing import Any

from realsys.data.sources.qa_records import FINAL
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
CPU_S = 3.0  # the library takes milliseconds, or much longer than this
MEMORY_BYTES = 1 << 30  # its libraries take 64 MiB of that
_MAX_CHARACTERS = 500  # of the end of a text, in which the library may search
_MAX_LATEX_CHARACTERS = 100  # of a bare value; 400 open brackets take its parser seconds
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
_FACTORIAL = re.compile(r"[\d)}\]]\s*!")  # of LaTeX; in prose it is an exclamation

_library = Guarded("realsys.rewards.math_library:is_one_of", cpu_s=CPU_S, memory_bytes=MEMORY_BYTES)
_num_stopped = itertools.count(1)


def math_verify_reward(*, response: str, answer: str, **_: Any) -> float:
    """1.0 if the final value of ``response`` is that of ``answer``, else 0.0.

    Never raises: a response that can't be parsed, or on which the library fails, scores 0.
    """
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
    except CallFailed as error:  # a third-party parser on text that a policy made up
        if error.why == RAISED:
            logger.debug("answer not parsed error=%s", error)
        elif (count := next(_num_stopped)) & (count - 1) == 0:  # 1, 2, 4, 8, …
            logger.warning(
                "answer scored 0 why=%s so_far=%d answer=%r", error.text, count, found[:100]
            )
        return 0.0


def _stated_value(found: str, *, is_marked: bool) -> str:
    """What a text states as its number: behind its last ``=``; in prose without LaTeX the last number."""
    if is_marked or "$" in found or "\\" in found:
        return found.rpartition("=")[2].strip()
    numbers = NUMBERS.findall(found)
    return numbers[-1] if numbers else ""


def _is_unworked(found: str, known: PlainNumber) -> bool:
    """True when ``found`` is not one number: ``86 - 3``, ``82 83``, or ``166/2`` for a whole 83."""
    if _DIVIDED.search(found):
        return known.is_whole or bool(_OPERATION.search(found))
    return bool(_OPERATION.search(found)) or len(NUMBERS.findall(found)) != 1


def final_value(text: str) -> str:
    """The part of ``text`` that holds its final value."""
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
    """Whether the library holds the two for equal, as LaTeX or as text."""
    readings = [found]
    if is_bare and len(found) <= _MAX_LATEX_CHARACTERS:
        readings.insert(0, _as_latex(found))
    safe = [reading for reading in readings if not _could_run_for_ever(reading)]
    return bool(safe) and bool(_library.call(known=_as_latex(known), readings=safe))


def _could_run_for_ever(reading: str) -> bool:
    is_latex = "$" in reading or "\\" in reading
    return bool(_EXPLOSIVE.search(reading) or (is_latex and _FACTORIAL.search(reading)))


def _as_latex(value: str) -> str:
    """The library reads LaTeX between dollar signs only; a final value is often bare."""
    return value if "$" in value else f"${value}$"
