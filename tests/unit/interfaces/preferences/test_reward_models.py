"""Reward models: the loss and the weighed reward by hand; what a plan refuses; the calls it makes."""

from __future__ import annotations

import json
import math

import golden
import pytest
import torch
from near import near
from transformers import AutoModelForSequenceClassification

from launcher.submit.planning import default_experiment
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError
from realsys.api.model import ParallelGroups, ProcessTopology
from realsys.backends.inference import InferenceBackend
from realsys.config.overrides import with_settings
from realsys.data.preferences.preference_pairs import PreferencePairs
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.interfaces.preferences.preference_training import PreferenceInterface
from realsys.interfaces.preferences.reward_model import RewardModelInterface
from realsys.models.factories import hf_critic
from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.models.hf import load_tokenizer

MB = MicroBatchSpec()
PROBLEMS = arithmetic_word_problems(num_problems=300, seed=0, split="train")
CORPUS = [problem["prompt"] + problem["answer"] for problem in PROBLEMS]
SIZES = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
RECORDS = [
    {"prompt": "2 + 3?", "chosen": "5", "rejected": "6"},
    {"prompt": "a?", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"},
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward") / "policy"
    build_tiny_llama(folder, seed=1, corpus=CORPUS, vocab_size=320, **SIZES)
    return folder


def classifier(policy, folder, labels=1, pad=None):
    """Another program's classifier, with a head of its own."""
    torch.manual_seed(3)
    made = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=labels)
    made.config.pad_token_id = load_tokenizer(policy).pad_token_id if pad is None else pad
    made.save_pretrained(folder)
    load_tokenizer(policy).save_pretrained(folder)
    return made.eval()


def batch(lengths, tokens, **more):
    keys = {"packed_input_ids": lengths, **{k: [[1] * len(x) for x in lengths] for k in more}}
    data = {"packed_input_ids": torch.tensor(tokens), **more}
    return SequenceSample.from_tensors([str(i) for i in range(len(lengths))], keys, data)


def test_the_loss_by_hand():
    values = torch.tensor([9.0, 2.0, 9.0, 9.0, 0.5, -1.0, 9.0, 1.0])
    pairs = batch([[2, 3], [1, 2]], [0] * 8)
    loss, figures = PreferenceInterface(centering=0.1).pair_loss(values, pairs)
    by_hand = [
        math.log1p(math.exp(-1.5)) + 0.1 * 2.5**2,
        math.log1p(math.exp(2.0)) + 0.1 * 0.0,
    ]
    assert float(loss) == near(sum(by_hand) / 2)
    assert float(figures["accuracy"]) == 0.5
    assert float(figures["margin"]) == near(-0.25)


def test_a_parted_pair_is_refused():
    with golden.raises(ConfigError):
        PreferenceInterface().pair_loss(torch.zeros(3), batch([[3]], [0] * 3))


def reward_model(folder):
    context = {"device": "cpu", "topology": ProcessTopology(), "rank": 0, "base_seed": 1}
    ours = hf_critic(path=str(folder), name="m", groups=ParallelGroups(), **context)
    return InferenceBackend().initialize(ours, None)


@pytest.mark.parametrize("pad_is_end", [False, True])
def test_a_classifier_is_read_where_transformers_reads_it(policy, tmp_path, pad_is_end):
    tokenizer = load_tokenizer(policy)
    pad = tokenizer.eos_token_id if pad_is_end else tokenizer.pad_token_id
    assert (pad == tokenizer.eos_token_id) is pad_is_end
    theirs = classifier(policy, tmp_path / "classifier", pad=pad)
    model = reward_model(tmp_path / "classifier")
    end = tokenizer.eos_token_id
    rows = [[5, 6, end], [8, 9, 17, end], [10, end, 12, 13, 20], [end, end], [7, end, end]]
    padded = [row + [pad] * (5 - len(row)) for row in rows]
    with torch.no_grad():
        scores = theirs(torch.tensor(padded)).logits.flatten()
    data = batch(
        [[3, 4], [5], [2, 3]],
        [token for row in rows for token in row],
        rewards=torch.zeros(5),
    )
    found = RewardModelInterface().inference(model, data, MB).data["rewards"]
    assert found.tolist() == pytest.approx(scores.tolist(), rel=1e-4)
    # Ours is saved with one value a token, and goes on being read at its last.
    model.module.save_to_hf(tokenizer=tokenizer, save_dir=str(tmp_path / "ours"))
    own = reward_model(tmp_path / "ours")
    values = own.module.forward(data.select(["packed_input_ids"]), mb_spec=MB)
    ends = torch.tensor([3, 7, 12, 14, 17]) - 1
    again = RewardModelInterface().inference(own, data, MB).data["rewards"]
    assert again.tolist() == pytest.approx(values[ends].tolist(), rel=1e-6)
    assert (again.tolist() == pytest.approx(found.tolist(), rel=1e-3)) is not pad_is_end


def test_scores_are_those_of_transformers_and_weighed(policy, tmp_path):
    theirs = classifier(policy, tmp_path / "classifier")
    model = reward_model(tmp_path / "classifier")
    rows = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    rule = torch.tensor([1.0, 0.0, math.nan])
    data = batch([[3, 2], [4]], [token for row in rows for token in row], rewards=rule)
    does = RewardModelInterface(weight=2.0, rule_weight=0.5, clip=1e-3)
    out = does.inference(model, data, MB)
    with torch.no_grad():
        scores = [float(theirs(torch.tensor([row])).logits) for row in rows]
    parts = [part for text in out.meta.metadata["reward_parts"] for part in json.loads(text)]
    assert [part["model"] for part in parts] == near(scores)
    assert [part.get("rule") for part in parts] == [1.0, 0.0, None]
    by_hand = [
        0.5 * r + 2 * max(-1e-3, min(1e-3, s)) for r, s in zip(rule.tolist(), scores, strict=True)
    ]
    assert out.data["rewards"].tolist()[:2] == near(by_hand[:2])
    assert math.isnan(out.data["rewards"][2])


def test_a_pair_is_the_prompt_with_either_answer(policy, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    tokenizer = load_tokenizer(policy)
    pairs = PreferencePairs(
        tokenizer=tokenizer, seed=1, split="train", path=str(file), eval_size=0, needs_answer=False
    ).batch([0, 1], ["x", "y"])
    texts = [
        tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        for tokens in pairs.data["packed_input_ids"].split(pairs.piece_lengths("packed_input_ids"))
    ]
    assert texts == ["2 + 3?\n5", "2 + 3?\n6", "a?\nb", "a?\nc"]


def problems(experiment, *words):
    return [p.what for p in with_settings(default_experiment(experiment), words=words).problems()]


def test_what_a_plan_refuses(policy, tmp_path):
    classifier(policy, tmp_path / "one")
    classifier(policy, tmp_path / "three", labels=3)
    other = tmp_path / "other"
    build_tiny_llama(other, seed=1, corpus=CORPUS, vocab_size=310, **SIZES)
    actor = f"actor.path={policy}"

    def of(*words):
        return problems("grpo-math", actor, "task.eval_size=0", *words)

    good = f"reward_model.path={tmp_path / 'one'}"
    assert of(good) == []
    golden.check(of(f"reward_model.path={policy}"))
    golden.check(of(f"reward_model.path={tmp_path / 'three'}"))
    golden.check(" ".join(of(f"reward_model.path={other}")))
    golden.check(of(good, "reward_model.weight=0")[0])
    assert any("256 positions" in p for p in of(good, "gen.max_new_tokens=200"))
    golden.check(problems("grpo-math", good))
    assert any("nothing trains" in p for p in of(good, "schedule=rollout"))


def test_what_training_refuses(policy, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b"}) + "\n")
    given = (f"model.path={policy}", f"task.path={file}", "task.eval_size=0", "train_bs_n_seqs=1")
    assert problems("reward-model", *given) == ["no column 'rejected'"]
    file.write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    found = problems("reward-model", *given, "task.columns.prompt=prompt")
    assert found == []
    assert any(
        "a micro-batch" in p for p in problems("reward-model", *given, "model.max_tokens_per_mb=99")
    )
    assert any("no pairs" in p for p in problems("reward-model", "task=math"))


def test_answers_over_the_limit_are_refused_within_the_models_positions(policy, tmp_path):
    file = tmp_path / "pairs.jsonl"

    def told(length, *words):
        rows = [*RECORDS, {"prompt": "a?", "chosen": "b", "rejected": " 7" * length}]
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
        given = (f"model.path={policy}", f"task.path={file}", "task.eval_size=0", *words)
        made = with_settings(
            default_experiment("reward-model"), words=[*given, "train_bs_n_seqs=1"]
        )
        return [f"{p.what} | {p.where} | {p.fix}" for p in made.problems()]

    assert told(4) == []
    (found,) = told(90, "max_answer_len=10", "task.max_prompt_len=20")
    what, where, fix = found.split(" | ")
    longest = int(what.rpartition(" ")[2])
    golden.check(what)
    assert where == f"max_answer_len and {file}:3"
    assert fix.startswith(f"raise max_answer_len to {longest}, ")
    assert told(90, f"max_answer_len={longest}", "task.max_prompt_len=20") == []
    (found,) = told(900)
    assert "raise max_answer_len" not in found
    golden.check(found)
    assert "the model's 256 positions hold task.max_prompt_len=128" in found
    (found,) = told(900, "max_answer_len=5000", "task.max_prompt_len=256")
    golden.check(found)
    assert "lower task.max_prompt_len" in found


def test_pairs_of_equal_answers(policy, tmp_path):
    file, same = tmp_path / "pairs.jsonl", {"prompt": "a?", "chosen": "b", "rejected": "b"}
    given = (f"model.path={policy}", f"task.path={file}", "task.eval_size=0", "train_bs_n_seqs=1")
    file.write_text(2 * (json.dumps(same) + "\n"))
    (found,) = problems("reward-model", *given)
    golden.check(found)
    file.write_text("".join(json.dumps(r) + "\n" for r in (*RECORDS, same)))
    made = with_settings(default_experiment("reward-model"), words=given)
    assert list(made.problems()) == []
    (told,) = made.remarks(())
    golden.check(told)


@pytest.mark.parametrize("schedule", ["sync", "async"])
@pytest.mark.parametrize("name", ["grpo-math", "ppo-math"])
def test_updates_read_the_weighed_reward(name, schedule):
    words = ["reward_model.path=/m", "actor.path=/p", f"schedule={schedule}"]
    calls = {c.name: c for c in with_settings(default_experiment(name), words=words)._calls}
    assert ("rule_inf" in calls) == (schedule == "sync")
    scored = calls["rew_inf"]
    assert (scored.role, scored.output_keys) == ("reward_model", ("weighed_rewards",))
    for call in (c for c in calls.values() if c.is_train):
        assert "rewards" not in call.input_keys
        assert call.input_key_remap == {"weighed_rewards": "rewards"}
