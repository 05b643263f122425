"""Losses by name: worked by hand, against loops over tokens, and what holds for all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import golden
import pytest
import torch
from near import assert_near, near

from realsys.algorithms.aggregation import aggregate, aggregation_weight
from realsys.algorithms.policy.policy_loss import policy_loss
from realsys.algorithms.policy.token_losses import PolicyTokens, TokenLosses, token_losses
from realsys.api.basics.losses import (
    CISPOLoss,
    GSPOLoss,
    PolicyLoss,
    PPOLoss,
    SAPOLoss,
)
from realsys.api.errors import ConfigError
from realsys.data.ragged import pad_packed

PPO, GSPO, CISPO, SAPO = PPOLoss(), GSPOLoss(), CISPOLoss(), SAPOLoss()
LOSSES = [PPO, PPOLoss(eps_clip_higher=0.28, c_clip=3.0), GSPO, CISPO, SAPO]
MODES = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
OLD = -1.0


def by_kind(loss: PolicyLoss) -> str:
    return loss.kind


def one_sequence(
    loss: PolicyLoss, ratios: list[float], advantage: float
) -> tuple[list[float], list[bool], list[float]]:
    """Losses, what was clipped and d (sum of losses) / d logprob of one sequence's tokens."""
    old = torch.full((len(ratios),), OLD)
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    some = torch.ones(len(ratios))
    made, stats = policy_loss(loss, logprobs, old, advantage * some, some, lengths=[len(ratios)])
    made.sum().backward()
    assert logprobs.grad is not None
    return made.tolist(), stats["clip_fraction"].bool().tolist(), logprobs.grad.tolist()


# ---- by hand ----------------------------------------------------------------------------------

S = math.sqrt(1.1 * 0.9)  # the ratio of a sequence with ratios 1.1 and 0.9: 0.99499


@pytest.mark.parametrize(
    ("advantage", "losses", "clipped", "gradient"),
    [
        (2.0, -2 * S, False, -2 * S),  # a good answer that has become less likely is never clipped
        (-2.0, 2 * (1 - 3e-4), True, 0.0),  # a bad one is, below 0.9997
    ],
)
def test_gspo_by_hand(advantage: float, losses: float, clipped: bool, gradient: float) -> None:
    found = one_sequence(GSPO, [1.1, 0.9], advantage)
    assert found[0] == near([losses] * 2)
    assert found[1] == [clipped] * 2
    assert found[2] == near([gradient] * 2)


def test_gspo_has_two_ranges() -> None:
    above = [math.exp(3.5e-4)] * 3  # within 4e-4, not within 3e-4
    assert one_sequence(GSPO, above, 1.0)[1] == [False] * 3
    assert one_sequence(replace(GSPO, eps_clip_higher=None), above, 1.0)[1] == [True] * 3


def test_cispo_by_hand() -> None:
    # weights 0.5, 2, and 8 held at 5; the loss is -w · A · log π, its gradient -w · A: none is 0
    losses, clipped, gradient = one_sequence(CISPO, [0.5, 2.0, 8.0], 3.0)
    logprobs = [OLD + math.log(r) for r in (0.5, 2.0, 8.0)]
    assert losses == near([-w * 3 * x for w, x in zip((0.5, 2, 5), logprobs, strict=True)])
    assert clipped == [False, False, True]
    assert gradient == near([-1.5, -6.0, -15.0])
    low = one_sequence(replace(CISPO, ratio_low=0.8), [0.5, 2.0], -1.0)
    assert low[1:] == ([True, False], near([0.8, 2.0]))


def test_sapo_by_hand() -> None:
    # σ(1) = 0.73106, of a ratio of 2: the gradient is -A · 4 · σ (1 - σ) · r
    gate = 1 / (1 + math.exp(-1.0))
    losses, clipped, gradient = one_sequence(SAPO, [2.0], 1.0)
    assert (losses, clipped) == ([near(-4 * gate)], [False])
    assert gradient == [near(-4 * gate * (1 - gate) * 2)]
    bad = 1 / (1 + math.exp(-1.05))
    losses, _, gradient = one_sequence(SAPO, [2.0], -1.0)
    assert losses == [near(4 / 1.05 * bad)]
    assert gradient == [near(4 * bad * (1 - bad) * 2)]


# ---- against loops over tokens ------------------------------------------------------------------


def slow(loss: PolicyLoss, new: list[float], old: list[float], a: float) -> list[float]:
    """Losses of one sequence."""
    ratios = [math.exp(x - y) for x, y in zip(new, old, strict=True)]
    if isinstance(loss, GSPOLoss):
        ratios = [math.exp(fmean(x - y for x, y in zip(new, old, strict=True)))] * len(new)
    if isinstance(loss, CISPOLoss):
        weights = [min(max(r, loss.ratio_low), loss.ratio_high) for r in ratios]
        return [-w * a * x for w, x in zip(weights, new, strict=True)]
    if isinstance(loss, SAPOLoss):
        tau = loss.tau_positive if a > 0 else loss.tau_negative
        return [-a * 4 / tau / (1 + math.exp(-tau * (r - 1))) for r in ratios]
    assert isinstance(loss, PPOLoss | GSPOLoss)
    low, high = 1 - loss.eps_clip, 1 + (loss.eps_clip_higher or loss.eps_clip)
    found = [-min(r * a, min(max(r, low), high) * a) for r in ratios]
    dual = getattr(loss, "c_clip", None)
    return [min(x, -dual * a) for x in found] if dual is not None and a < 0 else found


def batch(seed: int = 0) -> tuple[list[int], list[torch.Tensor]]:
    """Sequences of unequal lengths: log-probs, those before, an advantage each, and a mask."""
    rng = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 7, 3]
    old = -3 * torch.rand(16, generator=rng)
    new = old + 0.5 * torch.randn(16, generator=rng)
    each = torch.randn(4, generator=rng).repeat_interleave(torch.tensor(lengths))
    mask = torch.rand(16, generator=rng) > 0.2
    mask[5] = True  # the sequence of one token
    return lengths, [new, old, each, mask]


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_a_loop(loss: PolicyLoss, seed: int) -> None:
    lengths, tensors = batch(seed)
    found, _ = policy_loss(loss, *tensors, lengths=lengths)
    wanted = []
    for new, old, a, mask in zip(*(torch.split(x, lengths) for x in tensors), strict=True):
        of_loop = iter(slow(loss, new[mask].tolist(), old[mask].tolist(), float(a[0])))
        wanted += [next(of_loop) if m else 0.0 for m in mask]
    assert_near(found, torch.tensor(wanted))


@dataclass(frozen=True, kw_only=True)
class Narrower(PPOLoss):
    """Inherits a built-in kind's formula."""

    kind = "narrower"
    eps_clip: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Plain(Narrower):
    """Has a formula of its own."""

    kind = "plain"

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        return TokenLosses(-tokens.advantages * tokens.logprobs, tokens.mask)


def test_a_kind_that_inherits_has_the_formula_of_its_base_or_its_own() -> None:
    assert one_sequence(Narrower(), [1.5], 1.0) == one_sequence(PPOLoss(eps_clip=0.1), [1.5], 1.0)
    losses, clipped, gradient = one_sequence(Plain(), [1.5], 2.0)
    assert losses == [near(-2 * (OLD + math.log(1.5)))]
    assert (clipped, gradient) == ([True], [-2.0])


@pytest.mark.parametrize("made", [[1.0], torch.zeros(()), torch.zeros(3)])
def test_a_kind_that_returns_nonsense_is_named(made: Any) -> None:
    class Odd(PolicyLoss):
        kind = "odd"

        def token_losses(self, tokens: PolicyTokens) -> Any:
            return (
                made if made is not None and getattr(made, "ndim", 0) else TokenLosses(made, made)
            )

    with golden.raises(ConfigError) as found:
        one_sequence(Odd(), [1.5, 1.0], 1.0)
    assert "class Odd" in found.value.where


# ---- what holds for all ---------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
def test_at_step_0_the_gradient_is_the_plain_policy_gradient(loss: PolicyLoss) -> None:
    lengths, (new, _, advantages, mask) = batch()
    logprobs = new.clone().requires_grad_()
    found, stats = policy_loss(loss, logprobs, new, advantages, mask, lengths=lengths)
    found.sum().backward()
    assert logprobs.grad is not None
    assert_near(logprobs.grad, -advantages * mask)
    assert torch.equal(stats["importance_ratio"], mask.float())
    assert stats["clip_fraction"].sum() == 0


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
def test_without_an_advantage_there_is_no_gradient(loss: PolicyLoss) -> None:
    """So that a minibatch without any makes no optimizer step (PolicyObjective.has_gradient)."""
    lengths, (new, old, advantages, mask) = batch()
    advantages[:5] = 0.0
    logprobs = new.clone().requires_grad_()
    policy_loss(loss, logprobs, old, advantages, mask, lengths=lengths)[0].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[:5].count_nonzero() == 0
    assert logprobs.grad[5:].count_nonzero() > 0


def test_gspo_of_one_token_is_ppo_bit_for_bit() -> None:
    lengths, (new, old, advantages, _) = [1] * 16, batch()[1]
    sequence, token = GSPOLoss(eps_clip=0.2, eps_clip_higher=0.28), PPOLoss()
    results = []
    for loss in (sequence, replace(token, eps_clip_higher=0.28)):
        logprobs = new.clone().requires_grad_()
        found, stats = policy_loss(loss, logprobs, old, advantages, torch.ones(16), lengths=lengths)
        found.sum().backward()
        results.append((found, logprobs.grad, stats["clip_fraction"]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def value_and_gradient(
    loss: PolicyLoss, mode: str, cuts: list[list[int]], *, padded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a whole batch, computed in micro-batches of these sequences."""
    lengths, (new, *others) = batch()
    logprobs = new.clone().requires_grad_()
    pieces = [torch.split(x, lengths) for x in (logprobs, *others)]
    weight, total = 0.0, torch.zeros(())
    micro = []
    for cut in cuts:
        own = [lengths[i] for i in cut]
        tensors = [torch.cat([piece[i] for i in cut]) for piece in pieces]
        if padded:
            tensors = [pad_packed(x, own) for x in tensors]
        where = {"lengths": None if padded else own}
        micro.append((tensors, where))
        weight += aggregation_weight(tensors[3], mode, norm_length=9, **where)  # type: ignore[arg-type]
    for tensors, where in micro:
        made, _ = policy_loss(loss, *tensors, **where)  # type: ignore[arg-type]
        total = total + aggregate(made, tensors[3], mode, denominator=weight, **where)  # type: ignore[arg-type]
    total.backward()
    assert logprobs.grad is not None
    return total.detach(), logprobs.grad


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
@pytest.mark.parametrize("mode", MODES)
def test_neither_cut_nor_order_nor_padding_changes_value_or_gradient(
    loss: PolicyLoss, mode: str
) -> None:
    whole = value_and_gradient(loss, mode, [[0, 1, 2, 3]])
    for cuts in ([[3, 2, 1, 0]], [[0, 2], [1, 3]], [[3], [2], [1], [0]]):
        assert_near(value_and_gradient(loss, mode, cuts), whole)
    assert_near(value_and_gradient(loss, mode, [[0, 1, 2, 3]], padded=True), whole)


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
def test_garbage_outside_the_mask_reaches_nothing(loss: PolicyLoss) -> None:
    lengths, (new, old, advantages, mask) = batch()
    wanted, _ = policy_loss(loss, new, old, advantages, mask, lengths=lengths)
    logprobs = new.masked_fill(~mask, math.nan).requires_grad_()
    found, stats = policy_loss(
        loss,
        logprobs,
        old.masked_fill(~mask, math.inf),
        advantages.masked_fill(~mask, math.nan),
        mask,
        lengths=lengths,
    )
    found.sum().backward()
    assert torch.equal(found, wanted)
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad.isfinite(), torch.ones(16, dtype=torch.bool))
    assert all(x[~mask].count_nonzero() == 0 for x in stats.values())


@pytest.mark.parametrize("loss", [PPO, LOSSES[1], GSPO, SAPO], ids=by_kind)
def test_the_gradient_is_that_of_the_value(loss: PolicyLoss) -> None:
    """In float64, by finite differences, of the mean over each sequence's tokens.

    GSPO's tokens have the value of their sequence and the gradient of their own: the same in the mean.
    """
    lengths, (_, old, advantages, mask) = batch()
    advantages, off = advantages.double(), ~mask
    rng = torch.Generator().manual_seed(7)

    def value(log_ratio: torch.Tensor) -> torch.Tensor:
        ratio = log_ratio.masked_fill(off, 0.0)
        tokens = PolicyTokens(old.double() + ratio, ratio, advantages, mask, tuple(lengths))
        made = token_losses(loss, tokens).losses.masked_fill(off, 0.0)
        return (made * tokens_of_a_mean).sum()

    counts = [float(piece.sum()) for piece in torch.split(mask, lengths)]
    tokens_of_a_mean = torch.tensor(
        [1 / n for n, m in zip(counts, lengths, strict=True) for _ in range(m)]
    )
    wide = 1e-4 if isinstance(loss, GSPOLoss) else 0.5  # inside and outside of the range
    log_ratio = (wide * torch.randn(16, generator=rng, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(value, log_ratio, eps=1e-7, atol=1e-6)


def test_the_gradient_of_cispo_is_that_of_a_weighted_log_likelihood() -> None:
    lengths, (new, old, advantages, mask) = batch()
    constant = (new - old).double().masked_fill(~mask, 0.0)
    advantages = advantages.double()

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        tokens = PolicyTokens(logprobs, constant, advantages, mask, tuple(lengths))
        return token_losses(CISPO, tokens).losses.sum()

    assert torch.autograd.gradcheck(value, new.double().requires_grad_())
