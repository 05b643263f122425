"""Comparison by the math-verify library, for a process of its own (guarded.py).

Nothing else imports this file: the library takes seconds to load, and may never return on some texts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from math_verify import parse, verify

for _module in ("parser", "grader"):  # each would warn once that it has no timeout
    logging.getLogger(f"math_verify.{_module}").setLevel(logging.CRITICAL)

_COMMON = (
    ("\\frac{3\\sqrt{2}}{4}", "3\\sqrt{2}/4"),
    ("(1,2)", "(1, -2)"),
    ("x^2+2x-3", "-3+2x+x^2"),
    ("\\{1,2,3\\}", "{3,2,1}"),
    ("[0,\\infty)", "[0,2)\\cup(3,4]"),
    ("x=3", "y = 3"),
    ("3+2i", "2i+3"),
    ("2\\pi", "\\pi\\cdot 2"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
    ("\\log_{2} 8", "\\frac{\\ln 8}{\\ln 2}"),
    ("12 \\text{ cm}^2", "12"),
    ("0.5", "50\\%"),
)


def is_one_of(*, known: str, readings: Sequence[str]) -> bool:
    """True if the library considers one of ``readings`` equal to ``known``: LaTeX in dollars, or text."""
    gold = parse(known, parsing_timeout=None)
    return any(
        verify(gold, parse(reading, parsing_timeout=None), timeout_seconds=None)
        for reading in readings
    )


def prepare() -> None:
    """Compares some values of each kind, so that a guard's forks find the library's tables filled."""
    for known, found in _COMMON:
        is_one_of(known=f"${known}$", readings=[f"${found}$", found])
