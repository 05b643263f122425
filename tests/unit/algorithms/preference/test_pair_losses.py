"""Losses of pairs by name: worked by hand, against loops over pairs, and what holds for all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import golden
import pytest
import torch
from near import assert_near, near

from realsys.algorithms.preference.pair_losses import (
    PairLogprobs,
    PairLosses,
    kl_estimate_of,
    mean_log_ratio,
    pair_logprobs,
    pair_losses,
)
from realsys.api import registry
from realsys.api.basics.choice import kind_named
from realsys.api.basics.preference_losses import (
    DPOLoss,
    IPOLoss,
    KTOLoss,
    PairLoss,
    SimPOLoss,
)
from realsys.api.errors import ConfigError, DataError, UnknownName

DPO, IPO, KTO, SIMPO = DPOLoss(), IPOLoss(), KTOLoss(), SimPOLoss()
LOSSES = [
    DPO,
    DPOLoss(beta=0.5, label_smoothing=0.1),
    IPO,
    KTO,
    KTOLoss(beta=0.3, desirable_weight=1.3, undesirable_weight=0.7),
    SIMPO,
    SimPOLoss(beta=2.5, gamma=0.0),
]


def by_kind(loss: PairLoss) -> str:
    return loss.kind


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def of_pair(
    chosen: float,
    rejected: float,
    ref_chosen: float = 0.0,
    ref_rejected: float = 0.0,
    *,
    lengths: tuple[int, int] = (1, 1),
    kl_estimate: float = 0.0,
) -> PairLogprobs:
    """One pair, float64, with a gradient for the policy's log-probs."""
    new = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (chosen, rejected)]
    rest = [
        torch.tensor([float(x)], dtype=torch.float64) for x in (ref_chosen, ref_rejected, *lengths)
    ]
    return PairLogprobs(*new, *rest, kl_estimate=torch.tensor(kl_estimate, dtype=torch.float64))


def value_and_slopes(loss: PairLoss, pairs: PairLogprobs) -> list[float]:
    """The sum of losses, and its derivatives by the chosen and the rejected log-prob of one pair."""
    made = pair_losses(loss, pairs).losses.sum()
    slopes = torch.autograd.grad(made, (pairs.chosen, pairs.rejected))
    return [float(made.detach()), *(float(slope) for slope in slopes)]


# ---- by hand ------------------------------------------------------------------------------------


def test_dpo_by_hand() -> None:
    # log-ratios 4 and -2: h = 0.1 · 6 = 0.6, -log σ(0.6) = 0.437488; slope -0.1 · σ(-0.6) = -0.0354344
    pairs = of_pair(-6.0, -12.0, -10.0, -10.0)
    assert value_and_slopes(DPO, pairs) == near([0.437488, -0.0354344, 0.0354344])
    made = pair_losses(DPO, pairs)
    assert made.chosen_rewards.tolist() == near([0.4])
    assert made.rejected_rewards.tolist() == near([-0.2])
    # with ε = 0.25: 0.437488 + 0.25 · 0.6, since -log σ(-h) = h - log σ(h)
    smooth = DPOLoss(label_smoothing=0.25)
    slope = -0.1 * (0.75 * sigmoid(-0.6) - 0.25 * sigmoid(0.6))
    found = value_and_slopes(smooth, pairs)
    assert found == near([0.587488, slope, -slope])


def test_conservative_dpo_is_smallest_where_the_odds_are_those_of_the_labels() -> None:
    best = math.log(0.8 / 0.2) / 0.1  # σ(h) = 1 - ε
    _, slope, _ = value_and_slopes(DPOLoss(label_smoothing=0.2), of_pair(best, 0.0))
    assert slope == pytest.approx(0.0, abs=1e-12)


def test_ipo_by_hand() -> None:
    # log-ratios differ by 6, and are to differ by 1 / (2 · 0.25) = 2: (6 - 2)² = 16, slope 8
    pairs = of_pair(-6.0, -12.0, -10.0, -10.0, lengths=(3, 5))  # lengths change nothing
    assert value_and_slopes(IPOLoss(tau=0.25), pairs) == near([16.0, 8.0, -8.0])
    assert value_and_slopes(IPO, of_pair(5.0, 0.0)) == near([0.0, 0.0, 0.0])


def test_kto_by_hand() -> None:
    # z₀ = 1, log-ratios 4 and -2, β = 0.5: chosen 1 - σ(1.5), rejected 1.2 · (1 - σ(1.5)), and half of both
    pairs = of_pair(-6.0, -12.0, -10.0, -10.0, kl_estimate=1.0)
    gone = sigmoid(-1.5)  # 0.182426
    slope = 0.5 * gone * (1 - gone) / 2
    assert value_and_slopes(KTOLoss(beta=0.5, undesirable_weight=1.2), pairs) == near(
        [2.2 * gone / 2, -slope, 1.2 * slope]
    )


def test_simpo_by_hand() -> None:
    # means -6/3 = -2 and -12/4 = -3: 2 · 1 - 0.5 = 1.5, -log σ(1.5) = 0.201413; slopes over lengths
    pairs = of_pair(-6.0, -12.0, -99.0, 99.0, lengths=(3, 4))  # the reference changes nothing
    gone = sigmoid(-1.5)
    assert value_and_slopes(SIMPO, pairs) == near([0.201413, -2 * gone / 3, 2 * gone / 4])
    made = pair_losses(SIMPO, pairs)
    assert [made.chosen_rewards.tolist(), made.rejected_rewards.tolist()] == [[-4.0], [-6.0]]


def test_the_kl_estimate_by_hand() -> None:
    pairs = of_pair(-6.0, -12.0, -10.0, -10.0)  # log-ratios 4 and -2
    mean = mean_log_ratio(pairs)
    assert (float(mean), mean.requires_grad) == (1.0, False)
    assert [kl_estimate_of(x) for x in (1.0, -3.0, 0.0, math.nan)] == [1.0, 0.0, 0.0, 0.0]


# ---- where policy and reference agree -------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        (DPO, math.log(2)),
        (DPOLoss(label_smoothing=0.3), math.log(2)),
        (IPO, 25.0),  # (1 / (2 · 0.1))²
        (KTO, 0.5),
        (KTOLoss(desirable_weight=1.5, undesirable_weight=0.5), 0.5),
    ],
)
def test_of_the_reference_itself(loss: PairLoss, value: float) -> None:
    pairs = of_pair(-7.0, -3.0, -7.0, -3.0)
    found, chosen, rejected = value_and_slopes(loss, pairs)
    assert found == near(value)
    assert chosen < 0 < rejected  # chosen answers become more likely, rejected ones less
    made = pair_losses(loss, pairs)
    assert made.chosen_rewards.tolist() == made.rejected_rewards.tolist() == [0.0]


def test_the_first_gradient_of_dpo_is_half_of_beta() -> None:
    assert value_and_slopes(DPO, of_pair(-7.0, -3.0, -7.0, -3.0))[1:] == near([-0.05, 0.05])


# ---- against loops over pairs and tokens -----------------------------------------------------------


def batch(seed: int = 0) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Lengths of ten answers, and log-probs of their tokens by policy and reference, float64."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (10,), generator=rng).tolist()
    ref = -3 * torch.rand(sum(lengths), generator=rng, dtype=torch.float64)
    new = ref + torch.randn(sum(lengths), generator=rng, dtype=torch.float64)
    return lengths, new, ref


def slow(loss: PairLoss, new: list[list[float]], ref: list[list[float]], z0: float) -> float:
    """The loss of one pair."""
    w, l = (sum(x) - sum(y) for x, y in zip(new, ref, strict=True))  # noqa: E741
    if isinstance(loss, DPOLoss):
        h, e = loss.beta * (w - l), loss.label_smoothing
        return -(1 - e) * math.log(sigmoid(h)) - e * math.log(sigmoid(-h))
    if isinstance(loss, IPOLoss):
        return (w - l - 0.5 / loss.tau) ** 2
    if isinstance(loss, KTOLoss):
        good = loss.desirable_weight * (1 - sigmoid(loss.beta * (w - z0)))
        bad = loss.undesirable_weight * (1 - sigmoid(loss.beta * (z0 - l)))
        return (good + bad) / 2
    assert isinstance(loss, SimPOLoss)
    means = [sum(x) / len(x) for x in new]
    return -math.log(sigmoid(loss.beta * (means[0] - means[1]) - loss.gamma))


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_a_loop(loss: PairLoss, seed: int) -> None:
    lengths, new, ref = batch(seed)
    by_answer = [[x.tolist() for x in torch.split(side, lengths)] for side in (new, ref)]
    gaps = [sum(x) - sum(y) for x, y in zip(*by_answer, strict=True)]
    z0 = max(0.0, sum(gaps) / 10)
    pairs = pair_logprobs(new, ref, lengths, kl_estimate=z0)
    assert float(mean_log_ratio(pairs)) == near(sum(gaps) / 10)
    wanted = [
        slow(loss, by_answer[0][i : i + 2], by_answer[1][i : i + 2], z0) for i in range(0, 10, 2)
    ]
    assert pair_losses(loss, pairs).losses.tolist() == near(wanted)


# ---- what holds for all -------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
def test_the_gradient_is_that_of_the_value(loss: PairLoss) -> None:
    """In float64, by finite differences, through the sums over tokens."""
    lengths, new, ref = batch()

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        return pair_losses(loss, pair_logprobs(logprobs, ref, lengths, kl_estimate=0.4)).losses

    assert torch.autograd.gradcheck(value, new.requires_grad_())


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
@pytest.mark.parametrize(
    "cuts", [[[4, 2, 0, 1, 3]], [[0, 1], [2, 3, 4]], [[0], [1], [2], [3], [4]]]
)
def test_neither_cut_nor_order_changes_value_or_gradient(
    loss: PairLoss, cuts: list[list[int]]
) -> None:
    def found(cuts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        lengths, new, ref = batch()
        new.requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        parts = [torch.split(x, lengths) for x in (new, ref)]
        for cut in cuts:
            answers = [i for pair in cut for i in (2 * pair, 2 * pair + 1)]
            own = [torch.cat([part[i] for i in answers]) for part in parts]
            pairs = pair_logprobs(*own, [lengths[i] for i in answers], kl_estimate=0.4)
            total = total + pair_losses(loss, pairs).losses.sum() / 5
        total.backward()
        assert new.grad is not None
        return total.detach(), new.grad

    assert_near(found(cuts), found([[0, 1, 2, 3, 4]]))


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
def test_far_from_the_reference_it_stays_finite(loss: PairLoss) -> None:
    for far in (-1e4, 1e4):
        pairs = [x.float() for x in (torch.tensor([far]), torch.tensor([-far]))]
        new = [x.requires_grad_() for x in pairs]
        some, one = torch.zeros(1), torch.ones(1)
        made = pair_losses(loss, PairLogprobs(*new, some, some, one, one, torch.tensor(0.0))).losses
        made.sum().backward()
        assert made.isfinite().all()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in new)


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
def test_the_reference_and_the_estimate_get_no_gradient(loss: PairLoss) -> None:
    lengths, new, ref = batch()
    ref.requires_grad_()
    pairs = replace(
        pair_logprobs(new.requires_grad_(), ref, lengths),
        kl_estimate=torch.tensor(0.4, dtype=torch.float64, requires_grad=True),
    )
    pair_losses(loss, pairs).losses.sum().backward()
    assert new.grad is not None
    assert (ref.grad, pairs.kl_estimate.grad) == (None, None)


def test_answers_that_are_no_pairs_are_refused() -> None:
    with golden.raises(DataError):
        pair_logprobs(torch.zeros(3), None, [1, 1, 1])
    with golden.raises(DataError):
        pair_logprobs(torch.zeros(3), None, [3, 0])
    with golden.raises(DataError):
        pair_logprobs(torch.zeros(3), None, [3, 1])


# ---- names ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Milder(DPOLoss):
    """Inherits a built-in kind's formula."""

    kind = "milder"
    beta: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Hinge(Milder):
    """SLiC's hinge (arXiv:2305.10425), as a user would write it."""

    kind = "hinge"

    def pair_losses(self, pairs: PairLogprobs) -> PairLosses:
        chosen, rejected = pairs.chosen, pairs.rejected
        return PairLosses((1 - chosen + rejected).relu(), chosen, rejected)


def test_a_kind_that_inherits_has_the_formula_of_its_base_or_its_own() -> None:
    pairs = of_pair(-6.0, -12.0, -10.0, -10.0)
    assert value_and_slopes(Milder(), pairs) == value_and_slopes(DPOLoss(beta=0.01), pairs)
    assert value_and_slopes(Hinge(), of_pair(-2.0, -2.5)) == [0.5, -1.0, 1.0]


def test_a_kind_without_a_formula_says_so() -> None:
    class Nothing(PairLoss):
        kind = "nothing"

    with golden.raises(NotImplementedError):
        pair_losses(Nothing(), of_pair(0.0, 0.0))


@pytest.mark.parametrize("made", [[0.0], torch.zeros(1), PairLosses(*[torch.zeros(())] * 3)])
def test_a_kind_that_returns_nonsense_is_named(made: Any) -> None:
    class Odd(PairLoss):
        kind = "odd"

        def pair_losses(self, pairs: PairLogprobs) -> PairLosses:
            return made

    with golden.raises(ConfigError) as found:
        pair_losses(Odd(), of_pair(0.0, 0.0))
    assert "class Odd" in found.value.where


def test_losses_have_names() -> None:
    assert {name: kind_named(PairLoss, name) for name in registry.names("pair_loss")} == {
        loss.kind: type(loss) for loss in (DPO, IPO, KTO, SIMPO)
    }
    with golden.raises(UnknownName):
        kind_named(PairLoss, "orpo")
