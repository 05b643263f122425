"""Direct preference training: its log-probs against transformers', splits of a batch, the reference on
held-out pairs, what a plan refuses and the calls it makes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import golden
import pytest
import torch
from near import assert_near, near
from transformers import AutoModelForCausalLM

from launcher.submit.planning import default_experiment
from realsys.algorithms.predictions import Predictions
from realsys.api.basics.preference_losses import (
    DPOLoss,
    IPOLoss,
    KTOLoss,
    PairLoss,
    SimPOLoss,
)
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError
from realsys.api.model import (
    FinetuneSpec,
    Model,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.options import OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.inference import InferenceBackend
from realsys.config.overrides import apply_settings, with_settings
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.interfaces.answers import answer_mask
from realsys.interfaces.preferences.direct_preference import DirectPreferenceInterface
from realsys.interfaces.preferences.preference_training import num_pairs
from realsys.models.factories import hf_causal_lm
from realsys.models.from_scratch.tiny_llama import build_tiny_llama

MB = MicroBatchSpec()
LENGTHS = ((5, 7), (4, 4), (9, 6))  # of each answer with its prompt of 2 tokens
LOSSES = [DPOLoss(label_smoothing=0.1), IPOLoss(), KTOLoss(), SimPOLoss()]
RECORDS = [
    {"prompt": "2 + 3?", "chosen": "5", "rejected": "6"},
    {"prompt": "a?", "chosen": "b", "rejected": "c"},
]


def by_kind(loss: PairLoss) -> str:
    return loss.kind


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "policy"
    problems = arithmetic_word_problems(num_problems=300, seed=0, split="train")
    corpus = [problem["prompt"] + problem["answer"] for problem in problems]
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    build_tiny_llama(folder, seed=1, corpus=corpus, vocab_size=320, **sizes)
    return folder


def model_of(path: Path, *, trained: bool = True) -> Model:
    made = hf_causal_lm(
        path=str(path),
        name=ModelName("model"),
        device="cpu",
        topology=ProcessTopology(),
        rank=0,
        groups=ParallelGroups(),
        base_seed=1,
    )
    if not trained:
        return InferenceBackend().initialize(made, None)  # type: ignore[arg-type]
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=30, train_batch_size=3)
    adam = OptimizerOptions(lr=2e-3, weight_decay=0.0, eps=1e-4)
    return FSDPBackend(optimizer=adam).initialize(made, spec)


def pairs(names: str = "abc", lengths: Sequence[Sequence[int]] = LENGTHS) -> SequenceSample:
    flat = [n for pair in lengths for n in pair]
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 300, (sum(flat),), generator=rng)
    mask = torch.cat([torch.arange(n) < 2 for n in flat])
    keys = dict.fromkeys(("packed_input_ids", "prompt_mask"), lengths)
    data = {"packed_input_ids": tokens, "prompt_mask": mask}
    return SequenceSample.from_tensors(names, keys, data)


def with_reference(data: SequenceSample, path: Path) -> SequenceSample:
    """As the call ``ref_inf`` makes it."""
    made = DirectPreferenceInterface().inference(model_of(path, trained=False), data, MB)
    return data.update(made.remap({"logprobs": "packed_ref_logprobs"}))


# ---- the numbers ------------------------------------------------------------------------------------


def test_log_probs_are_those_of_transformers_on_answers_alone(path: Path) -> None:
    data = pairs()
    found = DirectPreferenceInterface().inference(model_of(path, trained=False), data, MB)
    theirs = AutoModelForCausalLM.from_pretrained(path).eval()
    lengths = data.piece_lengths("packed_input_ids")
    rows = zip(
        data.data["packed_input_ids"].split(lengths),
        found.data["logprobs"].split(lengths),
        strict=True,
    )
    for tokens, ours in rows:
        with torch.no_grad():
            logits = theirs(tokens[None]).logits[0].log_softmax(-1)
        wanted = [float(logits[t - 1, tokens[t]]) for t in range(2, len(tokens))]
        assert ours.tolist() == [0.0, 0.0, *map(pytest.approx, wanted)]


def test_the_loss_and_its_figures_by_hand() -> None:
    # Two tokens, both a log-prob of log 1/4 or log 3/4; prompts of 1 token, answers of 1 and 2 tokens.
    logits = torch.tensor([[1.0, 3.0]] * 5).log()
    data = SequenceSample.from_tensors(
        "a",
        dict.fromkeys(("packed_input_ids", "prompt_mask", "packed_ref_logprobs"), ((2, 3),)),
        {
            "packed_input_ids": torch.tensor([0, 1, 0, 0, 1]),
            "prompt_mask": torch.tensor([True, False, True, False, False]),
            "packed_ref_logprobs": torch.tensor([9.0, math.log(0.5), 9.0, -1.0, -1.0]),
        },
    )
    predictions = Predictions.of_logits(logits)
    chosen = math.log(0.75) - math.log(0.5)
    rejected = math.log(0.25 * 0.75) + 2
    loss, figures = DirectPreferenceInterface(loss=DPOLoss(beta=2.0)).pair_loss(predictions, data)
    assert float(loss) == near(math.log1p(math.exp(-2 * (chosen - rejected))))
    assert {name: float(x) for name, x in figures.items()} == near(
        {
            "accuracy": 1.0,
            "margin": 2 * (chosen - rejected),
            "chosen_reward": 2 * chosen,
            "rejected_reward": 2 * rejected,
            "chosen_logprob": math.log(0.75),
            "rejected_logprob": math.log(0.25 * 0.75) / 2,
        }
    )


def test_a_parted_pair_is_refused() -> None:
    data = pairs("a", [[4]])
    with golden.raises(ConfigError):
        DirectPreferenceInterface().pair_loss(Predictions.of_logits(torch.zeros(4, 300)), data)


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
def test_only_tokens_that_predict_an_answers_count(loss: PairLoss) -> None:
    """Neither what prompts predict nor what stands behind an answer gets a gradient."""
    data = pairs()
    reference = torch.full(data.data["prompt_mask"].shape, -2.0)
    data = data.update(
        SequenceSample.from_tensors(
            data.ids, {"packed_ref_logprobs": LENGTHS}, {"packed_ref_logprobs": reference}
        )
    )
    logits = torch.randn(35, 300, generator=torch.Generator().manual_seed(2)).requires_grad_()
    made, _ = DirectPreferenceInterface(loss=loss).pair_loss(Predictions.of_logits(logits), data)
    made.backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad.abs().sum(1) > 0, answer_mask(data).roll(-1))


@pytest.mark.thorough
@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
def test_an_update_is_the_same_in_any_micro_batches(loss: PairLoss, path: Path) -> None:
    """Also where z₀ is not 0: the second step's is of a policy that has moved."""
    specs = (
        MB,
        MicroBatchSpec(n_mbs=2),
        MicroBatchSpec(max_tokens_per_mb=16),
        MicroBatchSpec(n_mbs=3),
    )
    does, data = DirectPreferenceInterface(loss=loss), with_reference(pairs(), path)
    found = []
    for spec in specs:
        model = model_of(path)
        stats = [does.train_step(model, data, spec) for _ in range(3)]
        assert model.version.global_step == 3
        weights = torch.cat(
            [x.flatten() for parts in model.module.held_weights().values() for _, x in parts]
        )
        found.append((stats, weights))
    for stats, weights in found[1:]:
        assert_near(weights, found[0][1], rel=1e-4)
        for i, (ours, whole) in enumerate(zip(stats, found[0][0], strict=True)):
            if i == 0:  # the policy is the reference: all pairs are ties, which rounding decides
                ours, whole = ({**x, "accuracy": 0.5} for x in (ours, whole))
            assert ours == near(whole, rel=1e-4)
    assert all("kl_estimate" in stats for stats in found[0][0]) == (loss.kind == "kto")
    losses = [stats["loss"] for stats in found[0][0]]
    assert all(later < earlier for earlier, later in pairwise(losses))


def test_kto_has_one_estimate_for_all_micro_batches(path: Path) -> None:
    """By hand: half the mean over pairs of the sums of both log-ratios, in which some pairs are far off."""
    data = with_reference(pairs(), path)
    reference = data.data["packed_ref_logprobs"].clone()
    answers = answer_mask(data)
    reference[:12][answers[:12]] -= 1.0  # of the first pair, whose answers have 3 and 5 tokens
    data = SequenceSample(data.meta, {**data.data, "packed_ref_logprobs": reference})
    does = DirectPreferenceInterface(loss=KTOLoss())
    stats = does.train_step(model_of(path), data, MicroBatchSpec(n_mbs=3))
    assert stats["kl_estimate"] == near((3 + 5) / 6)
    lower = 0.5 * (1 / (1 + math.exp(0.1 * (3 - 8 / 6))) + 1 / (1 + math.exp(0.1 * (8 / 6 - 5))))
    same = 0.5  # σ(0.1 z₀) and σ(-0.1 z₀) add up to 1
    assert stats["loss"] == near((lower + 2 * same) / 3)


# ---- held-out pairs -----------------------------------------------------------------------------------


def test_held_out_pairs_are_compared_with_the_policy_before_its_first_update(path: Path) -> None:
    does, model = DirectPreferenceInterface(), model_of(path)
    data, held_out = (
        with_reference(pairs(), path),
        [pairs("de", LENGTHS[:2]), pairs("f", LENGTHS[2:])],
    )
    first = does.evaluate(model, held_out, MB)
    assert (first["accuracy"], first["margin"], first["n_pairs"]) == (0.5, 0.0, 3.0)
    assert first["loss"] == near(math.log(2))
    does.train_step(model, data, MB)
    later = does.evaluate(model, held_out, MicroBatchSpec(max_tokens_per_mb=16))
    reference = [with_reference(batch, path) for batch in held_out]
    by_hand = [
        model.module.eval_batch(
            input_=batch, loss_fn=does.pair_loss, loss_weight_fn=num_pairs, mb_spec=MB
        )
        for batch in reference
    ]
    wanted = {k: (2 * by_hand[0][k] + by_hand[1][k]) / 3 for k in by_hand[0]}
    assert later == near({**wanted, "n_pairs": 3.0}, rel=1e-4)
    assert later["margin"] != 0.0
    # A restart knows them, and refuses others.
    other = DirectPreferenceInterface()
    with golden.raises(ConfigError):
        other.evaluate(model, held_out, MB)
    other.load_state_dict(does.state_dict())
    assert other.evaluate(model, held_out, MicroBatchSpec(max_tokens_per_mb=16)) == later
    with golden.raises(ConfigError):
        other.evaluate(model, [pairs("df", LENGTHS[:2])], MB)  # the second of other lengths


def test_without_a_reference_none_is_kept(path: Path) -> None:
    does, model = DirectPreferenceInterface(loss=SimPOLoss()), model_of(path)
    found = does.evaluate(model, [pairs()], MB)
    assert found["accuracy"] in {n / 3 for n in range(4)}
    assert found["chosen_reward"] == near(2 * found["chosen_logprob"])
    assert does.state_dict() == {"held_out": {}}
    assert does.train_step(model, pairs(), MB)["grad_norm"] > 0


def test_no_held_out_pairs_have_no_figures(path: Path) -> None:
    found = DirectPreferenceInterface(loss=KTOLoss()).evaluate(model_of(path), [], MB)
    assert math.isnan(found["loss"])
    assert (found["n_pairs"], found["kl_estimate"]) == (0.0, 0.0)


# ---- the recipe ----------------------------------------------------------------------------------------


def given(path: Path, folder: Path, *words: str) -> list[str]:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    few = ["task.eval_size=0", "train_bs_n_seqs=1"]
    return [f"model.path={path}", f"task.path={file}", *few, *words]


@pytest.mark.parametrize(
    ("word", "what", "where"),
    [
        ("ref.path=/else", "the reference is the starting model", "ref.path"),
        ("ref.lora.rank=4", "a frozen reference learn nothing", "ref.lora.rank"),
        ("ref.pool=left", "no pools", "ref.pool"),
        ("model.pool=left", "no pools", "model.pool"),
        ("model.max_tokens_per_mb=99", "a micro-batch 99", "model.max_tokens_per_mb"),
        ("task=math", "no pairs", "task"),
    ],
)
def test_what_a_plan_refuses(word: str, what: str, where: str, path: Path, tmp_path: Path) -> None:
    words = given(path, tmp_path, word)
    found = list(with_settings(default_experiment("dpo"), words=words).problems())
    assert any(what in p.what and where in p.where for p in found), found


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        ("loss=orpo", "no pair_loss called 'orpo'", "dpo"),
        ("loss.beta=0", "loss.beta is 0", "than 0"),
        ("loss.tau=1", "dpo has no tau", "add loss=ipo"),
        ("loss.label_smoothing=0.5", "loss.label_smoothing is 0.5", "than 0.5"),
    ],
)
def test_settings_of_a_loss_that_are_refused(word: str, what: str, fix: str) -> None:
    default = default_experiment("dpo")
    found = apply_settings(lambda: default, words=[word]).problems
    text = " ".join(f"{p.what} {p.where} {p.fix}" for p in found)
    assert what in text
    assert fix in text


@pytest.mark.parametrize("loss", LOSSES, ids=by_kind)
def test_the_calls_of_each_loss(loss: PairLoss, path: Path, tmp_path: Path) -> None:
    words = given(path, tmp_path, f"loss={loss.kind}")
    made = with_settings(default_experiment("dpo"), words=words)
    assert list(made.problems()) == []
    config = made.initial_setup()
    calls = {call.name: call for call in config.model_rpcs}
    roles = [str(shard.id.model_name) for shard in config.model_worker[0].shards]
    keys = ("packed_input_ids", "prompt_mask")
    if loss.needs_reference:
        assert (list(calls), roles) == (["ref_inf", "dpo_train"], ["ref@0", "model@0"])
        assert calls["ref_inf"].output_keys == ("packed_ref_logprobs",)
        keys = (*keys, "packed_ref_logprobs")
    else:
        assert (list(calls), roles) == (["dpo_train"], ["model@0"])
    assert calls["dpo_train"].input_keys == keys


def test_a_reference_with_a_layout_of_its_own(path: Path, tmp_path: Path) -> None:
    words = given(path, tmp_path, "model.parallel=d1", "ref.parallel=d2", "ref.offload=true")
    made = with_settings(default_experiment("dpo"), words=words)
    assert list(made.problems()) == []
    held = [[str(s.id) for s in worker.shards] for worker in made.initial_setup().model_worker]
    assert held == [["ref@0/d2t1p1#0", "model@0/d1t1p1#0"], ["ref@0/d2t1p1#1"]]
