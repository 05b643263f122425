"""The math rule on tables of answers, half of them by somebody who had not read its code.

``by_an_outsider.jsonl`` and ``by_an_engineer.jsonl`` were written before the rule was mended;
``after_the_mending.jsonl`` has near misses and spellings that were tried on it afterwards. Both error rates
of each table are printed, without and with a question: ``python -m tests.unit.rewards.test_math_answers``.
"""

import itertools
import json
import sys
import unicodedata
from fractions import Fraction
from pathlib import Path

import pytest

from realsys.api.basics.reward import KNOWN_FIELDS, Completion
from realsys.rewards import math_verify
from realsys.rewards.guard.guarded import RAISED, CallFailed
from realsys.rewards.math_library import is_one_of
from realsys.rewards.math_verify import math_verify_reward
from realsys.rewards.rule_terms import rule_term

FOLDER = Path(__file__).parent / "math_answers"
TABLES = ("by_an_engineer", "by_an_outsider", "after_the_mending")
MAX_SHARE = 0.01
ASKED_NOTHING = "How many?"  # the tables don't have the questions, and none of their numbers
# Right by their labels: a number is expected, and arithmetic has to be worked out, unless the question is
# known (math_verify.py says why).
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
    # Where the question is known, and doesn't state them
    "\\boxed{83!/82!}",
    "Answer: $10^9+7$",
    "Simplifying, everything except the last term cancels.\n\n"
    "Therefore, the final answer is $\\boxed{\\frac{10}{2}}$.",
}


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """Compares in this process, where a guard has one of its own: planted faults are seen here."""

    class Library:
        def call(self, **given):
            try:
                return is_one_of(**given)
            except Exception as error:
                raise CallFailed(RAISED, str(error)) from error

    monkeypatch.setattr(math_verify, "_library", Library())


def rows_of(table: str) -> list[dict]:
    text = (FOLDER / f"{table}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def has_thoughts(row: dict) -> bool:
    return row["style"] == "thoughts" or "<think>" in row["response"]


def is_unevaluated(row: dict) -> bool:
    return row["right"] and row["what"] in UNEVALUATED


def errors_of(rows: list[dict], question: str = "") -> list[dict]:
    def score(row: dict) -> float:
        return math_verify_reward(response=row["response"], answer=row["answer"], question=question)

    return [row for row in rows if (score(row) == 1.0) != row["right"]]


def report(table: str, question: str = "") -> tuple[float, float, list[dict]]:
    """Returns the shares of right answers that are refused and of wrong ones that are accepted.

    Without a question those that are not worked out are left out.
    """
    rows = [row for row in rows_of(table) if not has_thoughts(row)]
    errors = errors_of(rows, question)
    if not question:
        rows = [row for row in rows if not is_unevaluated(row)]
        errors = [row for row in errors if not is_unevaluated(row)]
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
    refused, accepted, errors = report(table, ASKED_NOTHING)  # as a run grades them
    assert refused <= MAX_SHARE, errors
    assert accepted <= MAX_SHARE, errors
    assert {row["response"] for row in errors} <= KNOWN_FAILURES


def test_the_built_in_rule_is_told_the_question():
    (row,) = [row for row in rows_of("by_an_outsider") if row["what"] == "factorial form"]
    answer = Completion(response=row["response"], answer=row["answer"], question=ASKED_NOTHING)
    term = rule_term("math_verify", 1.0, {})
    assert term.fields == KNOWN_FIELDS["math_verify"]
    assert term.function(**term.arguments([answer])) == 1.0


# question, answer, known, score
ASKED = [
    ("Compute $2^{10}$.", "\\boxed{2^{10}}", "1024", 0),
    ("Compute 2^10.", "\\boxed{2^{10}}", "1024", 0),
    ("Compute $2^{10}$.", "\\boxed{4^5}", "1024", 1),
    ("How many subsets has a set of 10 elements?", "\\boxed{2^{10}}", "1024", 1),
    ("What is $5!$?", "So it is $\\boxed{5!}$.", "120", 0),
    ("In how many orders do 5 books stand?", "\\boxed{5!}", "120", 0),
    ("In how many orders do five books stand?", "\\boxed{5!}", "120", 1),
    ("Choose 3 of 10.", "\\boxed{\\binom{10}{3}}", "120", 0),
    ("Evaluate $\\dfrac{7!}{3!\\,4!}$.", "\\boxed{\\frac{7!}{3! 4!}}", "35", 0),
    ("What is 17 + 25?", "\\boxed{25+17\\cdot 2^2/4}", "42", 0),
    ("What is 17 + 25?", "\\boxed{40 + 2}", "42", 0),
    ("What is 17 + 25?", "\\boxed{42^1}", "42", 0),
    ("What is 17 + 25?", "\\boxed{42}", "42", 1),
    ("Factor $x^2 + 2x + 1$.", "\\boxed{x^2+2x+1}", "(x+1)^2", 0),
    ("Factor $x^2 + 2x + 1$.", "\\boxed{(1+x)^2}", "(x+1)^2", 1),
    ("Which is larger, $x^2+1$ or $x^2-1$?", "\\boxed{x^2 + 1}", "x^2+1", 1),
    ("Write $y = 2x + 1$ as $ax + by = c$.", "\\boxed{y=2x+1}", "2x-y=-1", 0),
    ("Write $y = 2x + 1$ as $ax + by = c$.", "\\boxed{-2x+y=1}", "2x-y=-1", 1),
    ("Simplify $x+x$.", "\\boxed{x+x}", "2x", 0),
    ("How many?", "#### 5 in a box", "5", 1),
    ("How many?", "There are 5 in the box.", "5", 1),
    ("Is it (0.5, 1) or (1, 2)?", "\\boxed{(0.5, 1)}", "(\\frac{1}{2}, 1)", 1),
    ("How much is 50% of 3?", "\\boxed{1.5}", "\\frac{3}{2}", 1),
]  # fmt: skip


@pytest.mark.parametrize(("question", "response", "answer", "score"), ASKED)
def test_the_question_again_is_no_answer(question, response, answer, score):
    assert math_verify_reward(response=response, answer=answer, question=question) == score


SIGNS = {
    sign: Fraction(unicodedata.numeric(sign)).limit_denominator(10) for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒"
}
# Each way of a comparison, with its near miss; the same ways round.
COMPARED = [
    (r"50\%", "0.5", 1),
    (r"0.5", r"50\%", 1),
    (r"0.6", r"50\%", 0),
    (r"50\%", r"50 \text{ cm}", 0),
    (r"50 \text{ cm}", r"50\%", 0),
    ("f(x)=x+1", "y=x+1", 1),
    ("y=x+1", "f(x)=x+1", 1),
    ("y=x+2", "f(x)=x+1", 0),
    ("x=5", r"\{5\}", 1),
    ("x=6", r"\{5\}", 0),
    (r"x<2 \text{ and } x>1", "(1,2)", 1),
    (r"x>1 \text{ and } x<2", "(1,2)", 1),
    (r"x<2 \text{ and } x>1", "[1,2)", 0),
    ("2x=2", "x=1", 0),
    ("2y=4x", "y=2x", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\begin{pmatrix}1\\3\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 0),
    ("101_{2}", "101_{3}", 0),
    ("101_b", "101_b", 1),
    (r"\lceil x \rceil", r"\lceil x \rceil", 1),
    (r"\lceil x \rceil", r"\lfloor x \rfloor", 0),
    (r"\lceil x \rceil", "x", 0),
    (r"-1\frac{1}{2}", "-1.5", 1),
    (r"1\frac{1}{2}", "0.5", 0),
]


COMPARED += [(sign, f"{value.numerator}/{value.denominator}", 1) for sign, value in SIGNS.items()]


@pytest.mark.parametrize(("response", "answer", "score"), COMPARED)
def test_values_are_compared_in_each_form(response, answer, score):
    boxed = rf"\boxed{{{response}}}"
    assert math_verify_reward(response=boxed, answer=answer) == score


def test_arithmetic_that_is_not_worked_out_is_refused_where_the_question_is_not_known():
    rows = [row for row in rows_of("by_an_outsider") if is_unevaluated(row)]
    assert len(rows) == len(UNEVALUATED)
    assert errors_of(rows) == rows
    assert [row["what"] for row in errors_of(rows, ASKED_NOTHING)] == ["fraction that is integer"]


def test_thoughts_are_not_the_answer():
    rows = [row for table in TABLES for row in rows_of(table) if has_thoughts(row)]
    assert errors_of(rows) == []


def test_the_halves_are_large_enough_and_say_the_same_nowhere():
    rows = {table: rows_of(table) for table in TABLES[:2]}
    pairs = [(row["response"], row["answer"]) for table in rows.values() for row in table]
    assert all(len(table) >= 200 for table in rows.values())
    assert len(set(pairs)) >= 400


if __name__ == "__main__":
    for each, asked in itertools.product(TABLES, ("", ASKED_NOTHING)):
        for error in report(each, asked)[2]:
            sys.stdout.write(f"    {'refused' if error['right'] else 'accepted'} {error}\n")
