"""What was checked by hand is on record, with its revision.

Whether it held is told at the end of each run: a check may find a defect that is not mended yet.
"""

from __future__ import annotations

import datetime
import re

import pytest
from by_hand import Result, checks, result_of

NOW = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)


def test_there_are_such_checks() -> None:
    assert "acceptance/store_away" in checks()


@pytest.mark.parametrize("check", checks())
def test_each_has_a_result_that_says_of_what(check: str) -> None:
    result = result_of(check)
    assert result.command is not None, (
        f"{check}: run it (its first lines say how), commit the result"
    )
    assert result.ok in (True, False)
    assert check in result.command
    assert re.fullmatch(r"[0-9a-f]{40}", result.revision or "")
    assert result.at is not None
    assert result.at.tzinfo is not None


@pytest.mark.parametrize(
    ("hours", "words"),
    [(1, "ok  0123456789ab, today"), (30, "ok  0123456789ab, a day ago"), (73, "3 days ago")],
)
def test_its_age_is_told(hours: int, words: str) -> None:
    at = NOW - datetime.timedelta(hours=hours)
    line = Result("acceptance/x", "python x", "0123456789abcdef", at, True).line(NOW)
    assert line.startswith("acceptance/x  ")
    assert line.endswith(words)


def test_a_missing_one_is_told() -> None:
    assert "never run" in result_of("acceptance/nothing").line(NOW)
