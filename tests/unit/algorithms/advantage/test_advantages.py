import math

import golden
import pytest
import torch
from near import assert_near

from realsys.algorithms.advantage.advantages import (
    gae_advantages,
    group_advantages,
    masked_mean,
    masked_sums,
    masked_whiten,
)
from realsys.api.errors import ConfigError, DataError

REWARD = torch.tensor([[0.0, 0.0, 1.0]])
VALUE = torch.tensor([[0.5, 0.25, 0.125]])
ONES = torch.ones(1, 3)


def slow_gae(reward, value, mask, gamma, lam, last_value):
    """One sequence as Python lists: the sum of eq. 16 over the tokens that count."""
    kept = [t for t, m in enumerate(mask) if m]
    values = [value[t] for t in kept] + [last_value]
    delta = [reward[t] + gamma * values[i + 1] - values[i] for i, t in enumerate(kept)]
    advantage = [0.0] * len(mask)
    for i, t in enumerate(kept):
        advantage[t] = sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(kept)))
    return advantage


def test_lambda_zero_is_the_one_step_error():
    # next value + reward - value: 1/4 - 1/2, 1/8 - 1/4, 1 - 1/8
    advantage, returns = gae_advantages(REWARD, VALUE, ONES, gamma=1.0, lam=0.0)
    assert advantage.tolist() == [[-0.25, -0.125, 0.875]]
    assert returns.tolist() == [[0.25, 0.125, 1.0]]


def test_lambda_one_is_the_whole_return():
    advantage, returns = gae_advantages(REWARD, VALUE, ONES, gamma=1.0, lam=1.0)
    assert advantage.tolist() == [[0.5, 0.75, 0.875]]  # 1 - value
    assert returns.tolist() == [[1.0, 1.0, 1.0]]


def test_gamma_and_lambda_by_hand():
    # γ = λ = 1/2, γλ = 1/4. δ: 1/8 - 1/2 = -3/8; 1/16 - 1/4 = -3/16; 1 - 1/8 = 7/8
    # A₂ = 7/8; A₁ = -3/16 + 7/32 = 1/32; A₀ = -3/8 + 1/128 = -47/128
    advantage, _ = gae_advantages(REWARD, VALUE, ONES, gamma=0.5, lam=0.5)
    assert advantage.tolist() == [[-47 / 128, 1 / 32, 7 / 8]]


def test_a_masked_token_inside_changes_nothing_for_the_others():
    # the same three tokens with a tool's token after the first, whose value and reward are junk
    reward = torch.tensor([[0.0, 7.0, 0.0, 1.0, 9.0]])
    value = torch.tensor([[0.5, 100.0, 0.25, 0.125, 50.0]])
    mask = torch.tensor([[1, 0, 1, 1, 0]])
    advantage, returns = gae_advantages(reward, value, mask, gamma=0.5, lam=0.5)
    assert advantage.tolist() == [[-47 / 128, 0.0, 1 / 32, 7 / 8, 0.0]]
    assert returns.tolist() == [[-47 / 128 + 0.5, 0.0, 1 / 32 + 0.25, 1.0, 0.0]]


def test_only_truncated_answers_bootstrap():
    truncated, after = torch.tensor([True, False]), torch.tensor([2.0, 2.0])
    inputs = (REWARD.repeat(2, 1), VALUE.repeat(2, 1), ONES.repeat(2, 1))
    advantage, returns = gae_advantages(
        *inputs,
        gamma=1.0,
        lam=1.0,
        truncation="bootstrap",
        truncated_B=truncated,
        bootstrap_value_B=after,
    )
    # with λ = 1 the value after the end adds to every return: 1 + 2 for the first, 1 for the second
    assert returns.tolist() == [[3.0, 3.0, 3.0], [1.0, 1.0, 1.0]]
    assert advantage.tolist() == [[2.5, 2.75, 2.875], [0.5, 0.75, 0.875]]
    terminal, _ = gae_advantages(
        *inputs, gamma=1.0, lam=1.0, truncated_B=truncated, bootstrap_value_B=after
    )
    assert terminal.tolist() == [[0.5, 0.75, 0.875]] * 2


def test_bootstrapping_passes_over_padding():
    short = torch.tensor([[1, 1, 0]])
    _, returns = gae_advantages(
        torch.zeros(1, 3),
        VALUE,
        short,
        gamma=0.5,
        lam=1.0,
        truncation="bootstrap",
        truncated_B=torch.tensor([True]),
        bootstrap_value_B=torch.tensor([4.0]),
    )
    assert returns.tolist() == [[1.0, 2.0, 0.0]]  # γ² · 4, γ · 4


@pytest.mark.parametrize("truncation", ["terminal", "bootstrap"])
def test_gae_agrees_with_the_sum_of_its_definition(truncation):
    torch.manual_seed(0)
    reward, value, after = torch.randn(6, 9), torch.randn(6, 9), torch.randn(6)
    mask, truncated = torch.rand(6, 9) > 0.3, torch.rand(6) > 0.5
    mask[0] = False
    advantage, returns = gae_advantages(
        reward,
        value,
        mask,
        gamma=0.97,
        lam=0.9,
        truncation=truncation,
        truncated_B=truncated,
        bootstrap_value_B=after,
    )
    for b in range(6):
        last = after[b].item() if truncation == "bootstrap" and truncated[b] else 0.0
        rows = (reward[b].tolist(), value[b].tolist(), mask[b].tolist())
        expected = torch.tensor(slow_gae(*rows, 0.97, 0.9, last))
        assert_near(advantage[b], expected)
        assert_near(returns[b], (expected + value[b]).masked_fill(~mask[b], 0.0))


def test_gae_refuses_what_it_would_have_to_guess():
    with golden.raises(DataError):
        gae_advantages(REWARD, VALUE, ONES, gamma=1.0, lam=1.0, truncation="bootstrap")
    with golden.raises(ConfigError):
        gae_advantages(REWARD, VALUE, ONES, gamma=1.0, lam=1.0, truncation="terminl")
    with golden.raises(DataError):
        gae_advantages(REWARD, torch.zeros(1, 4), ONES, gamma=1.0, lam=1.0)


def test_advantages_carry_no_gradient():
    value = VALUE.clone().requires_grad_()
    advantage, returns = gae_advantages(REWARD, value, ONES, gamma=1.0, lam=1.0)
    assert not advantage.requires_grad
    assert not returns.requires_grad


def test_grpo_divides_by_the_deviation_of_the_group():
    # scores 1, 3: mean 2, unbiased deviation √2, biased 1; scores 5, 5: no deviation
    scores = torch.tensor([1.0, 3.0, 5.0, 5.0])
    unbiased = group_advantages(scores, 2, normalise_std=True)
    expected = 1 / (math.sqrt(2.0) + 1e-6)
    assert_near(unbiased, torch.tensor([-expected, expected, 0.0, 0.0]))
    biased = group_advantages(scores, 2, normalise_std=True, unbiased=False, eps=1.0)
    assert biased.tolist() == [-0.5, 0.5, 0.0, 0.0]  # ±1 / (1 + 1)


def test_dr_grpo_only_subtracts_the_mean():
    scores = torch.tensor([1.0, 3.0, 5.0, 6.0])
    assert group_advantages(scores, 2, normalise_std=False).tolist() == [-1.0, 1.0, -0.5, 0.5]


def test_rloo_subtracts_the_mean_of_the_others():
    scores = torch.tensor([1.0, 2.0, 6.0])
    # 1 - (2 + 6)/2, 2 - (1 + 6)/2, 6 - (1 + 2)/2
    result = group_advantages(scores, 3, normalise_std=False, leave_one_out=True)
    assert result.tolist() == [-3.0, -1.5, 4.5]


@pytest.mark.parametrize(
    "options",
    [
        {"normalise_std": True},
        {"normalise_std": True, "unbiased": False},
        {"normalise_std": False},
        {"normalise_std": False, "leave_one_out": True},
    ],
)
def test_a_group_of_one_has_advantage_zero(options):
    # groups 7, 3, 7: the second answer is alone, its raw score must not become its advantage
    scores, groups = torch.tensor([1.0, 9.0, 1.0]), torch.tensor([7, 3, 7])
    assert group_advantages(scores, groups, **options).tolist() == [0.0, 0.0, 0.0]
    assert group_advantages(scores, 1, **options).tolist() == [0.0, 0.0, 0.0]


def test_groups_need_not_stand_together():
    scores = torch.tensor([1.0, 10.0, 3.0, 20.0])
    result = group_advantages(scores, torch.tensor([0, 5, 0, 5]), normalise_std=False)
    assert result.tolist() == [-1.0, -5.0, 1.0, 5.0]


def test_equal_scores_give_no_noise():
    advantage = group_advantages(torch.full((3,), 0.1), 3, normalise_std=True)
    assert advantage.abs().max() < 1e-9  # rounding of the mean must not be divided up by eps


def test_group_settings_that_clash_are_refused():
    scores = torch.zeros(3)
    with golden.raises(DataError):
        group_advantages(scores, 2, normalise_std=True)
    with golden.raises(ConfigError):
        group_advantages(scores, 3, normalise_std=True, leave_one_out=True)
    with golden.raises(DataError):
        group_advantages(scores, torch.zeros(2), normalise_std=True)


def test_masked_mean_ignores_what_is_masked():
    x = torch.tensor([[1.0, 2.0], [6.0, float("nan")]])
    assert masked_mean(x, torch.tensor([[1, 1], [1, 0]])).item() == 3.0
    assert math.isnan(masked_mean(x, torch.zeros(2, 2)))


def test_whitening_by_hand():
    # 1, 3, 5: mean 3, variance 4 (unbiased) or 8/3
    x, mask = torch.tensor([1.0, 3.0, 99.0, 5.0]), torch.tensor([1, 1, 0, 1])
    assert masked_whiten(x, mask, eps=0.0).tolist() == [-1.0, 0.0, 0.0, 1.0]
    biased = masked_whiten(x, mask, unbiased=False, eps=1 / 3)  # 8/3 + 1/3 = 3
    assert_near(biased, torch.tensor([-2.0, 0.0, 0.0, 2.0]) / math.sqrt(3.0))


def test_whitening_survives_a_large_mean():
    x = torch.tensor([4096.0, 4096.5, 4097.0])  # squares need 26 bits, float32 has 24
    assert_near(masked_whiten(x, torch.ones(3)), torch.tensor([-1.0, 0.0, 1.0]))


def test_whitening_over_ranks_is_that_of_the_whole_batch():
    torch.manual_seed(0)
    x, mask = torch.randn(10), torch.rand(10) > 0.3
    ranks = [(x[:3], mask[:3]), (x[3:], mask[3:])]
    totals = sum(torch.tensor(masked_sums(*rank), dtype=torch.float64) for rank in ranks)
    parts = [masked_whiten(*rank, reduce=lambda sums: totals) for rank in ranks]
    assert_near(torch.cat(parts), masked_whiten(x, mask))


def test_whitening_needs_two_elements():
    one = torch.tensor([1, 0])
    with golden.raises(DataError):
        masked_whiten(torch.tensor([4.0, 2.0]), one)
    assert masked_whiten(torch.tensor([4.0, 2.0]), one, unbiased=False).tolist() == [0.0, 0.0]
    with golden.raises(DataError):
        masked_whiten(torch.zeros(2), torch.zeros(2), unbiased=False)
