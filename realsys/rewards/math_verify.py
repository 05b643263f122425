"""Scores a worked answer by whether its final value equals the known one.

The value is what stands behind the last ``####`` (GSM8K's sign) on that line; else in the last
``\\boxed{…}``; else whatever the math-verify library finds at the end of the text. Plain numbers
are compared exactly and fast, all else by the library without its timeouts: they need signals,
which only a main thread has, and would make a score depend on the machine's load. So text that
could keep it busy for ever, such as 9^9^9^9 or 99999999!, is not shown to it and scores 0.

Where a number is asked for, only a number is an answer, never arithmetic left to the reader: the
library finds ``86 - 3`` equal to 83, and ``18 - 6 =`` to 12, and a policy learns within a hundred steps
to repeat the question. Behind ``####`` or in ``\\boxed`` there must be one number; in plain prose the last
number counts.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import cache
from typing import Any

from realsys.datasets.records import FINAL

logger = logging.getLogger(__name__)

_BOXED = "\\boxed{"
_NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?")
_NUMBERS = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?")
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


def math_verify_reward(*, response: str, answer: str, **_: Any) -> float:
    """1.0 if the final value of ``response`` is that of ``answer``, else 0.0.

    Never raises: a response that can't be parsed, or on which the library fails, scores 0.
    """
    found, known = final_value(response), final_value(answer)
    number = _plain_number(known)
    if number is not None:
        found = _stated_value(found, is_marked=FINAL in response or _BOXED in response)
        stated = _plain_number(found)
        if stated is not None:
            return float(stated == number)
        if _is_unworked(found, number):
            return 0.0
    if not found or not known:
        return 0.0
    if found == known:
        return 1.0
    try:
        return float(_equal(found, known, is_bare=found != response.strip()))
    except Exception as error:  # a third-party parser on text that a policy made up
        logger.debug("answer not parsed error=%r", error)
        return 0.0


def _stated_value(found: str, *, is_marked: bool) -> str:
    """What a text states as its number: behind its last ``=``; in prose without LaTeX the last number."""
    if is_marked or "$" in found or "\\" in found:
        return found.rpartition("=")[2].strip()
    numbers = _NUMBERS.findall(found)
    return numbers[-1] if numbers else ""


def _is_unworked(found: str, known: Decimal) -> bool:
    """True when ``found`` is not one number: ``86 - 3``, ``82 83``, or ``166/2`` for a whole 83."""
    is_whole = known == known.to_integral_value()
    if _DIVIDED.search(found):
        return is_whole or bool(_OPERATION.search(found))
    return bool(_OPERATION.search(found)) or len(_NUMBERS.findall(found)) != 1


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


def _plain_number(text: str) -> Decimal | None:
    """``-1,234.50`` and the like, with or without a dollar sign and a full stop."""
    text = text.strip().removesuffix(".").strip("$ ")
    if not any(c.isdigit() for c in text) or not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", ""))


def _equal(found: str, known: str, *, is_bare: bool) -> bool:
    """Whether the library holds the two for equal, as LaTeX or as text."""
    parse, verify = _library()
    gold = parse(_as_latex(known), parsing_timeout=None)
    readings = [found]
    if is_bare and len(found) <= _MAX_LATEX_CHARACTERS:
        readings.insert(0, _as_latex(found))
    return any(
        verify(gold, parse(reading, parsing_timeout=None), timeout_seconds=None)
        for reading in readings
        if not _could_run_for_ever(reading)
    )


def _could_run_for_ever(reading: str) -> bool:
    is_latex = "$" in reading or "\\" in reading
    return bool(_EXPLOSIVE.search(reading) or (is_latex and _FACTORIAL.search(reading)))


def _as_latex(value: str) -> str:
    """The library reads LaTeX between dollar signs only; a final value is often bare."""
    return value if "$" in value else f"${value}$"


@cache
def _library() -> tuple[Any, Any]:
    from math_verify import parse, verify

    for module in ("parser", "grader"):  # each would warn once that it has no timeout
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    return parse, verify
