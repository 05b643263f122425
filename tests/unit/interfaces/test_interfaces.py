"""PPO and SFT interfaces against plain loops, by hand, and at their edges."""

import math
from dataclasses import dataclass, replace
from typing import Any

import golden
import pytest
import torch
from near import assert_near, near
from torch.nn import functional as F

from experiments.ppo_math import ppo_math
from realsys.api import registry
from realsys.api.basics.losses import PPOLoss
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError, DataError
from realsys.api.model import (
    FinetuneSpec,
    GenerationHyperparameters,
    Model,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.options import ModelOptions, OptimizerOptions, PPOHyperparameters
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf.data_parallel import DataParallel
from realsys.backends.inference import InferenceBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.math_questions import MathPrompts, MathSFT
from realsys.generation.engine import embedded_engine
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.math_reward import MathRewardInterface
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface
from realsys.interfaces.ppo.ppo_critic import PPOCriticInterface
from realsys.interfaces.ppo.ppo_experience import minibatches, prepare_experience
from realsys.interfaces.supervised import SFTInterface
from realsys.models.factories import hf_causal_lm, hf_critic, tiny_llama, tokenizer_only

torch.set_num_threads(1)
COMPANY: dict[str, Any] = {
    "name": ModelName("m"),
    "device": "cpu",
    "topology": ProcessTopology(),
    "rank": 0,
    "groups": ParallelGroups(),
    "base_seed": 1,
}
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=64, train_batch_size=4)
MB = MicroBatchSpec(max_tokens_per_mb=200)  # cuts each minibatch below into several
ADAMW = OptimizerOptions(lr=1e-3, weight_decay=0.01, eps=1e-5, gradient_clipping=0.5)
TEMPERATURE = 0.8


def score_by_length(*, response, answer, **_):
    """Anything that differs between answers: a random model is never right."""
    return float(len(response) % 3)


registry.register_reward("score_by_length", score_by_length, trusted=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A random model's directory."""
    folder = str(tmp_path_factory.mktemp("tiny") / "model")
    model = FSDPBackend().initialize(tiny_llama(hidden_size=32, num_layers=2, **COMPANY), SPEC)
    model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=folder)
    return folder


def settings(**changes):
    """Many stop tokens, so that some of a random model's answers end and others are cut."""
    gen = GenerationHyperparameters(
        max_new_tokens=10, temperature=TEMPERATURE, stop_token_ids=tuple(range(3, 60))
    )
    few = PPOHyperparameters(
        gen=gen,
        ppo_n_minibatches=2,
        ppo_epochs=2,
        kl_ctl=0.1,
        discount=0.99,
        gae_lambda=0.95,
        value_eps_clip=0.005,
        loss=PPOLoss(c_clip=1.02),
    )
    return {**vars(replace(few, **changes)), "group_size": 3}


@dataclass
class Roles:
    """The four models of PPO and their interfaces, driven without a master."""

    path: str
    ppo: dict[str, Any]

    def __post_init__(self):
        train = FSDPBackend(optimizer=ADAMW)
        self.actor = train.initialize(hf_causal_lm(path=self.path, **COMPANY), SPEC)
        self.critic = train.initialize(hf_critic(path=self.path, **COMPANY), SPEC)
        self.ref = InferenceBackend().initialize(hf_causal_lm(path=self.path, **COMPANY), SPEC)
        self.rule = InferenceBackend().initialize(tokenizer_only(path=self.path, **COMPANY), SPEC)
        self.prompts = MathPrompts(
            tokenizer=self.rule.tokenizer, seed=1, split="train", train_size=64
        )
        self.actor_does = PPOActorInterface(**self.ppo, reward="score_by_length")
        self.critic_does = PPOCriticInterface(**self.ppo)

    def experience(self, step):
        ids = range(4 * step, 4 * step + 4)
        data = self.prompts.batch(ids, [str(i) for i in ids])
        data = data.update(self.actor_does.generate(self.actor, data, MB))
        ref = self.actor_does.inference(self.ref, data, MB)
        reward = MathRewardInterface(reward="score_by_length")
        return (
            data.update(ref.remap({"logprobs": "packed_ref_logprobs"}))
            .update(reward.inference(self.rule, data, MB))
            .update(self.critic_does.inference(self.critic, data, MB))
        )

    def train(self, data):
        return (
            self.actor_does.train_step(self.actor, data, MB),
            self.critic_does.train_step(self.critic, data, MB),
        )


# ---- against a plain loop ---------------------------------------------------------------------


def plain_logprobs(module, tokens, start):
    """Of the tokens from ``start`` on, at the sampling temperature."""
    logits = module(input_ids=tokens[None]).logits[0, start - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, tokens[start:, None])[:, 0]


def plain_values(module, tokens, start):
    """Of the states before the tokens from ``start`` on."""
    return module(input_ids=tokens[None]).logits[0, start - 1 : -1, 0]


def plain_adamw(module):
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-5)


def plain_update(module, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    optimizer.step()
    return loss.item()


def plain_ppo_step(policy, critic, ref, optimizers, groups):
    """``groups``: per prompt a list of (tokens, start of the answer, score). Returns mean losses."""
    old, advantages, returns, values = {}, {}, {}, {}
    sequences = [s for group in groups for s in group]
    with torch.no_grad():
        for key, (tokens, start, score) in enumerate(sequences):
            old[key] = plain_logprobs(policy, tokens, start)
            values[key] = plain_values(critic, tokens, start)
            reward = -0.1 * (old[key] - plain_logprobs(ref, tokens, start))
            reward[-1] += score
            advantage, following = torch.zeros_like(reward), 0.0
            for t in reversed(range(len(reward))):
                next_value = values[key][t + 1] if t + 1 < len(reward) else 0.0
                following = reward[t] + 0.99 * next_value - values[key][t] + 0.99 * 0.95 * following
                advantage[t] = following
            advantages[key], returns[key] = advantage, advantage + values[key]
        flat = torch.cat([advantages[k] for k in advantages])
        white = {k: (a - flat.mean()) / (flat.var() + 1e-8).sqrt() for k, a in advantages.items()}
    policy_losses, value_losses = [], []
    size = len(sequences) // 2
    for keys in [range(size), range(size, 2 * size)] * 2:  # two epochs of two minibatches
        count = sum(len(old[k]) for k in keys)
        policy_loss = value_loss = 0.0
        for k in keys:
            tokens, start, _ = sequences[k]
            ratio = (plain_logprobs(policy, tokens, start) - old[k]).exp()
            surrogate = torch.minimum(ratio * white[k], ratio.clamp(0.8, 1.2) * white[k])
            bounded = torch.where(
                white[k] < 0, torch.maximum(surrogate, 1.02 * white[k]), surrogate
            )
            policy_loss = policy_loss - bounded.sum() / count
            v = plain_values(critic, tokens, start)
            held = values[k] + (v - values[k]).clamp(-0.005, 0.005)
            errors = torch.maximum((v - returns[k]) ** 2, (held - returns[k]) ** 2)
            value_loss = value_loss + 0.5 * errors.sum() / count
        policy_losses.append(plain_update(policy, optimizers[0], policy_loss))
        value_losses.append(plain_update(critic, optimizers[1], value_loss))
    return sum(policy_losses) / 4, sum(value_losses) / 4


def plain_groups(data):
    """The batch as lists of sequences: tokens, where the answer starts, score."""
    lengths = data.piece_lengths("packed_input_ids")
    tokens = torch.split(data.data["packed_input_ids"], lengths)
    starts = [int(m.sum()) for m in torch.split(data.data["prompt_mask"], lengths)]
    rows = list(zip(tokens, starts, data.data["rewards"].tolist(), strict=True))
    return [rows[i : i + 3] for i in range(0, len(rows), 3)]


@pytest.mark.thorough
def test_three_ppo_steps_equal_a_plain_loop(path):
    roles = Roles(path, settings())
    policy, ref = (hf_causal_lm(path=path, **COMPANY).module.load() for _ in range(2))
    critic = hf_critic(path=path, **COMPANY).module.load()
    optimizers = (plain_adamw(policy), plain_adamw(critic))
    for step in range(3):
        data = roles.experience(step)
        actor_stats, critic_stats = roles.train(data)
        expected = plain_ppo_step(policy, critic, ref, optimizers, plain_groups(data))
        found = (actor_stats["actor_loss"], critic_stats["value_loss"])
        assert found == near(expected)
        assert min(critic_stats["value_clip_ratio"], actor_stats["dual_clip_ratio"]) > 0
    assert 0 < actor_stats["no_eos_ratio"] < 1, "answers of both kinds were trained on"
    assert_near(dict(roles.actor.module.module.state_dict()), dict(policy.state_dict()))
    assert_near(dict(roles.critic.module.module.state_dict()), dict(critic.state_dict()))


def test_three_sft_steps_equal_a_plain_loop(path):
    model = FSDPBackend(optimizer=ADAMW).initialize(hf_causal_lm(path=path, **COMPANY), SPEC)
    plain = hf_causal_lm(path=path, **COMPANY).module.load()
    optimizer = plain_adamw(plain)
    data = MathSFT(tokenizer=model.tokenizer, seed=1, split="train", train_size=64)
    for step in range(3):
        indices = range(4 * step, 4 * step + 4)
        stats = SFTInterface().train_step(model, data.batch(indices, [str(i) for i in indices]), MB)
        loss, count = 0.0, 0
        for i in indices:
            prompt, answer = data.prompt_tokens(i), data.answer_tokens(i)
            logits = plain(input_ids=torch.tensor([prompt + answer])).logits[
                0, len(prompt) - 1 : -1
            ]
            loss = loss + F.cross_entropy(logits, torch.tensor(answer), reduction="sum")
            count += len(answer)
        assert stats["loss"] == near(plain_update(plain, optimizer, loss / count))
        assert stats["n_tokens"] == count
    assert model.version.global_step == 3
    assert_near(dict(model.module.module.state_dict()), dict(plain.state_dict()))


# ---- by hand ----------------------------------------------------------------------------------


def hand_batch():
    """One prompt of 2 tokens with two answers: 2 tokens that end, 1 token that was cut."""
    full = [[4, 3]]
    keys = ("packed_input_ids", "prompt_mask", "packed_logprobs", "packed_ref_logprobs", "values")
    off, on = False, True
    return SequenceSample.from_tensors(
        ["a"],
        {**dict.fromkeys(keys, full), "rewards": [[1, 1]], "seq_no_eos_mask": [[1, 1]]},
        {
            "packed_input_ids": torch.arange(7),
            "prompt_mask": torch.tensor([on, on, off, off, on, on, off]),
            "packed_logprobs": torch.tensor([0.0, 0, -1.0, -2.0, 0, 0, -1.5]),
            "packed_ref_logprobs": torch.tensor([0.0, -9, -1.5, -2.0, 0, -9, -2.0]),
            "values": torch.tensor([9.0, 0.5, 0.25, 9.0, 9.0, 0.125, 0.75]),
            "rewards": torch.tensor([1.0, 8.0]),
            "seq_no_eos_mask": torch.tensor([off, on]),
        },
    )


@pytest.mark.parametrize(
    ("truncation", "score_on_truncated", "last"),
    [
        # KL 0.5 at 0.1 a nat, then score (clipped to 5): 5 - 0.05, less the value 0.125 before it
        ("terminal", True, 4.825),
        ("terminal", False, -0.175),
        ("bootstrap", False, -0.175 + 0.75),  # … and the value after the last token
    ],
)
def test_experience_by_hand(truncation, score_on_truncated, last):
    ppo = PPOSettings(truncation=truncation, score_on_truncated=score_on_truncated)
    made = prepare_experience(hand_batch(), ppo, kl_coef=0.1, ranks=DataParallel())
    # Values before the two tokens of the first answer: 0.5, 0.25. Rewards: -0.05, then 1.
    # Last token: 1 - 0.25 = 0.75. Before it: (-0.05 + 0.25 - 0.5) + 0.75 = 0.45.
    expected = torch.tensor([0, 0, 0.45, 0.75, 0, 0, last])
    assert_near(made.batch.data["advantages"], expected)
    before = torch.tensor([0, 0, 0.5, 0.25, 0, 0, 0.125])
    assert_near(made.batch.data["returns"], expected + before)
    assert made.stats["kl_ref/per_sequence"] == near(0.5)
    assert made.stats["kl_ref/per_token"] == near(1.0 / 3)
    assert made.stats["response_length/mean"] == 1.5
    assert made.stats["response_length/max"] == 2
    assert made.stats["no_eos_ratio"] == 0.5
    assert made.stats["reward/mean"] == 4.5
    assert (made.stats["n_tokens"], made.stats["n_sequences"]) == (7, 2)


def test_keys_that_do_not_belong_together_are_refused():
    batch = hand_batch()
    short = SequenceSample.from_tensors(["a"], {"values": [[3, 2]]}, {"values": torch.zeros(5)})
    with golden.raises(DataError):
        prepare_experience(batch.update(short), PPOSettings(), kl_coef=0.1, ranks=DataParallel())


def test_minibatches_keep_order_and_number():
    ids = SequenceSample.from_tensors(list("abcde"), {"x": [[1]] * 5}, {"x": torch.arange(5)})
    assert [m.ids for m in minibatches(ids, 2)] == [("a", "b", "c"), ("d", "e")]
    with golden.raises(DataError):
        list(minibatches(ids, 6))


# ---- what a run shows -------------------------------------------------------------------------


def test_the_first_step_is_on_policy(path):
    roles = Roles(path, settings())
    stats, critic_stats = roles.train(roles.experience(0))
    assert stats["first_minibatch/importance_weight"] == near(1)
    assert stats["first_minibatch/max_abs_log_ratio"] < 1e-5
    assert stats["first_minibatch/clip_ratio"] == 0
    assert stats["kl_ref/per_token"] == near(0, scale=1.0)
    assert stats["early_stopped"] == 0
    assert stats["lr"] == critic_stats["lr"] == 1e-3
    assert critic_stats["value/mean"] == 0  # a new head
    assert (roles.actor.version.global_step, roles.critic.version.global_step) == (1, 1)
    every = {**stats, **critic_stats}
    assert all(type(v) is float and math.isfinite(v) for v in every.values()), every
    wanted = "actor_loss importance_weight clip_ratio dual_clip_ratio approx_kl entropy grad_norm "
    wanted += (
        "lr reward/mean reward/std kl_ref/per_token kl_ref/per_sequence kl_coef advantage/mean "
    )
    wanted += "advantage/std response_length/mean response_length/max no_eos_ratio n_tokens "
    wanted += "n_sequences early_stopped"
    assert set(wanted.split()) <= set(stats)
    wanted = "value_loss value_clip_ratio explained_variance return/mean value/mean grad_norm lr"
    assert set(wanted.split()) <= set(critic_stats)


def num_optimizer_steps(model: Model):
    steps = {float(m["step"]) for m in model.module.state_dict()["optimizer"].values()}
    assert len(steps) <= 1
    return steps.pop() if steps else 0


def test_early_stop_makes_no_further_optimizer_step(path):
    roles = Roles(path, settings(early_stop_kl=1e-8, ppo_epochs=3))
    stats, _ = roles.train(roles.experience(0))
    assert stats["early_stopped"] == 1
    # The first minibatch is on policy; the second sees the move the first has made, and is the last.
    assert num_optimizer_steps(roles.actor) == 2
    assert roles.actor.version.global_step == 1


def poison(model: Model, *which: int) -> None:
    """Makes the gradients of these optimizer steps, from 0, no numbers."""
    parameter = next(iter(model.module.parameters.values()))
    engine, made = model.module, iter(range(1000))
    step = engine._step

    def poisoned(lr):
        if next(made) in which:
            parameter.grad = parameter.grad * math.nan
        return step(lr)

    engine._step = poisoned


def test_minibatches_without_a_finite_gradient_are_left_out_and_counted(path):
    roles = Roles(path, settings(ppo_epochs=2))  # four minibatches
    data = roles.experience(0)
    for model in (roles.actor, roles.critic):
        poison(model, 1)
    both = roles.train(data)
    for stats, model in zip(both, (roles.actor, roles.critic), strict=True):
        assert stats["skipped_steps"] == 1
        assert all(math.isfinite(value) for value in stats.values())
        assert stats["grad_norm"] > 0
        assert num_optimizer_steps(model) == 3
        assert model.version.global_step == 1
    assert both[0]["early_stopped"] == 0
    for model in (roles.actor, roles.critic):
        poison(model, 0, 1, 2, 3)
    for stats in roles.train(data):
        assert stats["skipped_steps"] == 4
        assert all(math.isfinite(value) for value in stats.values())
    assert num_optimizer_steps(roles.actor) == num_optimizer_steps(roles.critic) == 3


def test_critic_warm_up_leaves_the_policy_alone(path):
    roles = Roles(path, settings(critic_warmup_steps=1))
    before = roles.actor.module.state_dict()["weights"]
    stats, _ = roles.train(roles.experience(0))
    after = roles.actor.module.state_dict()["weights"]
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert num_optimizer_steps(roles.actor) == 0
    assert num_optimizer_steps(roles.critic) == 4
    assert roles.actor.version.global_step == 1
    assert "actor_loss" not in stats
    assert "reward/mean" in stats
    stats, _ = roles.train(roles.experience(1))
    assert "actor_loss" in stats


def test_the_entropy_bonus_raises_entropy(path):
    entropies = []
    for coef in (0.0, 50.0):
        roles = Roles(path, settings(entropy_coef=coef, adv_norm="none", early_stop_imp_ratio=None))
        first = roles.experience(0)
        roles.actor_does.train_step(roles.actor, first, MB)
        entropies.append(roles.actor_does.train_step(roles.actor, first, MB)["entropy"])
    assert entropies[1] > entropies[0]


def test_actor_and_critic_steer_the_kl_coefficient_alike_and_restore_it(path):
    ppo = settings(use_adaptive_kl_ctl=True, adaptive_kl_horizon=100.0)
    roles = Roles(path, ppo)
    roles.train(roles.experience(0))
    # KL 0 is below target: error -0.2, times 12 sequences of a horizon of 100
    coef = 0.1 * (1 - 0.2 * 12 / 100)
    assert roles.actor_does.kl_controller.coef == near(coef)
    assert roles.critic_does.kl_controller.coef == roles.actor_does.kl_controller.coef
    again = PPOActorInterface(**ppo)
    again.load_state_dict(roles.actor_does.state_dict())
    assert again.kl_controller.coef == roles.actor_does.kl_controller.coef


def test_value_norm_shows_real_values_and_is_restored(path):
    ppo = settings(value_norm=True, value_norm_beta=0.5)
    roles = Roles(path, ppo)
    data = roles.experience(0)
    _, stats = roles.train(data)
    moments = roles.critic_does.moments
    assert moments.mean == near(stats["return/mean"])
    raw = roles.critic.module.forward(data)
    shown = roles.critic_does.inference(roles.critic, data, MB).data["values"]
    assert_near(shown, raw * moments.std + moments.mean)
    again = PPOCriticInterface(**ppo)
    again.load_state_dict(roles.critic_does.state_dict())
    assert again.moments.state_dict() == moments.state_dict()


def test_rewards_are_for_the_text_of_each_answer(path):
    model = tokenizer_only(path=path, **COMPANY)
    texts = [["2 + 2 = 4\n#### 4", "#### 5"], ["#### 7", "so 7"]]
    encoded = [[model.tokenizer(t).input_ids for t in group] for group in texts]
    prompt, eos = [40, 41, 42], [model.tokenizer.eos_token_id]
    rows = [[prompt + ids + eos for ids in group] for group in encoded]
    lengths = [[len(r) for r in group] for group in rows]
    flat = [r for group in rows for r in group]
    data = SequenceSample.from_tensors(
        ["a", "b"],
        {"packed_input_ids": lengths, "prompt_mask": lengths},
        {
            "packed_input_ids": torch.tensor([t for r in flat for t in r]),
            "prompt_mask": torch.tensor([i < 3 for r in flat for i in range(len(r))]),
        },
        metadata={"answer": ["4", "7"]},
    )
    scored = MathRewardInterface().inference(model, data, MB)
    assert scored.data["rewards"].tolist() == [1, 0, 1, 1]
    assert scored.meta.seqlens["rewards"] == ((1, 1), (1, 1))
    assert scored.meta.metadata == {}
    means = MathRewardInterface(report_means=True).inference(model, data, MB)
    assert means.meta.metadata == {"mean_reward": (0.5, 1.0)}
    unknown = SequenceSample.from_tensors(data.ids, data.meta.seqlens, data.data)
    with golden.raises(DataError):
        MathRewardInterface().inference(model, unknown, MB)


def test_evaluation_counts_greedy_answers(path):
    roles = Roles(path, settings())
    batches = [roles.prompts.batch([0, 1, 2], list("abc")), roles.prompts.batch([3, 4], list("de"))]
    found = roles.actor_does.evaluate(roles.actor, batches, MB)
    assert found["num_problems"] == 5
    assert [s["answer"] for s in found["samples"]] == [
        a for b in batches for a in b.meta.metadata["answer"]
    ]
    assert found["samples"][0]["prompt"] == roles.prompts.records[0]["prompt"]
    # The rule of these tests pays 1 or 2 for lengths that are no multiple of 3.
    right = [len(s["response"]) % 3 > 0 for s in found["samples"]]
    assert [s["correct"] for s in found["samples"]] == right
    assert found["accuracy"] == sum(right) / 5
    assert found == roles.actor_does.evaluate(roles.actor, batches, MB)


def test_sft_evaluation_is_the_mean_over_tokens(path):
    model = FSDPBackend().initialize(hf_causal_lm(path=path, **COMPANY), SPEC)
    data = MathSFT(tokenizer=model.tokenizer, seed=1, split="test", eval_size=3)
    whole = SFTInterface().evaluate(model, [data.batch([0, 1, 2], list("abc"))], MB)
    batches = [data.batch([0], ["a"]), data.batch([1, 2], list("bc"))]
    cut = SFTInterface().evaluate(model, batches, MicroBatchSpec(max_tokens_per_mb=1))
    assert cut["loss"] == near(whole["loss"])
    assert whole["perplexity"] == near(math.exp(whole["loss"]))


def test_interfaces_take_what_the_experiment_passes(path):
    experiment = replace(ppo_math(), actor=ModelOptions(path=path))
    for call in experiment.initial_setup().model_rpcs:
        registry.make_interface(call.interface_impl)
    with golden.raises(ConfigError):
        registry.make_interface(
            replace(experiment.initial_setup().model_rpcs[0].interface_impl, args={"eps_klip": 1})
        )


def test_evaluation_keeps_no_more_tokens_than_its_bound(path, monkeypatch):
    """All questions of a batch were decoded together, 128 of them, where training kept to its bound."""
    roles, bounds = Roles(path, settings()), []

    class Seen(ContinuousEngine):
        def __init__(self, *args, max_tokens, **more):
            bounds.append(max_tokens)
            super().__init__(*args, max_tokens=max_tokens, **more)

    monkeypatch.setattr(embedded_engine, "ContinuousEngine", Seen)
    batch = roles.prompts.batch(range(5), list("abcde"))
    whole = roles.actor_does.evaluate(roles.actor, [batch], MicroBatchSpec())
    longest = max(batch.piece_lengths("packed_prompts")) + roles.actor_does.gen.max_new_tokens
    two_rows = MicroBatchSpec(max_tokens_per_mb=2 * longest)
    assert roles.actor_does.evaluate(roles.actor, [batch], two_rows) == whole
    three_rows = replace(two_rows, max_cache_tokens=3 * longest)
    assert roles.actor_does.evaluate(roles.actor, [batch], three_rows) == whole
    assert bounds[0] >= 5 * longest
    assert bounds[1:] == [2 * longest, 3 * longest]
