"""Terms of the policy's objective beside the chosen loss, by hand and whatever the cut of the batch."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import golden
import pytest
import torch
from estimators_named import estimator
from near import assert_near, near
from off_policy_batches import (
    CUT,
    WHOLE,
    actor,
    batch,
    interface,
    plain_logprobs,
    policy,
    weights_of,
    without,
)
from thread_ranks import on_two_ranks
from torch.testing import assert_close

from realsys.api.basics.estimators import GDPOAdvantage
from realsys.api.basics.losses import ClipCovLoss, DPPOLoss, KLCovLoss
from realsys.api.basics.reward import PARTS
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError, DataError
from realsys.api.model import GenerationHyperparameters
from realsys.api.options import PPOHyperparameters, ppo_problems
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_mask
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.batch_checks import ENTROPY, PROXIMAL, REFERENCE, checked_batch
from realsys.interfaces.ppo.off_policy import WEIGHTS
from realsys.interfaces.ppo.policy_objective import PolicyObjective
from realsys.interfaces.ppo.ppo_experience import prepare_experience
from realsys.interfaces.ppo.teacher import (
    TOP_IDS,
    TOP_LOGPROBS,
    TeacherInterface,
    forward_kl,
    with_teachers,
)
from realsys.interfaces.ppo.token_selection import (
    CHOSEN,
    choose_by_covariance,
    keep_top_entropy,
    largest_share,
)

ALONE = DataParallel()
TEACHER = "packed_teacher_logprobs_big"
SMALL = MicroBatchSpec(max_tokens_per_mb=18)


def with_key(data: SequenceSample, key: str, x: torch.Tensor) -> SequenceSample:
    return data.update(
        SequenceSample.from_tensors(data.ids, {key: data.meta.seqlens[INPUT]}, {key: x})
    )


def full_batch(shift: float = 0.5) -> SequenceSample:
    """With a reference and a teacher of their own, and entropies."""
    data, rng = batch(shift=shift, truncated=[3]), torch.Generator().manual_seed(9)
    num = len(data.data[INPUT])
    noise = [0.4 * torch.randn(num, generator=rng) for _ in range(2)]
    own = data.data[PROXIMAL]
    data = without(data, REFERENCE)
    data = with_key(data, REFERENCE, own + noise[0])
    data = with_key(data, TEACHER, own + noise[1])
    top = torch.rand(num, 40, generator=rng).log_softmax(1).topk(5)
    data = with_key(data, TOP_IDS + "big", top.indices.int())
    data = with_key(data, TOP_LOGPROBS + "big", top.values)
    return with_key(data, ENTROPY, torch.rand(num, generator=rng))


TERMS = [
    {"kl_ctl": 0.3, "kl_in": "loss"},
    {"kl_ctl": 0.3, "kl_in": "loss", "kl_estimator": "k1", "kl_unbiased": True},
    {"kl_ctl": 0.3, "kl_estimator": "k3"},
    {"nll_coef": 0.5},
    {"nll_coef": 0.5, "kl_ctl": 0.3, "kl_in": "loss", "entropy_coef": 0.1},
    {"opsm_delta": 0.05},
    {"entropy_coef": 0.1, "entropy_target": 3.0},
    {"recompute_logprob": True, "top_entropy_share": 0.3},
    {"use_decoupled_loss": True, "top_entropy_share": 0.3, "correction": "tis"},
    {"loss": ClipCovLoss(share=0.2, cov_low=-5.0)},
    {"loss": KLCovLoss(share=0.2)},
    {"loss": DPPOLoss(delta_low=0.01, delta_high=0.01)},
    {"adv_norm": "running"},
    {"adv_norm": "group"},
    {"advantage": estimator("reinforce_pp"), "adv_norm": None, "kl_ctl": 0.3},
    {"advantage": estimator("pass_at_k")},
    {"advantage": estimator("maxrl")},
    {"advantage": estimator("none")},
]


def named(settings: dict[str, object]) -> str:
    kinds = {k: getattr(v, "kind", v) for k, v in settings.items()}
    return ",".join(f"{k}={v}" for k, v in kinds.items())


@pytest.mark.thorough
@pytest.mark.parametrize("terms", TERMS, ids=named)
def test_the_cut_into_microbatches_changes_nothing(terms: dict[str, object]) -> None:
    """Aggregated in the one way or the other by turns: neighbours in the table are alike."""
    mode = ("token_mean", "seq_mean_token_mean")[TERMS.index(terms) % 2]
    whole, cut = actor(), actor()
    settings = {"loss_aggregation": mode, "ppo_epochs": 2, "mask_truncated": True, **terms}
    data = full_batch()
    if not settings.get("recompute_logprob") and not settings.get("use_decoupled_loss"):
        data = without(data, PROXIMAL, ENTROPY)
    taught = {"teachers": {TEACHER: 0.7}, "forward_teachers": {"big": 0.2}}
    ppo = [replace(interface(**settings), **taught) for _ in "12"]
    expected = ppo[0].train_step(whole, data, WHOLE)
    found = ppo[1].train_step(cut, data, SMALL)
    assert_near(weights_of(whole), weights_of(cut))
    assert found == near(expected)
    assert weights_of(cut)["lm_head.weight"].ne(policy().lm_head.weight).any()


def gradient(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def of_a_plain_loop(data: SequenceSample, settings: PPOSettings) -> tuple[float, torch.Tensor]:
    """The objective's value and gradient, one sequence after another, at the policy's own weights."""
    module, mask_N = policy(), answer_mask(data)
    advantage = prepare_experience(data, settings, kl_coef=0.3, ranks=ALONE).batch.data[
        "advantages"
    ]
    lengths = data.piece_lengths(INPUT)
    parts = zip(
        *(
            torch.split(x, lengths)
            for x in (
                data.data[INPUT],
                mask_N,
                advantage,
                data.data["packed_logprobs"],
                data.data[REFERENCE],
            )
        ),
        data.data["rewards"].tolist(),
        strict=True,
    )
    rows = list(parts)
    every, right = float(mask_N.sum()), sum(float(m.sum()) for _, m, *_, r in rows if r > 0)
    total = torch.zeros(())
    for tokens, mask, a, old, ref, reward in rows:
        new = plain_logprobs(module, tokens)[mask]
        ratio = (new - old[mask]).exp()
        surrogate = torch.minimum(ratio * a[mask], ratio.clamp(0.8, 1.2) * a[mask])
        d = new - ref[mask]
        k3 = (torch.exp(-d) - 1 + d).detach() + 0.5 * d * d - (0.5 * d * d).detach()
        total = total + (-surrogate + 0.3 * k3).sum() / every
        if reward > 0:
            total = total - 2.0 * new.sum() / right
    total.backward()
    return float(total.detach()), gradient(module)


def test_kl_and_nll_are_those_of_a_plain_loop_each_over_its_own_count() -> None:
    data = without(full_batch(), PROXIMAL, ENTROPY, TEACHER)
    ppo = interface(kl_ctl=0.3, kl_in="loss", nll_coef=2.0)
    wanted, of_loop = of_a_plain_loop(data, ppo)
    model = actor()
    seen: list[torch.Tensor] = []
    engine = model.module
    step = engine._step
    engine._step = lambda lr: (seen.append(gradient(engine.module)), step(lr))[1]
    stats = ppo.train_step(model, data, CUT)
    assert stats["actor_loss"] == near(wanted)
    assert stats["loss/policy"] + stats["loss/nll"] == near(wanted)
    assert_near(seen[0], of_loop, rel=1e-4)
    assert stats["kl_loss"] > 0


# ---- advantages of tokens -------------------------------------------------------------------------


def test_without_a_comparison_a_token_bears_the_penalties_to_come() -> None:
    data = batch()
    kl = torch.arange(len(data.data[INPUT])).float() / 100  # of each token
    data = with_key(without(data, REFERENCE), REFERENCE, data.data["packed_logprobs"] - kl)
    made = prepare_experience(
        data, PPOSettings(advantage=estimator("reinforce_pp")), kl_coef=0.5, ranks=ALONE
    )
    lengths, mask_N = data.piece_lengths(INPUT), answer_mask(data)
    columns = (torch.split(x, lengths) for x in (kl, mask_N, made.batch.data["advantages"]))
    for (own, mask, found), score in zip(
        zip(*columns, strict=True), data.data["rewards"].tolist(), strict=True
    ):
        for t in range(len(mask)):
            to_come = score - 0.5 * float((own * mask)[t:].sum())
            assert found[t].item() == near(to_come * float(mask[t]))


def test_gdpo_reads_the_parts_of_rewards_that_travel_with_the_batch() -> None:
    data = batch()
    texts = [
        json.dumps([{"right": float(i == 0), "short": float(j)} for i in range(2)])
        for j in range(4)
    ]
    meta = replace(data.meta, metadata={**data.meta.metadata, PARTS: tuple(texts)})
    settings = PPOSettings(advantage=GDPOAdvantage())
    made = prepare_experience(
        SequenceSample(meta, data.data), settings, kl_coef=0.0, ranks=ALONE
    ).batch
    mask_N = answer_mask(made)
    firsts = [
        x[m][0].item()
        for x, m in zip(
            torch.split(made.data["advantages"], data.piece_lengths(INPUT)),
            torch.split(mask_N, data.piece_lengths(INPUT)),
            strict=True,
        )
    ]
    assert firsts == near([0.5**0.5, -(0.5**0.5)] * 4)
    with golden.raises(DataError):
        prepare_experience(data, settings, kl_coef=0.0, ranks=ALONE)


# ---- choices of tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 1.0])
def test_the_largest_share_is_that_of_all_ranks(share: float) -> None:
    data = full_batch()
    whole_N = largest_share(data.data[ENTROPY], answer_mask(data), share, ALONE)
    kept = data.data[ENTROPY][answer_mask(data)]
    count = int(-(-share * len(kept) // 1))
    assert int(whole_N.sum()) == count
    assert data.data[ENTROPY][whole_N].min() == kept.sort(descending=True).values[count - 1]

    def both(half: SequenceSample, ranks: DataParallel) -> torch.Tensor:
        return largest_share(half.data[ENTROPY], answer_mask(half), share, ranks)

    assert torch.equal(torch.cat(on_two_ranks(both, data)), whole_N)


@pytest.mark.parametrize(
    ("share", "total", "count"), [(0.07, 100, 7), (0.28, 25, 7), (0.07, 101, 8)]
)
def test_a_share_is_not_rounded_up_by_its_last_bit(share: float, total: int, count: int) -> None:
    x = torch.arange(total).float()
    assert int(largest_share(x, x >= 0, share, ALONE).sum()) == count


def test_negative_numbers_and_ties_are_in_order() -> None:
    x, every = torch.tensor([-1.0, -3.0, 0.0, 2.0, 2.0, -0.0]), torch.ones(6).bool()
    assert largest_share(x, every, 1 / 6, ALONE).tolist() == [False] * 3 + [True] * 2 + [False]
    assert largest_share(x, every, 5 / 6, ALONE).tolist() == [True, False, True, True, True, True]
    assert largest_share(x, ~every, 0.5, ALONE).sum() == 0


def test_tokens_of_low_entropy_weigh_nothing() -> None:
    data, mask_N = full_batch(), answer_mask(full_batch())
    found = keep_top_entropy(data, mask_N, 0.25, ALONE).data[WEIGHTS]
    assert found[mask_N].sum() == -(-0.25 * mask_N.sum() // 1)
    again = keep_top_entropy(
        with_key(data, WEIGHTS, torch.full_like(found, 3.0)), mask_N, 0.25, ALONE
    )
    assert torch.equal(again.data[WEIGHTS], 3 * found)
    assert keep_top_entropy(data, mask_N, 1.0, ALONE) is data


@pytest.mark.parametrize(
    "loss", [ClipCovLoss(share=0.2, cov_low=0.0, cov_high=9.0), KLCovLoss(share=0.2)]
)
def test_tokens_are_chosen_by_covariance_alike_on_all_ranks(loss: ClipCovLoss | KLCovLoss) -> None:
    data = prepare_experience(full_batch(), interface(), kl_coef=0.0, ranks=ALONE).batch

    def choose(half: SequenceSample, ranks: DataParallel) -> torch.Tensor:
        made = choose_by_covariance(half, loss, half.data[PROXIMAL], answer_mask(half), ranks)
        return made.data[CHOSEN]

    whole_N = choose(data, ALONE)
    assert torch.equal(torch.cat(on_two_ranks(choose, data)), whole_N)
    mask_N, a, old = answer_mask(data), data.data["advantages"], data.data[PROXIMAL]
    together = (a - a[mask_N].mean()) * (old - old[mask_N].mean())
    wanted = -(-0.2 * mask_N.sum() // 1)
    assert not (whole_N & ~mask_N).any()
    if isinstance(loss, KLCovLoss):
        assert whole_N.sum() == wanted
        assert together[whole_N].min() >= together[mask_N & ~whole_N].max()
    else:
        inside = mask_N & (together > 0)
        assert whole_N.sum() == min(wanted, inside.sum())
        assert not (whole_N & ~inside).any()


# ---- teachers -------------------------------------------------------------------------------------


def test_a_policy_learns_nothing_from_itself() -> None:
    data = without(batch(), PROXIMAL)
    data = with_key(data, TEACHER, data.data["packed_logprobs"])
    model = actor()
    ppo = replace(interface(advantage=estimator("none")), teachers={TEACHER: 1.0})
    stats = ppo.train_step(model, data, WHOLE)
    assert stats["teacher/big/kl"] == 0
    assert (stats["grad_norm"], stats["empty_minibatches"]) == (0.0, 1.0)
    assert_close(weights_of(model)["lm_head.weight"], policy().lm_head.weight, rtol=0, atol=0)


def test_a_policy_learns_nothing_from_its_own_whole_distribution() -> None:
    data, model = without(batch(), PROXIMAL), actor()
    gen = GenerationHyperparameters(max_new_tokens=8, temperature=0.8)
    said = TeacherInterface(gen=gen, top_k=99).inference(model, data, WHOLE)  # all 40 there are
    assert said.meta.trailing_shapes == {"top_ids": (40,), "top_logprobs": (40,)}
    keys = {"top_ids": TOP_IDS + "big", "top_logprobs": TOP_LOGPROBS + "big"}
    ppo = replace(interface(advantage=estimator("none")), forward_teachers={"big": 1.0})
    stats = ppo.train_step(model, data.update(said.remap(keys)), WHOLE)
    assert stats["teacher/big/forward_kl"] == near(0.0, scale=1.0)
    assert stats["grad_norm"] == near(0.0, scale=1.0)


@pytest.mark.parametrize("padding_rows", [0, 8])
def test_the_forward_kl_is_that_of_a_plain_loop(padding_rows: int) -> None:
    data, module = without(full_batch(), PROXIMAL, ENTROPY, TEACHER), policy()
    top = data.data[TOP_IDS + "big"]
    # The teacher's rows beyond the policy's 40, which are of no token, count nothing.
    top[top >= 40 - padding_rows] += padding_rows
    model = actor()
    ppo = replace(interface(advantage=estimator("none")), forward_teachers={"big": 0.5})
    stats = ppo.train_step(model, data, CUT)
    total, count, at = 0.0, 0, 0
    for tokens, mask in zip(
        torch.split(data.data[INPUT], data.piece_lengths(INPUT)),
        torch.split(answer_mask(data), data.piece_lengths(INPUT)),
        strict=True,
    ):
        own = torch.log_softmax(module(input_ids=tokens[None]).logits[0].detach() / 0.8, -1)
        for t in range(1, len(tokens)):
            if mask[t]:
                ids = data.data[TOP_IDS + "big"][at + t].tolist()
                said = data.data[TOP_LOGPROBS + "big"][at + t].tolist()
                total += sum(
                    math.exp(x) * (x - log_pi) - math.exp(x) + math.exp(log_pi)
                    for token, x in zip(ids, said, strict=True)
                    if token < 40
                    for log_pi in [float(own[t - 1, token])]
                )
                count += 1
        at += len(tokens)
    assert stats["teacher/big/forward_kl"] == near(total / count, rel=1e-4)
    assert stats["actor_loss"] == near(0.5 * total / count, rel=1e-4)


def test_the_gradient_of_the_forward_kl_is_that_of_the_value() -> None:
    teacher = torch.tensor([[0.6, 0.3], [0.2, 0.1]]).log()
    own = torch.tensor([[0.5, 0.2], [0.1, 0.3]]).log().requires_grad_()
    found = forward_kl(own, teacher)
    both = [0.6 * math.log(1.2) + 0.3 * math.log(1.5), 0.2 * math.log(2) + 0.1 * math.log(1 / 3)]
    assert found.tolist() == near([both[0] - 0.9 + 0.7, both[1] - 0.3 + 0.4])
    found.sum().backward()
    assert own.grad is not None
    assert_near(own.grad, own.detach().exp() - teacher.exp())
    assert forward_kl(teacher, teacher).tolist() == near([0.0, 0.0])


def test_teachers_add_up_by_weight() -> None:
    data, _ = checked_batch(full_batch(), (), ALONE)
    other = "packed_teacher_logprobs_other"
    data = with_key(data, other, data.data["packed_logprobs"] + 2.0)
    data = with_key(data, "advantages", torch.ones(len(data.data[INPUT])))
    old = data.data["packed_logprobs"]
    made, stats = with_teachers(data, {TEACHER: 0.5, other: 0.25}, old, ALONE)
    mask_N = answer_mask(data)
    wanted = 1 + 0.5 * (data.data[TEACHER] - old)[mask_N] + 0.25 * 2.0
    assert_near(made.data["advantages"][mask_N], wanted)
    assert stats["teacher/other/kl"] == near(-2.0)
    with golden.raises(DataError):
        with_teachers(data, {"packed_teacher_logprobs_gone": 1.0}, old, ALONE)


# ---- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"kl_unbiased": True}, "kl_unbiased"),
        ({"kl_estimator": "k3+"}, "kl_estimator"),
        ({"kl_in": "loss", "kl_estimator": "k1"}, "kl_estimator"),
        ({"top_entropy_share": 0.5}, "top_entropy_share"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: dict[str, object], where: str) -> None:
    ppo = PPOHyperparameters(gen=GenerationHyperparameters(max_new_tokens=8), **settings)  # type: ignore[arg-type]
    (problem,) = ppo_problems(ppo, longest=8)
    assert problem.where == f"algorithm.{where}"
    with pytest.raises(ConfigError):
        PPOSettings(**settings)  # type: ignore[arg-type]


def test_an_objective_without_terms_has_a_gradient_only_where_there_is_an_advantage() -> None:
    data = prepare_experience(full_batch(), interface(), kl_coef=0.0, ranks=ALONE).batch
    data = SequenceSample(
        data.meta, {**data.data, "advantages": torch.zeros_like(data.data["advantages"])}
    )
    assert not PolicyObjective(interface()).has_gradient(data).any()
    right = PolicyObjective(interface(nll_coef=0.1)).has_gradient(data)
    assert 0 < right.sum() < answer_mask(data).sum()
    with_kl = PolicyObjective(interface(kl_in="loss"), kl_coef=0.1)
    assert torch.equal(with_kl.has_gradient(data), answer_mask(data))
