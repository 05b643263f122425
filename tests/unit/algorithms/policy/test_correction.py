"""Weights of answers of another policy, lags and lengths: values by hand, and what holds for all."""

import math

import golden
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from near import assert_near, near

from realsys.algorithms.advantage.overlong import overlong_penalty
from realsys.algorithms.aggregation import aggregate
from realsys.algorithms.policy.correction import (
    correction_weights,
    drifted_sequences,
    judge_mismatch,
    mismatch,
)
from realsys.algorithms.policy.policy_loss import policy_loss
from realsys.algorithms.staleness_figures import token_lags, tokens_by_lag
from realsys.api.basics.losses import PPOLoss
from realsys.api.errors import ConfigError, DataError
from realsys.data.ragged import pad_packed, unpad_to_packed

torch.set_num_threads(1)
METHODS = ["none", "cap", "tis", "icepop", "sequence_mask"]
# Two sequences: of ratios 1/2, 2, 8 and of 1/4, 1/2. Products 8 and 1/8; geometric means 2 and 1/√8.
RATIOS = torch.tensor([0.5, 2.0, 8.0, 0.25, 0.5])
LENGTHS = [3, 2]
ONES = torch.ones(5)


def weights(method, **options):
    """Weights, and which tokens were left out or held, for RATIOS."""
    behaviour = torch.tensor([-1.0, -3.0, -9.0, -0.1, -2.0])
    found, stats = correction_weights(
        behaviour + RATIOS.log(), behaviour, ONES, method=method, lengths=LENGTHS, **options
    )
    return found, stats["masked"].tolist(), stats["clamped"].tolist()


@pytest.mark.parametrize(
    ("method", "options", "expected", "masked", "clamped"),
    [
        ("none", {}, [0.5, 2, 8, 0.25, 0.5], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        ("cap", {"high": 4.0}, [0.5, 2, 0, 0.25, 0.5], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]),
        (
            "cap",
            {"high": 4.0, "cap_mode": "clamp"},
            [0.5, 2, 4, 0.25, 0.5],
            [0, 0, 0, 0, 0],
            [0, 0, 1, 0, 0],
        ),
        ("tis", {"high": 1.5}, [0.5, 1.5, 1.5, 0.25, 0.5], [0] * 5, [0, 1, 1, 0, 0]),
        ("icepop", {"low": 0.4, "high": 4.0}, [0.5, 2, 0, 0, 0.5], [0, 0, 1, 1, 0], [0] * 5),
        # geometric means 2 and 0.354: the second sequence goes, the first keeps its tokens' weights
        ("sequence_mask", {"low": 0.5, "high": 3.0}, [0.5, 2, 8, 0, 0], [0, 0, 0, 1, 1], [0] * 5),
        (
            "cap",
            {"high": 4.0, "level": "sequence"},
            [0, 0, 0, 1 / 8, 1 / 8],
            [1, 1, 1, 0, 0],
            [0] * 5,
        ),
        (
            "tis",
            {"high": 4.0, "level": "sequence"},
            [4, 4, 4, 1 / 8, 1 / 8],
            [0] * 5,
            [1, 1, 1, 0, 0],
        ),
        (
            "icepop",
            {"low": 0.5, "high": 9.0, "level": "sequence"},
            [8, 8, 8, 0, 0],
            [0, 0, 0, 1, 1],
            [0] * 5,
        ),
    ],
)
def test_weights_by_hand(method, options, expected, masked, clamped):
    found, left_out, held = weights(method, **options)
    assert_near(found, torch.tensor(expected, dtype=torch.float32))
    assert left_out == masked
    assert held == clamped


def test_a_bound_belongs_to_what_is_kept():
    behaviour = torch.zeros(2)
    proximal = torch.tensor([1.0, -1.0])  # bounds that float32 hits exactly
    low, high = float(torch.tensor(-1.0).exp()), float(torch.tensor(1.0).exp())
    found, stats = correction_weights(
        proximal, behaviour, torch.ones(2), method="icepop", low=low, high=high
    )
    assert found.tolist() == [high, low]
    assert stats["masked"].tolist() == [0, 0]


def random_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (3,), generator=generator).tolist()
    shape = (sum(lengths),)
    behaviour = -5 * torch.rand(shape, generator=generator)
    proximal = behaviour + torch.randn(shape, generator=generator)
    return proximal, behaviour, torch.rand(shape, generator=generator) > 0.3, lengths


OPTIONS = {"low": 0.5, "high": 2.0}


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
@given(seed=st.integers(0, 10**6), level=st.sampled_from(["token", "sequence"]))
def test_what_holds_of_all_weights(method, seed, level):
    proximal, behaviour, mask, lengths = random_batch(seed)
    options = {"method": method, "level": level, **(OPTIONS if method != "none" else {})}
    found, stats = correction_weights(proximal, behaviour, mask, lengths=lengths, **options)
    assert not found[~mask].any()
    assert not stats["masked"][~mask].any()
    assert torch.equal(found == 0, ~mask | stats["masked"].bool())
    if method in ("cap", "tis", "icepop"):
        assert float(found.max()) <= 2.0
    # Padded, it is the same; and what stands where the mask is 0 doesn't matter.
    junk = torch.where(mask, proximal, torch.full_like(proximal, float("nan")))
    padded, _ = correction_weights(
        *(pad_packed(x, lengths) for x in (junk, behaviour, mask)), **options
    )
    assert torch.equal(unpad_to_packed(padded, lengths), found)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_unchanged_policy_has_weight_one(method, level):
    logprobs = torch.tensor([-1.0, -2.0, -0.5])
    options = {"method": method, "level": level, **(OPTIONS if method != "none" else {})}
    found, _ = correction_weights(logprobs, logprobs, torch.ones(3), lengths=[2, 1], **options)
    assert found.tolist() == [1, 1, 1]


def test_weights_are_bounded_and_constants():
    proximal = torch.tensor([0.0, -500.0], requires_grad=True)
    behaviour = torch.tensor([-500.0, 0.0])
    found, _ = correction_weights(proximal, behaviour, torch.ones(2), method="none")
    assert found.tolist() == near([math.exp(20), math.exp(-20)])
    assert not found.requires_grad


@pytest.mark.parametrize("method", ["cap", "icepop", "sequence_mask"])
def test_what_is_no_number_is_left_out(method):
    nan = torch.tensor([float("nan"), 0.0])
    found, stats = correction_weights(
        nan, torch.zeros(2), torch.ones(2), method=method, lengths=[1, 1], **OPTIONS
    )
    assert found.tolist() == [0, 1]
    assert stats["masked"].tolist() == [1, 0]


def test_decoupled_loss_by_hand():
    # Behaviour ln 1/4, proximal ln 1/2, now ln 3/4: weight 2, ratio 3/2 clipped at 1.2, advantage 1.
    behaviour, proximal = torch.tensor([0.25]).log(), torch.tensor([0.5]).log()
    now = torch.tensor([0.75]).log().requires_grad_()
    one = torch.ones(1)
    weight, _ = correction_weights(proximal, behaviour, one, method="none")
    loss, stats = policy_loss(PPOLoss(), now, proximal, one, one, weights=weight)
    assert loss.item() == near(-2.4)
    assert stats["importance_ratio"].item() == near(1.5)
    # Of a bad action nothing is clipped there: the gradient is weight · ratio.
    loss, _ = policy_loss(PPOLoss(), now, proximal, -one, one, weights=weight)
    loss.sum().backward()
    assert now.grad.item() == near(3.0)


def test_what_is_left_out_does_not_make_the_others_count_more():
    behaviour = torch.zeros(4)
    proximal = torch.tensor([0.0, 0.0, 3.0, 3.0])  # weights 1, 1, 20, 20
    now = proximal.clone().requires_grad_()
    weight, _ = correction_weights(proximal, behaviour, torch.ones(4), method="cap", high=5.0)
    loss, _ = policy_loss(PPOLoss(), now, proximal, torch.ones(4), torch.ones(4), weights=weight)
    aggregate(loss, torch.ones(4), "token_mean", denominator=4.0).backward()
    assert now.grad.tolist() == [-0.25, -0.25, 0, 0]


def test_mismatch_by_hand():
    # Probabilities 1/2 and 1/4 of the sampler, 1/4 and 1/4 of the trainer; the third is not counted.
    behaviour = torch.tensor([0.5, 0.25, 0.3]).log()
    proximal = torch.tensor([0.25, 0.25, 0.9]).log()
    found = mismatch(proximal, behaviour, torch.tensor([1, 1, 0]))
    ratio = 0.5
    assert_near(found["kl_k3"], torch.tensor([ratio - 1 - math.log(ratio), 0, 0]))
    assert_near(found["abs"], torch.tensor([math.log(2), 0, 0]))
    assert_near(found["prob_abs"], torch.tensor([0.25, 0, 0]))
    assert_near(found["weight"], torch.tensor([0.5, 1, 0]))


def test_the_mean_weight_over_the_samplers_own_tokens_is_one():
    """And k3's mean over them is the KL divergence itself: summed over a whole small vocabulary."""
    behaviour, proximal = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.4, 0.1])
    found = mismatch(proximal.log(), behaviour.log(), torch.ones(3))
    assert float((behaviour * found["weight"]).sum()) == near(1.0)
    kl = float((behaviour * (behaviour / proximal).log()).sum())
    assert float((behaviour * found["kl_k3"]).sum()) == near(kl)


@pytest.mark.parametrize(
    ("kl", "limit", "action"),
    [(0.1, None, "train"), (0.1, 0.1, "train"), (0.11, 0.1, "stop"), (math.nan, 0.1, "stop")],
)
def test_a_limit_is_asked_for_what_is_within(kl, limit, action):
    assert judge_mismatch(kl, limit=limit, on_mismatch="stop") == action


def test_what_cannot_be_meant_is_refused():
    x = torch.zeros(2)
    with golden.raises(ConfigError):
        correction_weights(x, x, x, method="icepopp")
    with golden.raises(ConfigError):
        correction_weights(x, x, x, method="icepop", low=2.0, high=1.0)
    with golden.raises(ConfigError):
        correction_weights(x, x, x, method="tis", level="sequences")
    with golden.raises(ConfigError):
        judge_mismatch(2.0, limit=1.0, on_mismatch="panic")
    with golden.raises(DataError):
        correction_weights(x, x[:1], x, method="none")
    with golden.raises(DataError):
        correction_weights(x, x, x, method="tis", level="sequence", high=2.0)


# ---- lags ---------------------------------------------------------------------------------------


def test_lags_by_hand():
    # Trained at version 5. Sequences: prompt, versions 3, 4; nothing of the policy; 5, observation, 5, 0.
    versions = torch.tensor([-1, 3, 4, -1, 5, -1, 5, 0])
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1])
    lags = token_lags(versions, mask, [3, 1, 4], version=5)
    assert lags.lag_N.tolist() == [0, 2, 1, 0, 0, 0, 0, 5]
    assert lags.sequence_B.tolist() == [0, 2]
    assert (lags.oldest_B.tolist(), lags.newest_B.tolist()) == ([2, 5], [1, 0])
    assert tokens_by_lag(lags.lag_N, mask).tolist() == [2, 1, 1, 0, 1]


def test_lags_of_a_mask_that_would_be_broadcast_are_refused():
    with golden.raises(DataError):
        token_lags(torch.zeros(3, dtype=torch.int64), torch.ones(3, 1), [3], version=1)


def test_a_batch_without_tokens_of_the_policy_has_no_lags():
    lags = token_lags(torch.tensor([-1, -1]), torch.zeros(2), [2], version=9)
    assert len(lags.oldest_B) == len(lags.newest_B) == len(lags.sequence_B) == 0


# ---- lengths ------------------------------------------------------------------------------------


def test_the_penalty_of_long_answers_by_hand():
    # Longest 10, over the last 4: none up to 6, a quarter a token, all of it from 10 on.
    lengths = torch.tensor([1, 6, 7, 9, 10, 15])
    found = overlong_penalty(lengths, max_length=10, buffer_length=4, factor=2.0)
    assert found.tolist() == [0, 0, -0.5, -1.5, -2, -2]
    with golden.raises(ConfigError):
        overlong_penalty(lengths, max_length=10, buffer_length=11)


def test_answers_of_negative_advantage_are_left_out_once_they_drifted() -> None:
    """Four answers of 2, 1, 2 and 1 tokens; mean drifts 0.3, 0.3, −0.3 and 0.1 nats."""
    behaviour = torch.zeros(6)
    logprobs = torch.tensor([-0.2, -0.4, -0.3, 0.3, 0.3, -0.1])
    advantages = torch.tensor([-1.0, -1.0, 1.0, -1.0, -1.0, -1.0])
    found = drifted_sequences(logprobs, behaviour, advantages, lengths=[2, 1, 2, 1], delta=0.2)
    assert found.tolist() == [True, True, False, False, False, False]
    never = drifted_sequences(behaviour, behaviour, advantages, lengths=[2, 1, 2, 1], delta=0.0)
    assert not never.any(), "the policy has not moved"
