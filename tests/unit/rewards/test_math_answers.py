"""The math rule on tables of answers, half of them by somebody who had not read its code.

``by_an_outsider.jsonl`` and ``by_an_engineer.jsonl`` were written before the rule was mended;
``after_the_mending.jsonl`` has near misses and spellings that were tried on it afterwards. Both error rates
of each table are printed: ``python -m tests.unit.rewards.test_math_answers``.
"""

import json
import sys
from pathlib import Path

import pytest

from realsys.rewards.math_verify import math_verify_reward

FOLDER = Path(__file__).parent / "math_answers"
TABLES = ("by_an_engineer", "by_an_outsider", "after_the_mending")
MAX_SHARE = 0.01
# Right by their labels, refused by design: a number is expected, and arithmetic has to be worked out
# (math_verify.py says why).
UNEVALUATED = {
    "unevaluated power", "factorial form", "binomial form", "log evaluates", "fractional power",
    "fraction that is integer", "product of powers", "complement form", "power of ten", "multinomial",
    "unicode power", "unevaluated geometric sum",
}  # fmt: skip
KNOWN_FAILURES = {
    "answer: twelve, i.e. 12",
    "#### 8 apples in 2 bags",
    "It takes 90 minutes (1.5 hours).",
    "\\boxed{5\\text{ maybe six}}",
}


def rows_of(table: str) -> list[dict]:
    text = (FOLDER / f"{table}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def has_thoughts(row: dict) -> bool:
    return row["style"] == "thoughts" or "<think>" in row["response"]


def is_unevaluated(row: dict) -> bool:
    return row["right"] and row["what"] in UNEVALUATED


def errors_of(rows: list[dict]) -> list[dict]:
    return [
        row
        for row in rows
        if (math_verify_reward(response=row["response"], answer=row["answer"]) == 1.0)
        != row["right"]
    ]


def report(table: str) -> tuple[float, float, list[dict]]:
    """Returns the shares of right answers that are refused and of wrong ones that are accepted."""
    rows = [row for row in rows_of(table) if not has_thoughts(row) and not is_unevaluated(row)]
    errors = errors_of(rows)
    refused = sum(row["right"] for row in errors) / sum(row["right"] for row in rows)
    accepted = sum(not row["right"] for row in errors) / sum(not row["right"] for row in rows)
    sys.stdout.write(
        f"{table}: {len(rows)} answers, right ones refused {refused:.1%},"
        f" wrong ones accepted {accepted:.1%}\n"
    )
    return refused, accepted, errors


@pytest.mark.timeout(300)
@pytest.mark.parametrize("table", TABLES)
def test_right_answers_score_and_wrong_ones_do_not(table):
    refused, accepted, errors = report(table)
    assert refused <= MAX_SHARE, errors
    assert accepted <= MAX_SHARE, errors
    assert {row["response"] for row in errors} <= KNOWN_FAILURES


def test_arithmetic_that_is_not_worked_out_is_refused():
    rows = [row for row in rows_of("by_an_outsider") if is_unevaluated(row)]
    assert len(rows) == len(UNEVALUATED)
    assert errors_of(rows) == rows


def test_thoughts_are_not_the_answer():
    rows = [row for table in TABLES for row in rows_of(table) if has_thoughts(row)]
    assert errors_of(rows) == []


def test_the_halves_are_large_enough_and_say_the_same_nowhere():
    rows = {table: rows_of(table) for table in TABLES[:2]}
    pairs = [(row["response"], row["answer"]) for table in rows.values() for row in table]
    assert all(len(table) >= 200 for table in rows.values())
    assert len(set(pairs)) >= 400


if __name__ == "__main__":
    for each in TABLES:
        for error in report(each)[2]:
            sys.stdout.write(f"    {'refused' if error['right'] else 'accepted'} {error}\n")
