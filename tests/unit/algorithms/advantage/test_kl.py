import math

import golden
import pytest
import torch
from near import assert_near, near

from realsys.algorithms.advantage.kl import (
    AdaptiveKLController,
    FixedKLController,
    kl_estimate,
    kl_loss,
    kl_penalised_rewards,
    sequence_kl,
)
from realsys.api.errors import CheckpointError, ConfigError, DataError

ESTIMATORS = ["k1", "k2", "k3", "abs", "k1+", "k3+"]
LN2 = math.log(2.0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # d = ln 2 and -ln 2; k3: 1/2 - 1 + ln 2 and 2 - 1 - ln 2
        ("k1", [LN2, -LN2]),
        ("k2", [LN2**2 / 2, LN2**2 / 2]),
        ("k3", [LN2 - 0.5, 1.0 - LN2]),
        ("abs", [LN2, LN2]),
        ("k1+", [LN2, -LN2]),
        ("k3+", [LN2 - 0.5, 1.0 - LN2]),
    ],
)
def test_estimators_by_hand(estimator, expected):
    logprobs = torch.tensor([-1.0, -1.0])
    ref = torch.tensor([-1.0 - LN2, -1.0 + LN2])
    assert_near(kl_estimate(logprobs, ref, estimator), torch.tensor(expected))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_have_no_kl(estimator):
    logprobs = torch.tensor([-0.1, -3.7])
    assert kl_estimate(logprobs, logprobs.clone(), estimator).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    [("k1", 1.0), ("k2", LN2), ("k3", 0.5), ("k1+", LN2), ("k3+", LN2)],
)
def test_plus_estimators_have_the_gradient_of_k2(estimator, gradient):
    # at d = ln 2: k1 1, k2 d, k3 1 - exp(-d) = 1/2
    logprobs = torch.tensor([-1.0], requires_grad=True)
    kl_estimate(logprobs, torch.tensor([-1.0 - LN2]), estimator).sum().backward()
    assert_near(logprobs.grad, torch.tensor([gradient]))


def test_k3_is_bounded_and_k1_is_not():
    logprobs, ref = torch.tensor([-100.0, 0.0]), torch.tensor([0.0, -100.0])
    # d = -100 → -20: e^20 - 21 → 10; d = 100 → 20: e^-20 + 19 → 10
    assert kl_estimate(logprobs, ref, "k3").tolist() == [10.0, 10.0]
    assert kl_estimate(logprobs, ref, "k1").tolist() == [-100.0, 100.0]


def test_mean_of_the_estimates_is_the_kl():
    policy, ref = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    # exact: 1/2 ln 2 + 0 - 1/4 ln 2
    for estimator in ("k1", "k3"):
        mean = (policy * kl_estimate(policy.log(), ref.log(), estimator)).sum()
        assert_near(mean, torch.tensor(0.25 * LN2))


def test_an_unknown_estimator_is_refused():
    with golden.raises(ConfigError):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_sequence_kl_is_a_sum_over_the_masked_tokens():
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0]])
    ref = torch.tensor([[-1.5, -4.0, 0.0], [-1.0, -0.5, -1.25]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert sequence_kl(logprobs, ref, mask).tolist() == [2.5, -0.25]


def rewards(**options):
    """Two sequences: three tokens and one padded, two tokens with a tool's token between."""
    logprobs = torch.tensor([[-1.0, -1.0, -1.0, 5.0], [-1.0, 5.0, -1.0, float("nan")]])
    ref = torch.tensor([[-1.5, -1.0, -0.5, 0.0], [-2.0, 0.0, -2.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0]])
    score = torch.tensor([8.0, -8.0])
    return kl_penalised_rewards(score, logprobs, ref, mask, **{"kl_coef": 0.5, **options}).tolist()


def test_the_score_is_paid_on_the_last_token_of_the_policy():
    # k1: 1/2, 0, -1/2 | 1, -, 1
    assert rewards() == [[-0.25, 0.0, 8.25, 0.0], [-0.5, 0.0, -8.5, 0.0]]
    assert rewards(kl_coef=0.0) == [[0.0, 0.0, 8.0, 0.0], [0.0, 0.0, -8.0, 0.0]]


def test_the_score_is_clipped_before_the_penalty():
    assert rewards(score_clip=5.0) == [[-0.25, 0.0, 5.25, 0.0], [-0.5, 0.0, -5.5, 0.0]]


def test_truncated_answers_may_go_without_a_score():
    cut = {"score_on_truncated": False, "truncated_B": torch.tensor([True, False])}
    assert rewards(**cut) == [[-0.25, 0.0, 0.25, 0.0], [-0.5, 0.0, -8.5, 0.0]]
    kept = {"score_on_truncated": True, "truncated_B": torch.tensor([True, False])}
    assert rewards(**kept) == rewards()
    with golden.raises(DataError):
        rewards(score_on_truncated=False)


def test_a_sequence_without_tokens_is_paid_nothing():
    zeros = torch.zeros(1, 2)
    result = kl_penalised_rewards(torch.tensor([3.0]), zeros, zeros, zeros, kl_coef=1.0)
    assert result.tolist() == [[0.0, 0.0]]


def test_the_coefficient_rises_above_the_target_and_falls_below():
    # 10 % above: error 0.1, times 50 of 100 sequences: 5 %
    controller = AdaptiveKLController(0.2, target=6.0, horizon=100.0)
    controller.update(6.6, 50)
    assert controller.coef == near(0.2 * 1.05)
    controller = AdaptiveKLController(0.2, target=6.0, horizon=100.0)
    controller.update(5.4, 50)
    assert controller.coef == near(0.2 * 0.95)
    controller = AdaptiveKLController(0.2, target=6.0, horizon=100.0)
    controller.update(6.0, 50)
    assert controller.coef == 0.2


def test_one_horizon_changes_the_coefficient_by_a_fifth_at_most():
    for kl, expected in ((600.0, 1.2), (0.0, 0.8), (-3.0, 0.8)):  # k1 may come out negative
        controller = AdaptiveKLController(1.0, target=6.0, horizon=100.0)
        controller.update(kl, 100)
        assert controller.coef == near(expected)


def test_the_controller_wants_the_kl_of_sequences_not_of_rewards():
    """Fed with -coef · KL, a policy far beyond the target would see its penalty shrink."""
    ref, mask = torch.zeros(2, 4), torch.ones(2, 4)
    kl = sequence_kl(torch.full((2, 4), 3.0), ref, mask)  # 3 nats a token, 12 a sequence
    assert kl.tolist() == [12.0, 12.0]
    right = AdaptiveKLController(0.1, target=10.0, horizon=2.0)
    right.update(kl.mean().item(), 2)
    assert right.coef == near(0.12)  # error 12/10 - 1, one horizon
    per_token = AdaptiveKLController(0.1, target=10.0, horizon=2.0)
    per_token.update(3.0, 2)  # the mean of tokens would look like far too little KL
    assert per_token.coef == near(0.08)
    reward = AdaptiveKLController(0.1, target=10.0, horizon=2.0)
    reward.update(-0.1 * 12.0, 2)
    assert reward.coef == near(0.08)


def test_policy_drifting_off_is_pulled_back():
    """A toy whose KL is 1 / coef settles at the coefficient with KL = target."""
    controller = AdaptiveKLController(1.0, target=4.0, horizon=1000.0)
    for _ in range(200):
        controller.update(1.0 / controller.coef, 100)
    assert controller.coef == pytest.approx(0.25, rel=1e-3)


def test_the_coefficient_survives_a_restart():
    controller = AdaptiveKLController(0.2, target=6.0, horizon=100.0)
    controller.update(12.3, 7)
    resumed = AdaptiveKLController(0.2, target=6.0, horizon=100.0)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.coef == controller.coef != 0.2
    with golden.raises(CheckpointError):
        resumed.load_state_dict(FixedKLController(0.1).state_dict())


def test_the_fixed_coefficient_is_that_of_the_configuration():
    controller = FixedKLController(0.1)
    controller.update(1e9, 100)
    controller.load_state_dict({"coef": 5.0})
    assert controller.coef == 0.1


def test_controllers_refuse_numbers_that_make_no_sense():
    with golden.raises(ConfigError):
        AdaptiveKLController(0.0, target=6.0, horizon=100.0)
    with golden.raises(ConfigError):
        AdaptiveKLController(0.1, target=-6.0, horizon=100.0)
    with golden.raises(ConfigError):
        FixedKLController(float("nan"))
    with golden.raises(DataError):
        AdaptiveKLController(0.1, target=6.0, horizon=100.0).update(float("nan"), 1)


def test_a_batch_of_many_horizons_does_not_turn_the_penalty_into_a_reward():
    controller = AdaptiveKLController(0.1, target=6.0, horizon=10.0)
    controller.update(0.0, 64)  # 1 - 0.2 · 6.4 would be below 0
    assert controller.coef == near(0.08)
    controller.update(100.0, 64)
    assert controller.coef == near(0.096)
    for coef in (-0.1, 0.0, float("nan"), float("inf")):
        with golden.raises(CheckpointError):
            controller.load_state_dict({"coef": coef})


# ---- as a term of the loss ------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_weighted_by_the_ratio_value_and_gradient_are_those_of_the_kl(estimator: str) -> None:
    """Over all tokens of a vocabulary, drawn by the old policy: exact, however far the policy moved."""
    rng = torch.Generator().manual_seed(5)
    old, ref = (
        torch.log_softmax(torch.randn(6, generator=rng, dtype=torch.float64), 0) for _ in "or"
    )
    logits = torch.randn(6, generator=rng, dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, 0)
    estimate = kl_loss(logprobs, ref, estimator, old_logprobs=old)  # type: ignore[arg-type]
    found = (old.exp() * estimate).sum()
    wanted = (logprobs.exp() * (logprobs - ref)).sum()
    assert_near(found.float(), wanted.float())
    (gradient,) = torch.autograd.grad(found, logits, retain_graph=True)
    (true,) = torch.autograd.grad(wanted, logits)
    assert_near(gradient, true)


def test_unweighted_k1_has_a_gradient_of_0_on_average_and_k2_that_of_the_kl() -> None:
    rng = torch.Generator().manual_seed(6)
    logits = torch.randn(6, generator=rng, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(6, generator=rng, dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    drawn = logprobs.detach().exp()
    (true,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True
    )
    for name, wanted in (("k1", torch.zeros(6)), ("k1+", true), ("k2", true), ("k3+", true)):
        value = (drawn * kl_loss(logprobs, ref, name)).sum()  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        assert_near(gradient.float(), wanted.float(), scale=float(true.abs().max()))


def test_the_reference_gets_no_gradient() -> None:
    logprobs, ref = (torch.tensor([x], requires_grad=True) for x in (-1.0, -2.0))
    kl_loss(logprobs, ref, "k3").sum().backward()
    assert logprobs.grad is not None
    assert ref.grad is None
