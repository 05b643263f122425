import math

import golden
import pytest
import torch
from near import assert_near, near

from realsys.algorithms.advantage.advantages import masked_mean
from realsys.algorithms.aggregation import aggregate, aggregation_weight
from realsys.algorithms.policy.policy_loss import policy_loss, update_should_stop
from realsys.api.basics.losses import PPOLoss
from realsys.api.errors import ConfigError, DataError
from realsys.data.ragged import pad_packed

MODES = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def clipped_loss(*tensors, **settings):
    return policy_loss(PPOLoss(**settings), *tensors)


def loss_of(ratio, advantage, **options):
    """Loss, statistics and d loss / d logprob of one token with this importance ratio."""
    old = torch.tensor([-1.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    advantages, mask = torch.tensor([advantage]), torch.ones(1)
    options = {"eps_clip": 0.2, **options}
    loss, stats = clipped_loss(logprobs, old, advantages, mask, **options)
    loss.sum().backward()
    return loss.item(), {k: v.item() for k, v in stats.items()}, logprobs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss", "clipped", "gradient"),
    [
        # gradient of -A·ratio is -A·ratio, of a clipped token 0
        (1.1, 2.0, {}, -2.2, 0, -2.2),
        (1.5, 2.0, {}, -2.4, 1, 0.0),  # held at 1.2
        (1.5, -2.0, {}, 3.0, 0, 3.0),  # a bad action made likelier is never clipped
        (0.5, -2.0, {}, 1.6, 1, 0.0),  # held at 0.8
        (0.5, 2.0, {}, -1.0, 0, -1.0),
        (1.25, 2.0, {"eps_clip_higher": 0.28}, -2.5, 0, -2.5),
        (1.5, 2.0, {"eps_clip_higher": 0.28}, -2.56, 1, 0.0),  # held at 1.28
        (0.75, -2.0, {"eps_clip_higher": 0.28}, 1.6, 1, 0.0),  # below, 0.2 still holds
    ],
)
def test_clipping_by_hand(ratio, advantage, options, loss, clipped, gradient):
    found, stats, found_gradient = loss_of(ratio, advantage, **options)
    assert found == near(loss)
    assert stats["clip_fraction"] == clipped
    assert stats["importance_ratio"] == near(ratio)
    assert found_gradient == near(gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "dual_clipped", "gradient"),
    [
        (5.0, -2.0, 6.0, 1, 0.0),  # 10 bounded by 3 · 2
        (2.5, -2.0, 5.0, 0, 5.0),
        (5.0, 2.0, -2.4, 0, 0.0),  # a positive advantage only knows the upper clip
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_actions(ratio, advantage, loss, dual_clipped, gradient):
    found, stats, found_gradient = loss_of(ratio, advantage, c_clip=3.0)
    assert found == near(loss)
    assert stats["dual_clip_fraction"] == dual_clipped
    assert found_gradient == near(gradient)


def test_kl_statistics_by_hand():
    # log ratio ln 2: k1 of KL(old ‖ new) is -ln 2, k3 is 2 - 1 - ln 2
    _, stats, _ = loss_of(2.0, 1.0)
    assert stats["approx_kl_k1"] == near(-math.log(2.0))
    assert stats["approx_kl_k3"] == near(1.0 - math.log(2.0))


def test_an_unchanged_policy_has_ratio_one_and_no_kl():
    torch.manual_seed(0)
    logprobs = -torch.rand(3, 5) * 9
    logprobs.requires_grad_()
    advantages, mask = torch.randn(3, 5), torch.rand(3, 5) > 0.3
    loss, stats = clipped_loss(
        logprobs, logprobs.detach().clone(), advantages, mask, eps_clip=0.2, c_clip=3.0
    )
    assert torch.equal(stats["importance_ratio"], mask.float())
    for name in ("clip_fraction", "dual_clip_fraction", "approx_kl_k1", "approx_kl_k3"):
        assert torch.equal(stats[name], torch.zeros(3, 5)), name
    assert torch.equal(loss, -advantages * mask)
    loss.sum().backward()  # the plain policy gradient
    assert torch.equal(logprobs.grad, -advantages * mask)


def test_log_ratios_are_bounded_at_20():
    for sign in (1.0, -1.0):
        logprobs = torch.tensor([sign * 1000.0], requires_grad=True)
        loss, stats = clipped_loss(
            logprobs, torch.zeros(1), torch.tensor([-1.0]), torch.ones(1), eps_clip=0.2
        )
        assert stats["importance_ratio"].item() == near(math.exp(sign * 20))
        loss.sum().backward()
        assert logprobs.grad.tolist() == [0.0]


def test_garbage_on_padding_reaches_neither_loss_nor_gradient():
    logprobs = torch.tensor([-1.0, float("nan"), -torch.inf], requires_grad=True)
    old = torch.tensor([-1.0, 0.0, -torch.inf])
    advantages = torch.tensor([2.0, float("inf"), float("nan")])
    loss, stats = clipped_loss(
        logprobs, old, advantages, torch.tensor([1, 0, 0]), eps_clip=0.2, c_clip=3.0
    )
    assert loss.tolist() == [-2.0, 0.0, 0.0]
    assert all(torch.equal(x[1:], torch.zeros(2)) for x in stats.values())
    aggregate(loss, torch.tensor([1, 0, 0]), "token_mean", denominator=1.0).backward()
    assert logprobs.grad.tolist() == [-2.0, 0.0, 0.0]


def slow_loss(logprobs, old, advantages, mask, *, low, high, dual):
    out = []
    for new, before, a, m in zip(logprobs, old, advantages, mask, strict=True):
        ratio = math.exp(new - before)
        objective = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        if a < 0:
            objective = max(objective, dual * a)
        out.append(-objective if m else 0.0)
    return out


def test_loss_agrees_with_a_loop_over_tokens():
    torch.manual_seed(0)
    old, mask = -3 * torch.rand(200), torch.rand(200) > 0.2
    logprobs, advantages = old + torch.randn(200), torch.randn(200)
    loss, stats = clipped_loss(
        logprobs, old, advantages, mask, eps_clip=0.2, eps_clip_higher=0.28, c_clip=3.0
    )
    rows = (x.tolist() for x in (logprobs, old, advantages, mask))
    assert_near(loss, torch.tensor(slow_loss(*rows, low=0.2, high=0.28, dual=3.0)))
    assert 0 < masked_mean(stats["clip_fraction"], mask) < 1
    assert 0 < masked_mean(stats["dual_clip_fraction"], mask) < 1


@pytest.mark.parametrize("mode", MODES)
def test_packed_and_padded_batches_have_the_same_loss_and_gradient(mode):
    torch.manual_seed(0)
    lengths = [3, 5, 1]
    old, advantages, mask = -torch.rand(9), torch.randn(9), torch.rand(9) > 0.3
    shift = 0.4 * torch.randn(9)
    results = []
    for padded in (False, True):
        logprobs = (old + shift).requires_grad_()
        tensors = [logprobs, old, advantages, mask]
        if padded:
            tensors = [pad_packed(x, lengths) for x in tensors]
        loss, stats = clipped_loss(*tensors, eps_clip=0.2)
        where = {"lengths": None if padded else lengths}
        weight = aggregation_weight(tensors[3], mode, norm_length=7, **where)
        total = aggregate(loss, tensors[3], mode, denominator=weight, **where)
        total.backward()
        clip = masked_mean(stats["clip_fraction"], tensors[3])
        results.append((torch.tensor(weight), total, logprobs.grad, clip))
    for packed, padded in zip(*results, strict=True):
        assert_near(packed, padded)


@pytest.mark.parametrize(
    ("ratio", "kl", "stop"),
    [
        (1.0, 0.01, False),
        (10.0, 0.1, False),  # the limits themselves are allowed
        (10.1, 0.01, True),
        (1.0, 0.2, True),
        (float("nan"), 0.01, True),
        (1.0, float("nan"), True),
    ],
)
def test_an_update_stops_beyond_either_limit(ratio, kl, stop):
    assert update_should_stop(ratio, kl, max_mean_ratio=10.0, max_approx_kl=0.1) is stop
    assert update_should_stop(ratio, kl) is False  # no limits


def test_shapes_and_settings_that_clash_are_refused():
    x, column = torch.zeros(3), torch.zeros(3, 1)
    with golden.raises(DataError):
        clipped_loss(x, x, column, x)
    with golden.raises(DataError):
        policy_loss(PPOLoss(), x, x, x, x, weights=column)
    with golden.raises(ConfigError):
        clipped_loss(x, x, x, x, c_clip=1.0)
    with golden.raises(ConfigError):
        clipped_loss(x, x, x, x, eps_clip=1.5)
