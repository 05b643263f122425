"""Advantages by name: worked by hand, against loops over subsets, and what holds for all of them."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import golden
import pytest
import torch
from estimators_named import estimator
from near import assert_near, near

from realsys.algorithms.advantage.advantages import length_adaptive_lambda
from realsys.algorithms.advantage.estimators_by_name import answer_advantages, best_of_k_gains
from realsys.algorithms.advantage.group_scores import GroupScores
from realsys.api.basics.choice import kinds_of
from realsys.api.basics.estimators import (
    AnswerEstimator,
    GDPOAdvantage,
    PassAtKAdvantage,
)
from realsys.api.errors import ConfigError, DataError

ANSWERS = sorted(kinds_of(AnswerEstimator))
COMPARING = [name for name in ANSWERS if estimator(name).compares and name != "gdpo"]


def scores(values: list[float], group_size: int, **parts: list[float]) -> GroupScores:
    score_B = torch.tensor(values)
    group_B = torch.arange(len(values)) // group_size
    found = {name: torch.tensor(part) for name, part in parts.items()}
    return GroupScores(score_B, group_B, torch.ones_like(group_B), parts=found)


def made(name: str, values: list[float], group_size: int) -> list[float]:
    chosen = estimator(name)
    assert isinstance(chosen, AnswerEstimator)
    found: list[float] = answer_advantages(chosen, scores(values, group_size)).tolist()
    return found


# ---- by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),  # (0.75, -0.25 …) over the deviation 0.5
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("maxrl", [3.0, -1.0, -1.0, -1.0]),  # over the mean 0.25
        ("pass_at_k", [1.0, 0.0, 0.0, 0.0]),  # only the best adds anything to the best of 4
        ("reinforce_pp", [1.0, 0.0, 0.0, 0.0]),
        ("reinforce_pp_baseline", [0.75, -0.25, -0.25, -0.25]),
        ("none", [0.0] * 4),
    ],
)
def test_one_success_of_four(name: str, wanted: list[float]) -> None:
    assert made(name, [1.0, 0.0, 0.0, 0.0], 4) == near(wanted)


def test_a_success_counts_the_more_for_maxrl_the_rarer_it_is() -> None:
    rare, common = made("maxrl", [1.0, 0, 0, 0, 1, 1, 1, 0], 4)[0], 1 / 0.75 - 1
    assert rare == near(3.0)
    assert made("maxrl", [1.0, 0, 0, 0, 1, 1, 1, 0], 4)[4] == near(common)
    assert made("maxrl", [0.0, -1.0, -2.0, 0.5], 4) == [0.0] * 4  # no mean above 0


def test_gdpo_tells_apart_what_grpo_confuses() -> None:
    """The published example: with rewards (1, 0) and (0, 1) GRPO sees the same sum, GDPO does not."""
    parts = {"right": [1.0, 0.0, 0.0, 0.0], "short": [1.0, 1.0, 0.0, 0.0]}
    total = [2.0, 1.0, 0.0, 0.0]
    found = answer_advantages(GDPOAdvantage(), scores(total, 4, **parts))
    wanted = torch.tensor(made("grpo", parts["right"], 4)) + torch.tensor(
        made("grpo", parts["short"], 4)
    )
    assert_near(found, wanted)
    weighed = GDPOAdvantage(weights={"right": 2.0})
    found = answer_advantages(weighed, scores(total, 4, **parts))
    assert_near(found, 2 * torch.tensor(made("grpo", parts["right"], 4)))


def test_gdpo_says_which_part_is_missing() -> None:
    with golden.raises(ConfigError) as e:
        answer_advantages(
            GDPOAdvantage(weights={"shrt": 1.0}), scores([1.0, 0.0], 2, short=[1.0, 0.0])
        )
    assert "short" in e.value.fix
    with golden.raises(DataError):
        answer_advantages(GDPOAdvantage(), scores([1.0, 0.0], 2))


def test_gdpo_compares_no_counts() -> None:
    parts = {"right": [1.0, 0.0, 0.0, 0.0]}
    counted = {
        **parts,
        "correct": [1.0, 0.0, 0.0, 0.0],
        "unfinished_thoughts": [0.0, 1.0, 1.0, 0.0],
    }
    found = [
        answer_advantages(GDPOAdvantage(), scores([1.0, 0, 0, 0], 4, **given))
        for given in (parts, counted)
    ]
    assert torch.equal(*found)


def test_gdpo_does_not_reward_that_a_rule_failed_on_an_answer() -> None:
    parts = {"right": [1.0, 0.0, float("nan"), 0.0], "short": [1.0, 1.0, float("nan"), 0.0]}
    without = answer_advantages(GDPOAdvantage(), scores([2.0, 1.0, 0.0, 0.0], 4, **parts))
    raised = {**parts, "raised": [float("nan"), float("nan"), 1.0, float("nan")]}
    found = answer_advantages(GDPOAdvantage(), scores([2.0, 1.0, 0.0, 0.0], 4, **raised))
    assert_near(found, without)
    every = scores([0.0, 0.0], 2, raised=[1.0, 1.0])
    for estimator_ in (GDPOAdvantage(), GDPOAdvantage(weights={"right": 1.0})):
        assert answer_advantages(estimator_, every).tolist() == [0.0, 0.0]


def test_lambda_grows_with_the_length() -> None:
    found = length_adaptive_lambda(torch.tensor([0, 10, 20, 100, 400]), 0.05)
    assert found.tolist() == near([0.0, 0.0, 0.0, 0.8, 0.95])


# ---- against loops --------------------------------------------------------------------------------


def slow_gains(values: list[float], k: int) -> list[float]:
    """Over all k-subsets with an answer: how much lower the best is without it."""
    found = []
    for i in range(len(values)):
        others = [j for j in range(len(values)) if j != i]
        gains = [
            max(values[i], *(values[j] for j in rest)) - max(values[j] for j in rest)
            for rest in combinations(others, k - 1)
        ]
        found.append(sum(gains) / len(gains))
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("k", [2, 3, 5, 6])
def test_pass_at_k_agrees_with_a_loop_over_subsets(seed: int, k: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 4, (6,), generator=rng).double()  # with ties
    assert best_of_k_gains(values, k).tolist() == near(slow_gains(values.tolist(), k))


@pytest.mark.parametrize("k", [2, 4, 8])
def test_pass_at_k_is_the_gradient_of_the_best_of_k(k: int) -> None:
    """Exactly: E[gain · ∇ log p], over all draws of eight answers, is the gradient of E[best of k] / k."""
    p = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    best = 1 - (1 - p) ** k
    (wanted,) = torch.autograd.grad(best, p)
    found = 0.0
    for right in range(9):
        draws = torch.tensor([1.0] * right + [0.0] * (8 - right), dtype=torch.float64)
        likely = math.comb(8, right) * 0.3**right * 0.7 ** (8 - right)
        score = torch.where(draws > 0, 1 / 0.3, -1 / 0.7)  # d log p(draw) / dp
        found += likely * float((best_of_k_gains(draws, k) * score).mean())
    assert found == near(float(wanted) / k)


# ---- what holds for all -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPARING)
def test_equal_scores_and_single_answers_teach_nothing(name: str) -> None:
    assert made(name, [0.1, 0.1, 0.1, 0.7, 0.7, 0.7], 3) == [0.0] * 6
    assert made(name, [0.3, 0.9], 1) == [0.0] * 2


@pytest.mark.parametrize("name", COMPARING)
def test_groups_do_not_see_one_another(name: str) -> None:
    rng = torch.Generator().manual_seed(3)
    values = torch.rand(12, generator=rng).tolist()
    together = made(name, values, 4)
    alone = [a for i in range(0, 12, 4) for a in made(name, values[i : i + 4], 4)]
    assert together == near(alone)
    order = torch.randperm(12, generator=rng)
    mixed = GroupScores(
        torch.tensor(values)[order], (torch.arange(12) // 4)[order], torch.ones(12).long()
    )
    chosen = estimator(name)
    assert isinstance(chosen, AnswerEstimator)
    assert_near(answer_advantages(chosen, mixed), torch.tensor(together)[order])


def test_rloo_is_dr_grpo_up_to_n_over_n_less_one() -> None:
    values = [0.3, 0.9, 0.1, 0.4]
    assert made("rloo", values, 4) == near([a * 4 / 3 for a in made("dr_grpo", values, 4)])


@pytest.mark.parametrize(
    "returned", [[1.0, 0.0], torch.zeros(()), torch.zeros(2, 2), torch.tensor([0.0, math.nan])]
)
def test_a_kind_that_returns_nonsense_is_named(returned: Any) -> None:
    class Odd(AnswerEstimator):
        kind = "odd"

        def answer_advantages(self, answers: GroupScores) -> torch.Tensor:
            return returned

    with golden.raises(ConfigError) as found:
        answer_advantages(Odd(), scores([1.0, 0.0], 2))
    assert "class Odd" in found.value.where


def test_correct_is_no_part_that_counts_by_itself() -> None:
    answers = scores([1.0, 0.0], 2, correct=[0.0, 1.0], short=[1.0, 0.0])
    assert_near(
        answer_advantages(GDPOAdvantage(), answers),
        answer_advantages(GDPOAdvantage(weights={"short": 1.0}), answers),
    )


def test_a_kind_of_ones_own_and_one_that_inherits() -> None:
    class Best(PassAtKAdvantage):
        kind = "best"

    class Own(AnswerEstimator):
        kind = "own"

        def answer_advantages(self, answers: GroupScores) -> torch.Tensor:
            length = answers.lengths.double()
            base = answers.group_sum(length * answers.scores) / answers.group_sum(length)
            return answers.scores - base

    answers = scores([1.0, 0.0, 0.0, 0.0], 4)
    assert answer_advantages(Best(), answers).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert answer_advantages(Own(), answers).tolist() == [0.75, -0.25, -0.25, -0.25]
