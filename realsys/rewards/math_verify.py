"""Scores a worked answer by whether its final value equals the known one.

The value is what follows the last ``####`` (GSM8K's sign), up to the end of the line; without one,
what the math-verify library finds in the whole text, a ``\\boxed{…}`` first. Plain numbers are
compared exactly and fast; everything else by the library, without its timeouts: they are built on
signals, which work in a main thread only, and would let the score depend on the machine's load.
Text that could keep the library busy for ever is not shown to it.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any

from realsys.datasets.records import FINAL

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?")
_MAX_CHARACTERS = 2000  # of the end of an answer, where the library searches for a value
# Towers of powers, powers with large exponents and factorials are evaluated, and may never end.
_EXPLOSIVE = re.compile(
    r"!|(\^|\*\*)\s*[{(]?\s*[-+]?\d{4,}|(\^|\*\*)[^=,;\n]{0,40}?(\^|\*\*)|\d{60,}"
)


def math_verify_reward(*, response: str, answer: str, **_: Any) -> float:
    """1.0 if ``response`` ends in the value ``answer``, else 0.0. Never raises.

    A response that the library can't parse scores 0, and so does one that it fails on.
    """
    found = _final_value(response)
    known = _final_value(answer)
    a, b = _plain_number(found), _plain_number(known)
    if a is not None and b is not None:
        return float(a == b)
    if not found or _EXPLOSIVE.search(found):
        return 0.0
    try:
        return float(_equal(found, known))
    except Exception as error:  # a third-party parser on text that a policy made up
        logger.debug("answer not parsed error=%r", error)
        return 0.0


def _final_value(text: str) -> str:
    """The text that holds the final value."""
    if FINAL not in text:
        return text.strip()[-_MAX_CHARACTERS:]
    lines = text.rpartition(FINAL)[2].strip().splitlines()
    return lines[0].strip()[-_MAX_CHARACTERS:] if lines else ""


def _plain_number(text: str) -> Decimal | None:
    """``-1,234.50`` and the like, with or without a dollar sign and a full stop."""
    text = text.strip().removesuffix(".").strip("$ ")
    if not any(c.isdigit() for c in text) or not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", ""))


def _equal(found: str, known: str) -> bool:
    from math_verify import parse, verify

    gold = parse(_as_latex(known), parsing_timeout=None)
    return bool(verify(gold, parse(found, parsing_timeout=None), timeout_seconds=None))


def _as_latex(known: str) -> str:
    """The library reads LaTeX between dollar signs only; a known answer is often bare."""
    return known if "$" in known or "\\boxed" in known else f"${known}$"
