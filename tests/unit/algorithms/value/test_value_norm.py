import math

import golden
import pytest
import torch
from near import assert_near, near

from realsys.algorithms.advantage.advantages import masked_sums
from realsys.algorithms.value.value_norm import RunningMoments
from realsys.api.errors import CheckpointError, ConfigError


def test_nothing_changes_before_the_first_update():
    moments, x = RunningMoments(), torch.tensor([-3.0, 7.0])
    assert (moments.mean, moments.std) == (0.0, 1.0)
    assert moments.normalise(x).tolist() == [-3.0, 7.0]
    moments.update(x, torch.zeros(2))  # nothing kept by the mask
    assert (moments.mean, moments.std) == (0.0, 1.0)


def test_cumulative_moments_are_those_of_all_elements():
    moments = RunningMoments()
    moments.update(torch.tensor([1.0, 99.0]), torch.tensor([1, 0]))
    moments.update(torch.tensor([[3.0], [5.0], [7.0]]), torch.ones(3, 1))
    # 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
    assert moments.mean == 4.0
    assert moments.std == math.sqrt(5.0)
    assert_near(moments.normalise(torch.tensor([4.0, 9.0])), torch.tensor([0.0, math.sqrt(5.0)]))


def test_exponential_moments_are_not_biased_towards_the_start():
    moments = RunningMoments(beta=0.5)
    moments.update(torch.tensor([2.0, 4.0]), torch.ones(2))
    assert (moments.mean, moments.std) == (3.0, 1.0)  # of the only batch, not half of it
    moments.update(torch.tensor([6.0]), torch.ones(1))
    # mean (¼ · 3 + ½ · 6) / ¾ = 5; of squares (¼ · 10 + ½ · 36) / ¾ = 82/3; variance 7/3
    assert moments.mean == 5.0
    assert moments.std == near(math.sqrt(7 / 3))


def test_a_large_batch_weighs_no_more_than_a_small_one_when_exponential():
    small, large = RunningMoments(beta=0.9), RunningMoments(beta=0.9)
    small.update(torch.tensor([1.0, 3.0]), torch.ones(2))
    large.update(torch.tensor([1.0, 3.0]).repeat(50), torch.ones(100))
    assert small.mean == near(large.mean)
    assert small.std == near(large.std)


def test_denormalising_undoes_normalising():
    torch.manual_seed(0)
    moments, x = RunningMoments(beta=0.99), 50 + 7 * torch.randn(100)
    moments.update(x, torch.ones(100))
    assert_near(moments.denormalise(moments.normalise(x)), x)
    normalised = moments.normalise(x).double()
    assert normalised.mean().item() == near(0.0, scale=1.0)
    assert normalised.std(correction=0).item() == near(1.0)


def test_small_spread_around_a_large_mean_is_seen():
    moments = RunningMoments()
    x = torch.tensor([4096.0, 4097.0])  # their squares need 25 bits, float32 has 24
    moments.update(x, torch.ones(2))
    assert (moments.mean, moments.std) == (4096.5, 0.5)


def test_equal_returns_are_not_blown_up():
    moments = RunningMoments(eps=0.25)
    moments.update(torch.full((3,), 2.0), torch.ones(3))
    assert moments.std == 0.5
    assert moments.normalise(torch.tensor([2.5])).tolist() == [1.0]


@pytest.mark.parametrize("beta", [None, 0.9])
def test_ranks_keep_the_moments_of_the_whole_batch(beta):
    torch.manual_seed(0)
    x, mask = torch.randn(10), torch.rand(10) > 0.3
    whole, ranks = RunningMoments(beta=beta), [RunningMoments(beta=beta) for _ in range(2)]
    halves = [(x[:4], mask[:4]), (x[4:], mask[4:])]
    totals = sum(torch.tensor(masked_sums(*half), dtype=torch.float64) for half in halves)
    whole.update(x, mask)
    for rank, half in zip(ranks, halves, strict=True):
        rank.update(*half, reduce=lambda sums: totals)
    assert ranks[0].state_dict() == ranks[1].state_dict()
    assert ranks[0].mean == near(whole.mean)
    assert ranks[0].std == near(whole.std)


def test_a_resumed_run_goes_on_bit_for_bit():
    torch.manual_seed(0)
    batches = [torch.randn(5) for _ in range(4)]
    through, before, after = (RunningMoments(beta=0.99) for _ in range(3))
    for x in batches:
        through.update(x, torch.ones(5))
    for x in batches[:2]:
        before.update(x, torch.ones(5))
    after.load_state_dict(before.state_dict())
    for x in batches[2:]:
        after.update(x, torch.ones(5))
    assert after.state_dict() == through.state_dict()


def test_wrong_settings_and_states_are_refused():
    with golden.raises(ConfigError):
        RunningMoments(beta=1.0)
    with golden.raises(ConfigError):
        RunningMoments(eps=0.0)
    with golden.raises(CheckpointError):
        RunningMoments().load_state_dict({"coef": 1.0})
