"""Without a critic: advantages of a group by hand, and the interface's whole path."""

from __future__ import annotations

import golden
import pytest
import torch
from estimators_named import estimator
from near import assert_near, near

from experiments.grpo_math import grpo_math
from realsys.api import registry
from realsys.api.basics.estimators import GAE, GRPOAdvantage
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError, DataError
from realsys.api.model import FinetuneSpec, GenerationHyperparameters, ModelName, ProcessTopology
from realsys.api.options import OptimizerOptions, PPOHyperparameters
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.math_questions import MathPrompts
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.batch_checks import REFERENCE
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface
from realsys.interfaces.ppo.ppo_critic import PPOCriticInterface
from realsys.interfaces.ppo.ppo_experience import prepare_experience
from realsys.models.factories import tiny_llama

COMPANY = {
    "name": ModelName("actor"),
    "device": "cpu",
    "topology": ProcessTopology(),
    "rank": 0,
}


def hand_batch(scores: list[float]) -> SequenceSample:
    """Question ``a`` with two answers, of 2 tokens and 1 token, and ``b`` with one of 1 token."""
    on, off = True, False
    lengths, ones = [[4, 3], [2]], [[1, 1], [1]]
    keys = ("packed_input_ids", "prompt_mask", "packed_logprobs", "packed_ref_logprobs")
    return SequenceSample.from_tensors(
        ["a", "b"],
        {**dict.fromkeys(keys, lengths), "rewards": ones, "seq_no_eos_mask": ones},
        {
            "packed_input_ids": torch.arange(9),
            "prompt_mask": torch.tensor([on, on, off, off, on, on, off, on, off]),
            "packed_logprobs": torch.tensor([0.0, 0, -1.0, -2.0, 0, 0, -1.5, 0, -1.0]),
            "packed_ref_logprobs": torch.tensor([0.0, -9, -1.5, -3.0, 0, -9, -2.0, 0, -1.0]),
            "rewards": torch.tensor(scores),
            "seq_no_eos_mask": torch.tensor([off, off, off]),
        },
    )


@pytest.mark.parametrize(
    ("advantage", "first", "second"),
    [
        # KL of the answers to a: 0.5 + 1 and 0.5 nats, at 0.1 a nat. Rewards 1 - 0.15 and 0 - 0.05:
        # 0.85 and -0.05, mean 0.4, distance from it 0.45.
        ("dr_grpo", 0.45, -0.45),
        ("rloo", 0.9, -0.9),  # from the other one
        # Scores 1 and 0: 0.5 over the deviation 0.5 · √2. The penalty is not divided: -0.15 + 0.1.
        ("grpo", 0.5**0.5 - 0.05, -(0.5**0.5) + 0.05),
    ],
)
def test_advantages_of_a_group_by_hand(advantage: str, first: float, second: float) -> None:
    settings = PPOSettings(advantage=estimator(advantage))
    data = hand_batch([1.0, 0.0, 1.0])
    made = prepare_experience(data, settings, kl_coef=0.1, ranks=DataParallel())
    expected = torch.tensor([0, 0, first, first, 0, 0, second, 0, 0.0])  # b is alone: no baseline
    assert_near(made.batch.data["advantages"], expected)
    assert "returns" not in made.batch.data
    assert "values" not in made.batch.data
    assert made.stats["reward/mean"] == near(2 / 3)
    assert made.stats["kl_ref/per_sequence"] == near(2 / 3)


def test_without_a_penalty_nobody_misses_the_reference() -> None:
    settings, data = PPOSettings(advantage=estimator("rloo")), hand_batch([1.0, 0.0, 1.0])
    alone = data.select([key for key in data.keys if key != REFERENCE])
    made = prepare_experience(alone, settings, kl_coef=0.0, ranks=DataParallel())
    beside = prepare_experience(data, settings, kl_coef=0.0, ranks=DataParallel())
    assert made.batch.data["advantages"].equal(beside.batch.data["advantages"])
    assert made.batch.data["advantages"].any()
    assert made.kl_per_sequence == 0.0
    assert set(beside.stats) - set(made.stats) == {"kl_ref/per_sequence", "kl_ref/per_token"}
    with golden.raises(DataError):
        prepare_experience(alone, settings, kl_coef=0.1, ranks=DataParallel())


def test_gae_misses_the_critics_values() -> None:
    with golden.raises(DataError):
        prepare_experience(
            hand_batch([1.0, 0, 0]), PPOSettings(), kl_coef=0.1, ranks=DataParallel()
        )


def test_a_critic_refuses_to_be_of_no_use() -> None:
    with golden.raises(ConfigError):
        PPOCriticInterface(advantage=estimator("grpo"))


def test_the_policy_learns_from_groups_without_values() -> None:
    """What the experiment passes, over one step: answers that scored better become likelier."""
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=64, train_batch_size=4)
    gen = GenerationHyperparameters(max_new_tokens=8)
    ppo = PPOHyperparameters(
        gen=gen,
        advantage=estimator("grpo"),
        adv_norm="none",
        ppo_n_minibatches=1,
        kl_ctl=0.0,
        entropy_coef=0.0,
    )
    does = PPOActorInterface(**vars(ppo), group_size=4)
    model = tiny_llama(hidden_size=32, num_layers=1, **COMPANY)
    actor = FSDPBackend(optimizer=OptimizerOptions(lr=1e-3, weight_decay=0.0)).initialize(
        model, spec
    )
    prompts = MathPrompts(tokenizer=actor.tokenizer, seed=1, split="train", train_size=64)
    mb = MicroBatchSpec()
    data = prompts.batch(range(4), list("abcd"))
    data = data.update(does.generate(actor, data, mb))
    logprobs = does.inference(actor, data, mb)
    pieces = data.meta.seqlens["packed_input_ids"]
    scores = torch.tensor([float(i % 2) for group in pieces for i, _ in enumerate(group)])
    ones = {"rewards": [[1] * len(group) for group in pieces]}
    data = data.update(logprobs.remap({"logprobs": "packed_ref_logprobs"})).update(
        SequenceSample.from_tensors(data.ids, ones, {"rewards": scores})
    )
    stats = does.train_step(actor, data, mb)
    assert stats["advantage/mean"] == pytest.approx(0.0, abs=0.5)
    assert stats["grad_norm"] > 0
    after = does.inference(actor, data, mb).data["logprobs"]
    gain = (after - logprobs.data["logprobs"]) * ~data.data["prompt_mask"]
    sums = torch.stack(
        [part.sum() for part in torch.split(gain, data.piece_lengths("packed_input_ids"))]
    )
    assert sums[scores == 1].mean() > sums[scores == 0].mean()


def test_options_of_the_interface_are_those_of_the_experiment() -> None:
    args = grpo_math().initial_setup().model_rpcs[0].interface_impl.args
    read = registry.read_arguments("interface", "ppo_actor", args)
    assert PPOActorInterface(**read).advantage == GRPOAdvantage()
    assert PPOHyperparameters().advantage == GAE()
