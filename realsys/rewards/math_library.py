"""Comparison by the math-verify library, for a process of its own (guarded.py).

Nothing else imports this file: the library takes seconds to load, and may never return on some texts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from math_verify import parse, verify

for _module in ("parser", "grader"):  # each would warn once that it has no timeout
    logging.getLogger(f"math_verify.{_module}").setLevel(logging.CRITICAL)


def is_one_of(*, known: str, readings: Sequence[str]) -> bool:
    """True if the library considers one of ``readings`` equal to ``known``: LaTeX in dollars, or text."""
    gold = parse(known, parsing_timeout=None)
    return any(
        verify(gold, parse(reading, parsing_timeout=None), timeout_seconds=None)
        for reading in readings
    )
