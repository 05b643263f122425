"""Training on answers that were sampled from a part of the vocabulary: on-policy where it should be."""

from dataclasses import replace
from typing import Any

import golden
import pytest
import torch
from estimators_named import estimator
from near import assert_near, near

from realsys.api import registry
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import DataError
from realsys.api.model import (
    FinetuneSpec,
    GenerationHyperparameters,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.options import OptimizerOptions, PPOHyperparameters
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.inference import InferenceBackend
from realsys.data.answers_layout import KEPT_COUNTS, KEPT_IDS
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.math_questions import MathPrompts
from realsys.interfaces.answers import answer_mask, kept_sets
from realsys.interfaces.math_reward import MathRewardInterface
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface
from realsys.models.factories import hf_causal_lm, tiny_llama

torch.set_num_threads(1)
PARTS: dict[str, Any] = {
    "name": ModelName("m"),
    "device": "cpu",
    "topology": ProcessTopology(),
    "rank": 0,
    "groups": ParallelGroups(),
    "base_seed": 1,
}
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=64, train_batch_size=4)
WHOLE = MicroBatchSpec()
GEN = GenerationHyperparameters(max_new_tokens=10, temperature=0.8, stop_token_ids=(3, 4, 5))
NARROW = [
    {"top_p": 0.9},
    {"top_k": 5},
    {"top_p": 0.8, "top_k": 20},
    {"min_new_tokens": 4},
    {"top_p": 0.7, "min_new_tokens": 4},
]
registry.register_reward(
    "kept_sets_by_length",
    lambda *, response, answer, **_: float(len(response) % 3),
    trusted=True,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A random model's directory."""
    folder = str(tmp_path_factory.mktemp("kept") / "model")
    model = FSDPBackend().initialize(tiny_llama(hidden_size=32, num_layers=2, **PARTS), SPEC)
    # A random model is nearly uniform: sharpened, so that sets are of all sizes.
    head = model.module.module.lm_head.weight
    with torch.no_grad():
        head.mul_(6)
    model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=folder)
    return folder


def interface(**gen):
    few = PPOHyperparameters(
        gen=replace(GEN, **gen),
        advantage=estimator("grpo"),
        adv_norm="none",
        ppo_n_minibatches=1,
        ppo_epochs=1,
        kl_ctl=0.1,
        entropy_coef=0.01,
    )
    return PPOActorInterface(**vars(few), group_size=3, reward="kept_sets_by_length")


def policy(path):
    backend = FSDPBackend(optimizer=OptimizerOptions(lr=1e-3))
    return backend.initialize(hf_causal_lm(path=path, **PARTS), SPEC)


def experience(does, model, path, mb=WHOLE):
    ref = InferenceBackend().initialize(hf_causal_lm(path=path, **PARTS), SPEC)
    data = MathPrompts(tokenizer=model.tokenizer, seed=1, split="train", train_size=64).batch(
        range(4), list("abcd")
    )
    data = data.update(does.generate(model, data, WHOLE))
    reward = MathRewardInterface(reward="kept_sets_by_length")
    of_ref = does.inference(ref, data, mb)
    return data.update(of_ref.remap({"logprobs": "packed_ref_logprobs"})).update(
        reward.inference(model, data, mb)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("gen", NARROW, ids=str)
@pytest.mark.parametrize("cut", [False, True])
def test_the_first_step_is_on_policy(path, gen, cut):
    mb = MicroBatchSpec(max_tokens_per_mb=60) if cut else WHOLE
    does, model = interface(**gen), policy(path)
    data = experience(does, model, path, mb)
    counts = data.data[KEPT_COUNTS][answer_mask(data)]
    assert (counts > 0).any()
    stats = does.train_step(model, data, mb)
    assert stats["first_minibatch/max_abs_log_ratio"] <= 1e-5
    assert stats["first_minibatch/importance_weight"] == near(1)
    assert stats["first_minibatch/clip_ratio"] == 0
    assert stats["approx_kl"] == pytest.approx(0, abs=1e-9)
    assert stats["kl_ref/per_token"] == near(0, scale=1.0)


def test_renormalised_behaviour_against_the_whole_vocabulary_is_off_policy(path):
    """The same answers with their sets taken away: what an engine that renormalises alone would give."""
    does, model = interface(top_p=0.9), policy(path)
    data = experience(does, model, path)
    empty = {
        KEPT_COUNTS: torch.zeros_like(data.data[KEPT_COUNTS]),
        KEPT_IDS: data.data[KEPT_IDS][:0],
    }
    seqlens = {
        KEPT_COUNTS: data.meta.seqlens[KEPT_COUNTS],
        KEPT_IDS: [[0] * len(pieces) for pieces in data.meta.seqlens[KEPT_COUNTS]],
    }
    biased = data.update(SequenceSample.from_tensors(data.ids, seqlens, empty))
    stats = does.train_step(model, biased, WHOLE)
    assert stats["first_minibatch/max_abs_log_ratio"] > 0.05


def test_entropy_is_that_of_the_renormalised_distribution(path):
    """Of sets of one: 0. Of sets of five at most log 5."""
    for top_k, most in ((1, 1e-6), (5, 1.6095)):
        does, model = interface(top_k=top_k), policy(path)
        data = experience(does, model, path)
        scores = torch.arange(len(data.data["rewards"])).float()  # equal answers teach nothing
        data = SequenceSample(data.meta, {**data.data, "rewards": scores})
        stats = does.train_step(model, data, WHOLE)
        assert 0 <= stats["entropy"] <= most


@pytest.mark.parametrize("limit", [40, 70])
def test_micro_batches_change_neither_log_probs_nor_the_update(path, limit):
    """A batch is cut by its tokens: however many ids the sets hold, they don't count."""
    does = interface(top_p=0.95)
    found = []
    for mb in (WHOLE, MicroBatchSpec(max_tokens_per_mb=limit)):
        model = policy(path)
        data = experience(does, model, path)
        assert len(data.data[KEPT_IDS]) > 4 * len(data.data[KEPT_COUNTS])
        plain = [key for key in data.keys if key not in (KEPT_COUNTS, KEPT_IDS)]
        runs = [ids for ids, _ in data.microbatches(mb)]
        assert runs == [ids for ids, _ in data.select(plain).microbatches(mb)]
        logprobs = does.inference(model, data, mb).data["logprobs"]
        does.train_step(model, data, mb)
        found.append((logprobs, dict(model.module.module.state_dict())))
    assert_near(found[0], found[1])


def test_sets_stay_with_their_tokens_when_a_batch_is_cut_joined_and_reordered(path):
    does, model = interface(top_p=0.9), policy(path)
    data = experience(does, model, path)

    def by_id(sample):
        found = {}
        for part in sample.unpack():
            sets = kept_sets(part, does.gen)
            pieces = torch.split(sets.ids_K, sets.counts_R.tolist())
            found[part.ids[0]] = [piece.tolist() for piece in pieces]
        return found

    whole = by_id(data)
    assert by_id(SequenceSample.gather(data.split([1, 3]))) == whole
    assert by_id(data.reorder(list("dbca"))) == {k: whole[k] for k in "dbca"}
    for runs, mb in data.microbatches(MicroBatchSpec(max_tokens_per_mb=50)):
        lengths = data.meta.seqlens[KEPT_COUNTS]
        expected = []
        for i, a, b in runs:
            first = sum(lengths[i][:a])
            expected += whole[data.ids[i]][first : first + sum(lengths[i][a:b])]
        assert [entry for part in by_id(mb).values() for entry in part] == expected


def test_answers_from_the_whole_vocabulary_have_no_sets(path):
    does, model = interface(), policy(path)
    data = experience(does, model, path)
    assert not {KEPT_COUNTS, KEPT_IDS} & data.keys
    assert kept_sets(data, does.gen) is None


def test_greedy_answers_have_no_sets(path):
    does, model = interface(greedy=True, top_p=0.5), policy(path)
    assert not {KEPT_COUNTS, KEPT_IDS} & experience(does, model, path).keys


def test_answers_that_lack_their_sets_are_refused(path):
    does, model = interface(top_p=0.9), policy(path)
    data = experience(does, model, path)
    lacking = data.select([k for k in data.keys if k not in (KEPT_COUNTS, KEPT_IDS)])
    with golden.raises(DataError):
        does.train_step(model, lacking, WHOLE)
    with golden.raises(DataError):
        does.inference(model, lacking, WHOLE)
