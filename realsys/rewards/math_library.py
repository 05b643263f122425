"""The part of ``math_verify`` that a third-party parser does, for a process of its own (guarded.py).

Nothing else imports this file: the library takes seconds to load, and on some texts for ever to answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from math_verify import parse, verify

for _module in ("parser", "grader"):  # each would warn once that it has no timeout of its own
    logging.getLogger(f"math_verify.{_module}").setLevel(logging.CRITICAL)


def is_one_of(*, known: str, readings: Sequence[str]) -> bool:
    """Whether the library holds one of ``readings`` for equal to ``known``: LaTeX in dollars, or text."""
    gold = parse(known, parsing_timeout=None)
    return any(
        verify(gold, parse(reading, parsing_timeout=None), timeout_seconds=None)
        for reading in readings
    )
