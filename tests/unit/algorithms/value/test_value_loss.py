import math

import golden
import pytest
import torch
from near import assert_near, near

from realsys.algorithms.advantage.advantages import masked_sums
from realsys.algorithms.value.value_loss import clipped_value_loss, explained_variance
from realsys.api.errors import ConfigError, DataError


def loss_of(value, old, target, **options):
    values = torch.tensor([value], requires_grad=True)
    loss, stats = clipped_value_loss(
        values, torch.tensor([old]), torch.tensor([target]), torch.ones(1), **options
    )
    loss.sum().backward()
    return loss.item(), stats["clip_fraction"].item(), values.grad.item()


@pytest.mark.parametrize(
    ("value", "old", "target", "eps_clip", "loss", "clipped", "gradient"),
    [
        (3.0, 0.0, 1.0, None, 2.0, 0, 2.0),  # ½ · 2²
        (1.0, 0.0, 2.0, 0.5, 1.125, 1, 0.0),  # held at ½: ½ · 1.5² is more than ½ · 1²
        (1.0, 0.0, -1.0, 0.5, 2.0, 0, 2.0),  # moved away from the target: ½ · 2² counts
        (0.25, 0.0, 1.0, 0.5, 0.28125, 0, -0.75),  # inside the range
    ],
)
def test_squared_loss_by_hand(value, old, target, eps_clip, loss, clipped, gradient):
    assert loss_of(value, old, target, eps_clip=eps_clip) == (loss, clipped, gradient)


def test_huber_is_linear_beyond_delta():
    # error 4, δ = 1: 1 · (4 - ½); error ½: ½ · ¼
    assert loss_of(5.0, 5.0, 1.0, eps_clip=None, kind="huber", huber_delta=1.0) == (3.5, 0, 1.0)
    assert loss_of(1.5, 1.5, 1.0, eps_clip=0.2, kind="huber", huber_delta=1.0) == (0.125, 0, 0.5)


def test_garbage_on_padding_reaches_neither_loss_nor_gradient():
    nan = float("nan")
    values = torch.tensor([1.0, nan], requires_grad=True)
    junk = torch.tensor([0.0, nan])
    loss, stats = clipped_value_loss(values, junk, junk, torch.tensor([1, 0]), eps_clip=0.5)
    loss.sum().backward()
    assert loss.tolist() == [0.5, 0.0]
    assert stats["clip_fraction"].tolist() == [0.0, 0.0]
    assert values.grad.tolist() == [1.0, 0.0]


def test_explained_variance_by_hand():
    returns, mask = torch.tensor([1.0, 3.0, 5.0, 99.0]), torch.tensor([1, 1, 1, 0])
    assert explained_variance(returns.clone(), returns, mask) == 1.0
    constant = torch.full((4,), 7.0)
    assert explained_variance(constant, returns, mask) == pytest.approx(0.0, abs=1e-12)
    # errors 0, 2, 4 - 4 = 0: variance 8/9; returns: 8/3; 1 - 1/3
    half = torch.tensor([1.0, 1.0, 5.0, 0.0])
    assert explained_variance(half, returns, mask) == near(2 / 3)
    assert math.isnan(explained_variance(half, torch.ones(4), mask))
    assert math.isnan(explained_variance(half, returns, torch.zeros(4)))


def test_explained_variance_over_ranks_is_that_of_the_whole_batch():
    torch.manual_seed(0)
    values, returns, mask = torch.randn(8), torch.randn(8), torch.ones(8)
    other = (values[3:], returns[3:], mask[3:])
    # called with the sums of errors, then with those of returns: add the other rank's
    theirs = iter([other[1].double() - other[0].double(), other[1]])

    def add_other_rank(sums):
        return sums + torch.tensor(masked_sums(next(theirs), other[2]), dtype=torch.float64)

    mine = explained_variance(values[:3], returns[:3], mask[:3], reduce=add_other_rank)
    assert_near(mine, explained_variance(values, returns, mask))


def test_settings_that_make_no_sense_are_refused():
    x = torch.zeros(2)
    with golden.raises(ConfigError):
        clipped_value_loss(x, x, x, x, eps_clip=None, kind="hubr")
    with golden.raises(ConfigError):
        clipped_value_loss(x, x, x, x, eps_clip=0.0)
    with golden.raises(DataError):
        clipped_value_loss(x, x, x[:, None], x, eps_clip=None)


def test_rounding_is_no_clipping():
    """old + (new - old) is not new in float32 where the two differ in size."""
    torch.manual_seed(0)
    old = 0.01 * torch.randn(500)
    new, returns = 0.1 * torch.randn(500).clamp(-1, 1), torch.randn(500)
    every = torch.ones(500)
    loss, figures = clipped_value_loss(new, old, returns, every, eps_clip=0.2)
    assert figures["clip_fraction"].sum() == 0
    assert torch.equal(loss, clipped_value_loss(new, old, returns, every, eps_clip=None)[0])
