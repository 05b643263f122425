"""Figures of scored answers and their intervals, against numbers by hand."""

from __future__ import annotations

import golden
import pytest

from realsys.api.errors import DataError
from realsys.evaluator.answer_statistics import (
    QuestionResult,
    bootstrapped,
    figures_of,
    ks_of,
    wilson,
)
from realsys.evaluator.saved_model import chosen_questions


def result(*rewards: float, right: int, source: str = "", answers: int = 0) -> QuestionResult:
    count = answers or len(rewards)
    return QuestionResult(
        id="q",
        rewards=rewards,
        num_correct=right,
        lengths=tuple(range(1, count + 1)),
        truncated=(True,) + (False,) * (count - 1),
        source=source,
    )


def test_wilsons_interval_of_8_in_10_is_the_textbooks() -> None:
    # Middle: (0.8 + 0.19207) / 1.38415 = 0.71674. Half of the width:
    # 1.96 / 1.38415 * sqrt(0.016 + 0.0096036) = 0.2266
    found = wilson(8, 10)
    assert (found.value, found.interval) == (0.8, "wilson")
    assert found.low == pytest.approx(0.4902, abs=1e-4)
    assert found.high == pytest.approx(0.9433, abs=1e-4)


@pytest.mark.parametrize(("right", "low", "high"), [(0, 0.0, None), (10, None, 1.0)])
def test_wilsons_interval_ends_at_0_and_1_and_has_a_width(right, low, high) -> None:
    found = wilson(right, 10)
    assert found.high - found.low > 0.2
    assert low in (None, found.low)
    assert high in (None, found.high)


def test_a_bootstrap_of_many_values_is_the_normal_interval() -> None:
    # 400 values of 0 and 400 of 1: the mean's standard error is 0.5 / sqrt(800) = 0.01768
    found = bootstrapped([0.0, 1.0] * 400, seed=1)
    assert found.value == 0.5
    assert found.low == pytest.approx(0.5 - 1.96 * 0.01768, abs=2e-3)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.01768, abs=2e-3)


def test_a_bootstrap_is_the_same_for_the_same_seed() -> None:
    values = [0.1, 0.5, 0.9, 0.2, 0.7]
    assert bootstrapped(values, seed=3) == bootstrapped(values, seed=3)
    assert bootstrapped(values, seed=3) != bootstrapped(values, seed=4)


def test_figures_of_one_answer_a_question() -> None:
    found = figures_of([result(1.0, right=1), result(0.5, right=0)], num_answers=1, seed=1)
    assert list(found) == ["accuracy", "mean_reward", "response_length/mean", "truncated"]
    assert found["accuracy"] == wilson(1, 2)
    assert (found["mean_reward"].value, found["truncated"].value) == (0.75, 1.0)


def test_figures_of_several_answers_have_pass_at_k_by_hand() -> None:
    # One of 3 right: 1 - C(2,k)/C(3,k) = 1/3, 2/3, 1. None right: 0.
    results = [result(1.0, 0.0, 0.0, right=1), result(0.0, 0.0, 0.0, right=0)]
    found = figures_of(results, num_answers=3, seed=1)
    assert found["accuracy"].value == pytest.approx(1 / 6)
    assert found["accuracy"].interval == "bootstrap"
    passes = [found[f"pass@{k}"].value for k in ks_of(3)]
    assert passes == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    assert found["response_length/mean"].value == 2.0
    assert found["truncated"].value == pytest.approx(1 / 3)


def test_a_question_without_a_score_is_in_no_figure() -> None:
    away = result(right=0, answers=1, source="away")
    asked = [result(1.0, right=1), result(0.0, right=0), away]
    assert figures_of(asked, num_answers=1, seed=1) == figures_of(asked[:2], num_answers=1, seed=1)
    several = [result(1.0, 0.0, right=1), result(right=0, answers=2)]
    assert figures_of(several, num_answers=2, seed=1)["pass@2"].value == 1.0
    assert figures_of([away], num_answers=1, seed=1) == {}


def test_sources_have_figures_of_their_own() -> None:
    results = [result(1.0, right=1, source="a"), result(0.0, right=0, source="b")]
    found = figures_of(results, num_answers=1, seed=1)
    assert (found["accuracy/a"].value, found["accuracy/b"].value) == (1.0, 0.0)


def test_a_limit_takes_a_seeded_choice_of_the_questions() -> None:
    assert list(chosen_questions(5, None, seed=1)) == [0, 1, 2, 3, 4]
    assert list(chosen_questions(5, 9, seed=1)) == [0, 1, 2, 3, 4]
    some = list(chosen_questions(1000, 10, seed=1))
    assert some == sorted(set(some)) == list(chosen_questions(1000, 10, seed=1))
    assert some != list(chosen_questions(1000, 10, seed=2))
    with golden.raises(DataError):
        chosen_questions(0, 3, seed=1)
