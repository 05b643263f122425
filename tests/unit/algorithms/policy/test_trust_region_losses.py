"""DPPO, Clip-Cov and KL-Cov: by hand, against loops over tokens, and what holds for all losses."""

from __future__ import annotations

import math

import golden
import pytest
import torch
from near import assert_near, near

from realsys.algorithms.aggregation import aggregate
from realsys.algorithms.policy.policy_loss import policy_loss
from realsys.algorithms.policy.token_losses import PolicyTokens, token_losses
from realsys.api.basics.losses import ClipCovLoss, DPPOLoss, KLCovLoss, PolicyLoss
from realsys.api.errors import DataError
from realsys.data.ragged import pad_packed

TV, KL = DPPOLoss(), DPPOLoss(divergence="kl", delta_low=0.05, delta_high=0.05)
CLIP, PENALTY = ClipCovLoss(eps_clip_higher=0.28), KLCovLoss()
LOSSES = [TV, KL, CLIP, PENALTY]
LENGTHS = [5, 1, 7, 3]


def by_kind(loss: PolicyLoss) -> str:
    return f"{loss.kind} {getattr(loss, 'divergence', '')}"


def batch(seed: int = 0) -> list[torch.Tensor]:
    """Log-probs, those before, advantages, mask, and tokens chosen by covariance."""
    rng = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(16, generator=rng)
    new = (old + 0.6 * torch.randn(16, generator=rng)).clamp(max=-1e-3)
    each = torch.randn(4, generator=rng).repeat_interleave(torch.tensor(LENGTHS))
    mask = torch.rand(16, generator=rng) > 0.2
    return [new, old, each, mask, torch.rand(16, generator=rng) > 0.6]


# ---- by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "old", "new", "advantage", "held"),
    [
        (TV, 0.5, 0.75, 1.0, True),  # moved by 0.25 towards where the advantage pulls
        (TV, 0.5, 0.75, -1.0, False),  # … away from where it pulls: it may come back
        (TV, 0.5, 0.25, -1.0, True),
        (TV, 0.5, 0.65, 1.0, False),
        (TV, 0.001, 0.1, 1.0, False),  # a ratio of 100, and next to nothing moved
        (KL, 0.5, 0.7, 1.0, True),  # 0.5 ln (5/7) + 0.5 ln (5/3) = 0.0872
        (KL, 0.5, 0.6, 1.0, False),  # 0.0204
    ],
)
def test_a_token_is_held_where_it_left_the_trust_region(
    loss: DPPOLoss, old: float, new: float, advantage: float, held: bool
) -> None:
    logprobs = torch.tensor([math.log(new)], requires_grad=True)
    made, stats = policy_loss(
        loss,
        logprobs,
        torch.tensor([math.log(old)]),
        torch.tensor([advantage]),
        torch.ones(1),
    )
    made.sum().backward()
    assert logprobs.grad is not None
    assert stats["clip_fraction"].item() == held
    assert logprobs.grad.item() == near(0.0 if held else -advantage * new / old)
    assert made.item() == near(0.0 if held else -advantage * new / old)


def test_chosen_tokens_are_left_out_or_penalised() -> None:
    logprobs = torch.tensor([0.1, 0.1], requires_grad=True)
    zeros, ones, chosen = torch.zeros(2), torch.ones(2), torch.tensor([True, False])
    r = math.exp(0.1)
    left_out, stats = policy_loss(CLIP, logprobs, zeros, ones, ones, chosen=chosen)
    assert left_out.tolist() == near([0.0, -r])
    assert stats["clip_fraction"].tolist() == [1.0, 0.0]
    penalised, _ = policy_loss(PENALTY, logprobs, zeros, ones, ones, chosen=chosen)
    assert penalised.tolist() == near([-r + 0.1, -r])


def test_a_loss_by_covariance_needs_the_choice() -> None:
    with golden.raises(DataError):
        policy_loss(CLIP, *[torch.zeros(2)] * 3, torch.ones(2))


# ---- against loops over tokens ------------------------------------------------------------------


def slow(loss: PolicyLoss, new: float, old: float, a: float, chosen: bool) -> float:
    r = math.exp(new - old)
    if isinstance(loss, DPPOLoss):
        p, q = math.exp(new), math.exp(old)
        apart = abs(p - q)
        if loss.divergence == "kl":
            apart = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        out = (a > 0 and r > 1 and apart > loss.delta_high) or (
            a < 0 and r < 1 and apart > loss.delta_low
        )
        return 0.0 if out else -a * r
    if isinstance(loss, ClipCovLoss):
        bounded = min(max(r, 1 - loss.eps_clip), 1 + (loss.eps_clip_higher or loss.eps_clip))
        return 0.0 if chosen else max(-a * r, -a * bounded)
    assert isinstance(loss, KLCovLoss)
    return -a * r + (loss.coef * abs(new - old) if chosen else 0.0)


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
@pytest.mark.parametrize("seed", range(10))
def test_it_agrees_with_a_loop(loss: PolicyLoss, seed: int) -> None:
    new, old, advantages, mask, chosen = batch(seed)
    found, _ = policy_loss(loss, new, old, advantages, mask, chosen=chosen)
    rows = zip(*(x.tolist() for x in (new, old, advantages, chosen, mask)), strict=True)
    wanted = [slow(loss, *row[:4]) if row[4] else 0.0 for row in rows]
    assert_near(found, torch.tensor(wanted))


# ---- what holds for all ---------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
def test_at_step_0_the_gradient_is_the_plain_policy_gradient(loss: PolicyLoss) -> None:
    new, _, advantages, mask, chosen = batch()
    logprobs = new.clone().requires_grad_()
    found, stats = policy_loss(loss, logprobs, new, advantages, mask, chosen=chosen)
    found.sum().backward()
    assert logprobs.grad is not None
    counted = mask & ~chosen if isinstance(loss, ClipCovLoss) else mask
    assert_near(logprobs.grad, -advantages * counted)
    assert torch.equal(stats["importance_ratio"], mask.float())


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
def test_neither_cut_nor_padding_changes_value_or_gradient(loss: PolicyLoss) -> None:
    new, *others = batch()
    count = float(others[2].sum())

    def made(cuts: list[list[int]], *, padded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, total = new.clone().requires_grad_(), torch.zeros(())
        pieces = [torch.split(x, LENGTHS) for x in (logprobs, *others)]
        for cut in cuts:
            own = [LENGTHS[i] for i in cut]
            tensors = [torch.cat([piece[i] for i in cut]) for piece in pieces]
            if padded:
                tensors = [pad_packed(x, own) for x in tensors]
            losses, _ = policy_loss(loss, *tensors[:4], chosen=tensors[4])
            total = total + aggregate(losses, tensors[3], "token_mean", denominator=count)
        total.backward()
        assert logprobs.grad is not None
        return total.detach(), logprobs.grad

    whole = made([[0, 1, 2, 3]])
    for cuts in ([[3, 2, 1, 0]], [[0, 2], [1, 3]], [[3], [2], [1], [0]]):
        assert_near(made(cuts), whole)
    assert_near(made([[0, 1, 2, 3]], padded=True), whole)


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
def test_garbage_outside_the_mask_reaches_nothing(loss: PolicyLoss) -> None:
    new, old, advantages, mask, chosen = batch()
    wanted, _ = policy_loss(loss, new, old, advantages, mask, chosen=chosen)
    logprobs = new.masked_fill(~mask, math.nan).requires_grad_()
    junk = advantages.masked_fill(~mask, math.inf)
    found, _ = policy_loss(loss, logprobs, old, junk, mask, chosen=chosen | ~mask)
    found.sum().backward()
    assert torch.equal(found, wanted)
    assert logprobs.grad is not None
    assert logprobs.grad[~mask].count_nonzero() == 0
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
def test_the_gradient_is_that_of_the_value(loss: PolicyLoss) -> None:
    """In float64, by finite differences; what is held is constant around the point."""
    _, old, advantages, mask, chosen = batch()
    old, advantages = old.double() - 0.5, advantages.double()
    rng = torch.Generator().manual_seed(7)

    def value(log_ratio: torch.Tensor) -> torch.Tensor:
        ratio = log_ratio.masked_fill(~mask, 0.0)
        tokens = PolicyTokens(old + ratio, ratio, advantages, mask, None, chosen & mask)
        return token_losses(loss, tokens).losses.masked_fill(~mask, 0.0).sum()

    log_ratio = (0.4 * torch.randn(16, generator=rng, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(value, log_ratio, eps=1e-7, atol=1e-6)
