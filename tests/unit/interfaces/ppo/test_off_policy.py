"""The actor on answers of another policy, and on answers with holes: against plain loops and by hand."""

import logging
import math
import pickle

import golden
import pytest
import torch
from estimators_named import estimator
from near import assert_near, near
from off_policy_batches import (
    ADAMW,
    CUT,
    PROMPT,
    WHOLE,
    actor,
    batch,
    interface,
    masks,
    plain_logprobs,
    policy,
    weights_of,
    without,
)
from thread_ranks import on_two_ranks
from torch.testing import assert_close

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import DataError, InternalError, PolicyMismatch
from realsys.api.model import GenerationHyperparameters
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import answer_mask
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.off_policy import correct_batch, staleness_stats
from realsys.interfaces.ppo.ppo_experience import prepare_experience

PROX, VERSIONS = "packed_prox_logprobs", "packed_versions"
ADVANTAGES = [
    0.5,
    -0.5,
    -0.75,
    0.75,
    -0.5,
    0.5,
    1.5,
    -1.5,
]  # rewards less the mean of each question


def advantage_R():
    """Of each token of the policy."""
    return torch.cat(
        [torch.full((int(m.sum()),), a) for m, a in zip(masks(), ADVANTAGES, strict=True)]
    )


def weight_R(data):
    """Proximal over behaviour, of each token of the policy."""
    mask = answer_mask(data)
    return (data.data[PROX] - data.data["packed_logprobs"])[mask].exp()


def same(one, other, **tolerance):
    assert_close(weights_of(one), weights_of(other), **tolerance)


# ---- the three cases of the update ----------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["recompute_logprob", "use_decoupled_loss"])
@pytest.mark.parametrize("correction", ["none", "cap", "tis", "icepop", "sequence_mask"])
def test_at_staleness_zero_every_case_is_the_plain_update(case, correction):
    data = batch()
    two = {"ppo_n_minibatches": 2, "ppo_epochs": 2, "adv_norm": "batch"}
    plain, other = actor(), actor()
    expected = interface(**two).train_step(plain, without(data, PROX), WHOLE)
    found = interface(**{case: True}, correction=correction, **two).train_step(other, data, WHOLE)
    same(plain, other, atol=1e-5, rtol=0)
    assert found["actor_loss"] == near(expected["actor_loss"])
    assert found["mismatch/abs_max"] < 1e-5
    assert weights_of(plain)["lm_head.weight"].ne(policy().lm_head.weight).any()


def test_keys_that_nobody_asked_for_change_no_bit():
    """Proximal log-probs are measured then, and nothing else: the ratio is to the sampling policy's."""
    data = batch(shift=0.3)
    plain, other = actor(), actor()
    expected = interface().train_step(plain, without(data, PROX, VERSIONS), CUT)
    found = interface().train_step(other, data, CUT)
    same(plain, other, atol=0, rtol=0)
    assert expected.pop("mismatch/abs_max") == expected["first_minibatch/max_abs_log_ratio"]
    extra = {k for k in found if k.startswith(("mismatch/", "staleness/"))}
    assert {k: v for k, v in found.items() if k not in extra} == expected
    assert found["mismatch/skipped"] == 0


def plain_step(data, weight, *, temperature=0.8, clip=0.2):
    """One AdamW step on the decoupled loss, by a loop over sequences; gives the loss and the module."""
    module = policy()
    old = data.data[PROX]
    loss, start, row = torch.zeros(()), 0, 0
    count = int(answer_mask(data).sum())
    for mask, a in zip(masks(), ADVANTAGES, strict=True):
        tokens = data.data["packed_input_ids"][start : start + len(mask)]
        ratio = (plain_logprobs(module, tokens) - old[start : start + len(mask)])[mask].exp()
        surrogate = torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
        w = weight[row : row + len(ratio)]
        loss = loss - (w * surrogate).sum() / count
        start, row = start + len(mask), row + len(ratio)
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW.lr, betas=(0.9, 0.95), eps=ADAMW.eps)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    optimizer.step()
    return loss.item(), module


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "bounded"),
    [
        ({"recompute_logprob": True}, torch.ones_like),
        ({"use_decoupled_loss": True}, lambda w: w),
        (
            {"use_decoupled_loss": True, "correction": "cap", "behav_imp_weight_cap": 1.5},
            lambda w: torch.where(w > 1.5, 0.0, w),
        ),
        (
            {
                "use_decoupled_loss": True,
                "correction": "cap",
                "behav_imp_weight_cap": 1.5,
                "behav_imp_weight_mode": "clamp",
            },
            lambda w: w.clamp(max=1.5),
        ),
        (
            {"recompute_logprob": True, "correction": "tis", "tis_imp_ratio_cap": 1.1},
            lambda w: w.clamp(max=1.1),
        ),
        (
            {
                "recompute_logprob": True,
                "correction": "icepop",
                "icepop_low": 0.7,
                "icepop_high": 1.3,
            },
            lambda w: torch.where((w < 0.7) | (w > 1.3), 0.0, w),
        ),
    ],
)
@pytest.mark.parametrize("cut", [WHOLE, CUT], ids=["whole", "cut"])
def test_the_update_off_policy_is_a_plain_loops(settings, bounded, cut):
    data = batch(shift=0.5)
    weight = bounded(weight_R(data))
    model = actor()
    stats = interface(**settings).train_step(model, data, cut)
    loss, module = plain_step(data, weight)
    assert stats["actor_loss"] == near(loss)
    assert_near(weights_of(model), dict(module.state_dict()))
    assert stats["first_minibatch/importance_weight"] == near(1.0)
    # At ratio 1 the loss is the weighted mean advantage: all tokens stay in the denominator.
    assert loss == near(-float((weight * advantage_R()).mean()))


def test_a_call_of_the_actor_makes_the_proximal_logprobs():
    data, model = batch(), actor()
    made = interface().inference(model, data.select(["packed_input_ids"]), CUT)
    found = made.remap({"logprobs": PROX}).data[PROX]
    mask = answer_mask(data)
    assert_near(found[mask], data.data[PROX][mask])


def test_figures_of_mismatch_and_correction_by_hand():
    data = batch(shift=0.5)
    w = weight_R(data).double()
    ppo = interface(use_decoupled_loss=True, correction="icepop", icepop_low=0.7, icepop_high=1.3)
    stats = ppo.train_step(actor(), data, WHOLE)
    kept = torch.where((w < 0.7) | (w > 1.3), 0.0, w)
    expected = {
        "mismatch/kl_k3": (w - 1 - w.log()).mean(),
        "mismatch/abs_mean": w.log().abs().mean(),
        "mismatch/abs_max": w.log().abs().max(),
        "mismatch/weight_mean": w.mean(),
        "mismatch/weight_max": w.max(),
        "mismatch/ess": w.sum() ** 2 / (len(w) * (w * w).sum()),
        "correction/weight_mean": kept.mean(),
        "correction/masked": (kept == 0).double().mean(),
        "correction/clamped": torch.zeros(()),
        "correction/ess": kept.sum() ** 2 / (len(w) * (kept * kept).sum()),
    }
    assert 0.1 < expected["correction/masked"] < 0.9
    for name, value in expected.items():
        assert stats[name] == near(float(value)), name
    # Only tokens of the very weights that train: those of version 3.
    fresh = (data.data[VERSIONS] == 3)[answer_mask(data)]
    assert stats["mismatch/kl_k3_lag_0"] == near(float((w - 1 - w.log())[fresh].mean()))
    assert all(type(v) is float and math.isfinite(v) for v in stats.values()), stats


def test_the_update_says_that_it_lacks_proximal_logprobs():
    data = without(batch(), PROX)
    with golden.raises(DataError) as caught:
        interface(use_decoupled_loss=True).train_step(actor(), data, WHOLE)
    assert "output_key_remap" in caught.value.fix


def test_a_minibatch_of_which_nothing_is_left_makes_no_step():
    model = actor()
    before = weights_of(model)
    ppo = interface(
        use_decoupled_loss=True,
        correction="icepop",
        icepop_low=50.0,
        icepop_high=60.0,
        ppo_n_minibatches=2,
    )
    stats = ppo.train_step(model, batch(), WHOLE)
    assert_close(weights_of(model), before, atol=0, rtol=0)
    assert model.version.global_step == 4
    assert (stats["empty_minibatches"], stats["early_stopped"]) == (2, 0)
    assert (stats["correction/masked"], stats["correction/ess"]) == (1, 0)
    assert "actor_loss" not in stats


# ---- the guard ------------------------------------------------------------------------------------


def guard(action, **more):
    return interface(recompute_logprob=True, mismatch_kl_max=0.05, on_mismatch=action, **more)


def test_a_batch_past_the_limit_is_left_out_and_counted():
    model = actor()
    before = weights_of(model)
    stats = guard("skip", use_adaptive_kl_ctl=True, kl_ctl=0.1).train_step(
        model, batch(shift=0.5), WHOLE
    )
    assert_close(weights_of(model), before, atol=0, rtol=0)
    assert stats["mismatch/skipped"] == 1
    assert stats["mismatch/kl_k3"] > 0.05
    assert model.version.global_step == 4
    stats = guard("skip").train_step(model, batch(), WHOLE)
    assert stats["mismatch/skipped"] == 0
    assert weights_of(model)["lm_head.weight"].ne(before["lm_head.weight"]).any()


def test_a_warning_says_figures_and_trains(caplog):
    model, other = actor(), actor()
    data = batch(shift=0.5)
    with caplog.at_level(logging.WARNING):
        guard("warn").train_step(model, data, WHOLE)
    (record,) = caplog.records
    assert "mismatch_kl_max is 0.05" in record.getMessage()
    golden.check(record.getMessage())
    interface(recompute_logprob=True).train_step(other, data, WHOLE)
    same(model, other, atol=0, rtol=0)


def test_a_stop_says_figures_batch_and_where_to_look():
    model = actor()
    with golden.raises(PolicyMismatch) as caught:
        guard("stop").train_step(model, batch(shift=0.5), WHOLE)
    assert "step 4" in caught.value.where
    assert "mismatch/kl_k3_lag_0" in caught.value.fix
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert model.version.global_step == 3


# ---- age ------------------------------------------------------------------------------------------


def test_figures_of_age_by_hand():
    stats = interface(max_staleness=2).train_step(actor(version=3), batch(), WHOLE)
    # Oldest tokens of the eight answers: 2, 3, 3, 3, 1, 3, 3, 3. Tokens: 31, of which one 1 and one 2 old.
    assert stats["staleness/mean"] == near(3 / 8)
    assert stats["staleness/max"] == 2
    assert stats["staleness/mixed_sequences"] == 2 / 8
    assert stats["staleness/tokens_checked"] == 31
    by_lag = [stats[f"staleness/tokens_by_lag/{n}"] for n in ("0", "1", "2", "3", "4_or_more")]
    assert by_lag == near([29 / 31, 1 / 31, 1 / 31, 0, 0])


@pytest.mark.parametrize(
    ("version", "max_staleness"),
    [
        (3, 1),  # 2 old
        (4, 2),
        (2, None),  # of weights that are still to come
    ],
)
def test_a_token_that_must_not_be_there_stops_the_run(version, max_staleness):
    model = actor(version=version)
    before = weights_of(model)
    with golden.raises(InternalError):
        interface(max_staleness=max_staleness).train_step(model, batch(), WHOLE)
    assert_close(weights_of(model), before, atol=0, rtol=0)


@pytest.mark.parametrize("max_staleness", [None, 9])
def test_a_token_of_the_policy_without_a_version_stops_the_run(max_staleness):
    data = batch()
    versions = data.data[VERSIONS].clone()
    versions[PROMPT] = -1
    data = SequenceSample(data.meta, {**data.data, VERSIONS: versions})
    with golden.raises(InternalError):
        interface(max_staleness=max_staleness).train_step(actor(), data, WHOLE)


def test_without_versions_nothing_is_asserted():
    stats = interface(max_staleness=0).train_step(actor(), without(batch(), VERSIONS), WHOLE)
    assert not [name for name in stats if name.startswith("staleness/")]


# ---- several ranks --------------------------------------------------------------------------------


def test_figures_are_those_of_the_whole_batch_on_every_rank():
    def both(data, ranks):
        settings = PPOSettings(use_decoupled_loss=True, correction="cap", behav_imp_weight_cap=1.2)
        age = staleness_stats(data, version=3, max_staleness=2, ranks=ranks)
        return {**age, **correct_batch(data, settings, version=3, ranks=ranks).stats}

    whole = both(batch(shift=0.5), DataParallel())
    first, second = on_two_ranks(both, batch(shift=0.5))
    assert first == second
    assert first == near(whole)


def test_all_ranks_raise_when_one_holds_a_token_too_old():
    def check(data, ranks):
        return staleness_stats(data, version=3, max_staleness=1, ranks=ranks)

    first, second = on_two_ranks(check, batch(shift=0.5))
    assert isinstance(first, InternalError)
    golden.check(first)
    assert isinstance(second, InternalError)
    golden.check(second)


# ---- how tokens add up ------------------------------------------------------------------------------

AGGREGATIONS = [
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
]


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_cut_into_microbatches_changes_nothing(mode):
    whole, cut = actor(), actor()
    ppo = interface(loss_aggregation=mode, entropy_coef=0.1, ppo_epochs=2, mask_truncated=True)
    data = without(batch(shift=0.5, truncated=[3]), PROX)
    expected = ppo.train_step(whole, data, WHOLE)
    found = ppo.train_step(cut, data, MicroBatchSpec(max_tokens_per_mb=18))
    same(whole, cut, atol=1e-6, rtol=0)
    assert found == near(expected)


@pytest.mark.parametrize(
    ("mode", "share"),
    [
        ("token_mean", lambda n: 1 / 31),
        ("seq_mean_token_mean", lambda n: 1 / (8 * n)),
        ("seq_mean_token_sum", lambda n: 1 / 8),
        ("seq_mean_token_sum_norm", lambda n: 1 / (8 * 8)),  # of 8 answers, max_new_tokens 8
    ],
)
def test_what_each_token_counts(mode, share):
    stats = interface(loss_aggregation=mode).train_step(actor(), batch(), CUT)
    counts = [int(m.sum()) for m in masks()]
    # At ratio 1 the loss of a token is its advantage.
    expected = -sum(a * n * share(n) for a, n in zip(ADVANTAGES, counts, strict=True))
    assert stats["actor_loss"] == near(expected)
    # Figures stay means over tokens.
    assert stats["importance_weight"] == near(1.0)
    reference = interface().train_step(actor(), batch(), WHOLE)
    assert stats["entropy"] == near(reference["entropy"])


# ---- answers that were cut --------------------------------------------------------------------------


def test_nothing_is_learnt_from_answers_that_were_cut():
    stats = interface(mask_truncated=True).train_step(actor(), batch(truncated=[0, 7]), CUT)
    counts = [int(m.sum()) for m in masks()]
    rest = [(a, n) for a, n in zip(ADVANTAGES[1:7], counts[1:7], strict=True)]
    expected = -sum(a * n for a, n in rest) / sum(n for _, n in rest)
    assert stats["actor_loss"] == near(expected)
    assert stats["empty_minibatches"] == 0


def test_a_batch_of_cut_answers_makes_no_step():
    model = actor()
    before = weights_of(model)
    ppo = interface(mask_truncated=True, adv_norm="batch")
    stats = ppo.train_step(model, batch(truncated=range(8)), WHOLE)
    assert_close(weights_of(model), before, atol=0, rtol=0)
    assert stats["empty_minibatches"] == 1
    assert model.version.global_step == 4


def test_nearly_too_long_answers_score_less():
    gen = GenerationHyperparameters(max_new_tokens=8)
    settings = PPOSettings(
        gen=gen, advantage=estimator("dr_grpo"), overlong_buffer_len=4, overlong_penalty_factor=2.0
    )
    made = prepare_experience(batch(), settings, kl_coef=0.0, ranks=DataParallel())
    # Lengths 3 and 2, 4; 3, 5; 4, 2; 2, 6, of which 5 loses 1/4 · 2 and 6 loses 1. Behind an observation
    # another answer begins.
    scores = torch.tensor([1, 0, 0.5, 2 - 0.5, 0, 1, 3, -1])
    means = scores.view(4, 2).mean(1, keepdim=True)
    expected = (scores.view(4, 2) - means).flatten()
    found = [
        x[m][0]
        for x, m in zip(
            made.batch.data["advantages"].split([len(m) for m in masks()]), masks(), strict=True
        )
    ]
    assert_near(torch.stack(found), expected)
    assert made.stats["reward/overlong_penalty"] == near(-1.5 / 8)


# ---- answers with holes -----------------------------------------------------------------------------


def test_junk_on_observations_changes_no_bit():
    """log-probs, reference, values and advantages there are nobody's; only the tokens are context."""
    data = batch(shift=0.3)
    off = ~answer_mask(data)
    keys = ("packed_logprobs", "packed_ref_logprobs", PROX)
    changed = {k: torch.where(off, float("inf"), data.data[k]) for k in keys}
    other = SequenceSample(data.meta, {**data.data, **changed})
    models = actor(), actor()
    ppo = interface(use_decoupled_loss=True, correction="tis", kl_ctl=0.1, adv_norm="batch")
    found = [ppo.train_step(m, d, CUT) for m, d in zip(models, (data, other), strict=True)]
    assert found[0] == found[1]
    same(*models, atol=0, rtol=0)


def test_experience_of_an_answer_with_a_hole_by_hand():
    # One sequence: prompt, prompt, policy, policy, tool, tool, policy (last). γ = λ = 1/2.
    on, off, seven = True, False, [[7]]
    keys = ("packed_input_ids", "prompt_mask", "packed_logprobs", "packed_ref_logprobs", "values")
    data = SequenceSample.from_tensors(
        ["a"],
        {**dict.fromkeys(keys, seven), "rewards": [[1]], "seq_no_eos_mask": [[1]]},
        {
            "packed_input_ids": torch.arange(7),
            "prompt_mask": torch.tensor([on, on, off, off, on, on, off]),
            "packed_logprobs": torch.tensor([0.0, 0, -1, -1, 9, 9, -1]),
            "packed_ref_logprobs": torch.tensor([0.0, -9, -3, -1, -9, -9, -1]),
            # at t: of the state that includes token t, so 1/2 before the first token of the policy,
            # 1/4 before the second, 1/8 before the one behind the tool's
            "values": torch.tensor([99, 0.5, 0.25, 99, 99, 0.125, 99]),
            "rewards": torch.tensor([1.0]),
            "seq_no_eos_mask": torch.tensor([off]),
        },
    )
    settings = PPOSettings(discount=0.5, gae_lambda=0.5)
    made = prepare_experience(data, settings, kl_coef=0.1, ranks=DataParallel())
    # Rewards: -0.1 · 2 nats, 0, and the score 1 on the last token of the policy.
    # δ: -0.2 + 1/8 - 1/2 = -0.575; 1/16 - 1/4 = -3/16; 1 - 1/8 = 7/8; γλ = 1/4.
    last, middle = 7 / 8, -3 / 16 + 7 / 32
    first = -0.575 + middle / 4
    expected = torch.tensor([0, 0, first, middle, 0, 0, last])
    assert_near(made.batch.data["advantages"], expected)
    values = torch.tensor([0, 0, 0.5, 0.25, 0, 0, 0.125])
    assert_near(made.batch.data["returns"], expected + values)
    assert made.stats["kl_ref/per_sequence"] == near(2.0)
    assert made.stats["response_length/mean"] == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", [PROX, "packed_logprobs", "packed_ref_logprobs"])
def test_log_probs_that_are_no_numbers_take_no_step(key, bad):
    model, data = actor(), batch()
    before = weights_of(model)
    broken = data.data[key].clone()
    place = int(answer_mask(data).nonzero()[-1])  # of the last datapoint
    broken[place] = bad
    data = SequenceSample(data.meta, {**data.data, key: broken})
    ppo = interface(use_decoupled_loss=True, correction="cap")
    with golden.raises(DataError) as error:
        ppo.train_step(model, data, WHOLE)
    assert error.value.where == f"datapoints ['{data.ids[-1]}']"
    assert_close(weights_of(model), before, atol=0, rtol=0)
