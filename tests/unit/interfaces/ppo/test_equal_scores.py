"""Groups whose answers all scored the same teach nothing by their score, however large the KL penalty."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from estimators_named import estimator
from near import assert_near, near
from torch.testing import assert_close

from realsys.algorithms.advantage.advantages import group_advantages, num_equal_groups
from realsys.api.data import MicroBatchSpec
from realsys.api.model import (
    FinetuneSpec,
    GenerationHyperparameters,
    Model,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.options import OptimizerOptions, PPOHyperparameters
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.math_questions import MathPrompts
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.advantage_norm import normalised
from realsys.interfaces.ppo.policy_objective import PolicyObjective
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface, total
from realsys.interfaces.ppo.ppo_experience import FROM_SCORE, prepare_experience
from realsys.models.factories import tiny_llama

COMPANY: dict[str, Any] = {
    "name": ModelName("actor"),
    "device": "cpu",
    "topology": ProcessTopology(),
    "rank": 0,
    "groups": ParallelGroups(),
}
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=64, train_batch_size=4)
MB = MicroBatchSpec()
GROUP = 4


# ---- by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [0.0, 0.1, 1 / 3, 5.0, -0.1, -1.0])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_equal_scores_give_exactly_nothing(kind: str, score: float) -> None:
    made = group_advantages(
        torch.full((7,), score),  # seven times 0.1 over 7 is not 0.1
        7,
        normalise_std=kind == "grpo",
        leave_one_out=kind == "rloo",
    )
    assert made.tolist() == [0.0] * 7


def test_groups_of_equal_scores_are_counted() -> None:
    scores = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 7.0])
    assert num_equal_groups(scores, torch.tensor([0, 0, 0, 1, 1, 2])) == (1, 2)  # one is alone
    assert num_equal_groups(torch.zeros(6), 2) == (3, 3)
    below = torch.tensor([-0.1, -0.1, -1.0, -1.0, -1.0, 0.0, -1.0])
    assert num_equal_groups(below, torch.tensor([0, 0, 1, 1, 1, 2, 2])) == (2, 3)


def two_groups(scores: list[float]) -> SequenceSample:
    """Questions ``a`` and ``b`` with two answers of one token each; KL 0.5 and 1.5, then 1 and 2 nats."""
    lengths, ones = [[2, 2], [2, 2]], [[1, 1], [1, 1]]
    keys = ("packed_input_ids", "prompt_mask", "packed_logprobs", "packed_ref_logprobs")
    return SequenceSample.from_tensors(
        ["a", "b"],
        {**dict.fromkeys(keys, lengths), "rewards": ones, "seq_no_eos_mask": ones},
        {
            "packed_input_ids": torch.arange(8),
            "prompt_mask": torch.tensor([True, False] * 4),
            "packed_logprobs": torch.tensor([0, -1.0] * 4),
            "packed_ref_logprobs": torch.tensor([0, -1.5, 0, -2.5, 0, -2.0, 0, -3.0]),
            "rewards": torch.tensor(scores),
            "seq_no_eos_mask": torch.zeros(4, dtype=torch.bool),
        },
    )


@pytest.mark.parametrize(
    ("kind", "first_group", "by_score"),
    [
        # a: the penalty's distance from its mean, ±0.5 nats at 0.01 a nat. b: the score's as well.
        ("grpo", 0.005, 0.5**0.5),
        ("dr_grpo", 0.005, 0.5),
        ("rloo", 0.01, 1.0),  # of each from the other
    ],
)
def test_the_penalty_is_not_divided_by_the_deviation(
    kind: str, first_group: float, by_score: float
) -> None:
    made = prepare_experience(
        two_groups([0.0, 0.0, 1.0, 0.0]),
        PPOSettings(advantage=estimator(kind)),
        kl_coef=0.01,
        ranks=DataParallel(),
    )
    found = made.batch.data["advantages"][1::2]
    by_penalty = [first_group, -first_group] * 2
    expected = torch.tensor(by_penalty) + torch.tensor([0, 0, by_score, -by_score])
    assert_near(found, expected)
    assert made.batch.data[FROM_SCORE][:4].tolist() == [0.0] * 4
    assert (made.stats["groups/equal_scores"], made.stats["groups/compared"]) == (1, 2)


def whitened(does: PPOActorInterface, batch: SequenceSample) -> SequenceSample:
    mask_N = PolicyObjective(does).mask(batch)
    return normalised(batch, does, mask_N, does.running, DataParallel())


def test_whitening_leaves_the_penalty_and_equal_groups_alone() -> None:
    does = PPOActorInterface(advantage=estimator("dr_grpo"), adv_norm="batch")
    batch = prepare_experience(
        two_groups([0.0, 0.0, 1.0, 0.0]), does, kl_coef=0.01, ranks=DataParallel()
    ).batch
    white = whitened(does, batch).data["advantages"][1::2]
    # Scores of b: ±0.5, deviation 0.5 · √2. Those of a stay 0, and penalties what they are.
    expected = torch.tensor([0.005, -0.005, 0.5**0.5 + 0.005, -(0.5**0.5) - 0.005])
    assert_near(white, expected)
    nothing = prepare_experience(
        two_groups([2.0] * 4), does, kl_coef=0.01, ranks=DataParallel()
    ).batch
    white = whitened(does, nothing).data["advantages"]
    assert_near(white[1::2], torch.tensor([0.005, -0.005] * 2))


class TwoRanks(DataParallel):
    """The other rank's sums are ``theirs``."""

    theirs = 3.0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.theirs


def test_all_ranks_decide_alike_whether_anything_is_to_be_learned() -> None:
    does = PPOActorInterface(advantage=estimator("grpo"), adv_norm="none")
    batch = prepare_experience(two_groups([0.0] * 4), does, kl_coef=0.0, ranks=DataParallel()).batch
    moves_N = PolicyObjective(does).has_gradient(batch)
    assert total(moves_N, DataParallel()) == 0
    assert total(moves_N, TwoRanks()) > 0, "another rank has something to learn from"


GRPO = PPOHyperparameters(
    advantage=estimator("grpo"), adv_norm="none", kl_ctl=0.01, entropy_coef=0.01
)

# ---- a model --------------------------------------------------------------------------------------


def trained_once(**changes: Any) -> tuple[PPOActorInterface, Model, SequenceSample]:
    """GRPO's actor behind one step that has moved weights and filled moments, and its next batch.

    The reference is the actor before that step: KL is not 0.
    """
    gen = GenerationHyperparameters(max_new_tokens=8)
    ppo = replace(GRPO, gen=gen, ppo_n_minibatches=2, **changes)
    does = PPOActorInterface(**vars(ppo), group_size=GROUP)
    optimizer = OptimizerOptions(lr=1e-2, weight_decay=0.1, gradient_clipping=0.0)
    made = tiny_llama(hidden_size=32, num_layers=1, **COMPANY)
    actor = FSDPBackend(optimizer=optimizer).initialize(made, SPEC)
    prompts = MathPrompts(tokenizer=actor.tokenizer, seed=1, split="train", train_size=64)
    first = prompts.batch(range(4), list("abcd"))
    first = first.update(does.generate(actor, first, MB))
    first = first.update(
        does.inference(actor, first, MB).remap({"logprobs": "packed_ref_logprobs"})
    )
    second = prompts.batch(range(4, 8), list("efgh"))
    scores = [float(i % 2) for i in range(4 * GROUP)]
    does.train_step(actor, scored(first, scores), MB)
    # What the second batch is: answers of the moved actor, with the log-probs of the old one.
    later = second.update(does.generate(actor, second, MB))
    old = tiny_llama(hidden_size=32, num_layers=1, **COMPANY)
    reference = FSDPBackend(optimizer=optimizer).initialize(old, SPEC)
    later = later.update(
        does.inference(reference, later, MB).remap({"logprobs": "packed_ref_logprobs"})
    )
    return does, actor, later


def scored(data: SequenceSample, scores: list[float]) -> SequenceSample:
    ones = [[1] * GROUP for _ in data.ids]
    return data.update(
        SequenceSample.from_tensors(
            data.ids, {"rewards": ones}, {"rewards": torch.tensor(scores, dtype=torch.float32)}
        )
    )


def test_nothing_to_learn_moves_no_bit_of_weights_and_moments() -> None:
    does, actor, data = trained_once(kl_ctl=0.0, entropy_coef=0.0)
    before = actor.module.state_dict()
    stats = does.train_step(actor, scored(data, [0.0] * 16), MB)
    after = actor.module.state_dict()
    assert stats["grad_norm"] == 0.0
    assert stats["empty_minibatches"] == 2
    assert (stats["groups/equal_scores"], stats["groups/compared"]) == (4, 4)
    assert actor.version.global_step == 2, "version and schedule go on"
    assert before["optimizer"], "there are moments that could have moved"
    for part in ("weights", "optimizer"):
        assert_close(after[part], before[part], rtol=0, atol=0)
    some = [0.0] * 12 + [1.0, 0.0, 0.0, 0.0]
    stats = does.train_step(actor, scored(data, some), MB)
    assert stats["grad_norm"] > 0
    assert stats["empty_minibatches"] == 1, "the first minibatch holds groups a and b alone"


@pytest.mark.thorough
@pytest.mark.parametrize("scores", [[0.0] * 8, [0.3] * 4 + [1.0, 0.0, 0.0, 1.0]])
def test_equal_scores_leave_the_penalty_and_no_bonus(scores: list[float]) -> None:
    """Against a plain loop: REINFORCE on score and KL penalty less their group's mean, and the entropy
    bonus where scores differ.
    """
    does, actor, data = trained_once(kl_ctl=0.1, entropy_coef=0.01, advantage=estimator("dr_grpo"))
    data = data.take([0, 1])  # one minibatch
    does = PPOActorInterface(**{**_fields(does), "ppo_n_minibatches": 1})
    module = actor.module.module
    expected = plain_gradient_norm(module, data, scores, kl_coef=0.1, entropy_coef=0.01)
    stats = does.train_step(actor, scored(data, scores), MB)
    assert stats["grad_norm"] == near(expected)
    assert stats["groups/equal_scores"] == (1 if scores[-1] else 2)


AT_REST: dict[str, dict[str, Any]] = {
    "KL in the reward": {"kl_ctl": 0.1, "entropy_coef": 0.0},
    "KL in the loss": {"kl_ctl": 0.1, "kl_in": "loss", "entropy_coef": 0.0},
    "entropy bonus": {"kl_ctl": 0.0, "entropy_coef": 0.1},
    "all of them": {"kl_ctl": 0.1, "entropy_coef": 0.1},
    "over the batch": {"kl_ctl": 0.1, "adv_norm": "batch"},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("score", "changes"),
    [*((0.1, kind) for kind in AT_REST), (0.0, "all of them")],  # four times 0.1 over 4 is not 0.1
)
def test_at_the_reference_equal_scores_move_no_bit(score: float, changes: str) -> None:
    """The reference's log-probs are the policy's but for what another way of computing them rounds."""
    settings = AT_REST[changes]
    does, actor, data = trained_once(**settings)
    own = data.data["packed_logprobs"]
    noise = torch.empty_like(own).uniform_(-2e-5, 2e-5, generator=torch.Generator().manual_seed(1))
    data = SequenceSample(data.meta, {**data.data, "packed_ref_logprobs": own + noise})
    before = actor.module.state_dict()
    stats = does.train_step(actor, scored(data, [score] * 16), MB)
    assert (stats["empty_minibatches"], stats["grad_norm"]) == (2, 0.0)
    assert_close(actor.module.state_dict(), before, rtol=0, atol=0)
    # A real distance is a signal again, where the KL counts.
    far = {**data.data, "packed_ref_logprobs": own + 1e3 * noise}
    apart = SequenceSample(data.meta, far)
    stats = does.train_step(actor, scored(apart, [score] * 16), MB)
    assert (stats["empty_minibatches"] < 2) is (settings["kl_ctl"] > 0)


@pytest.mark.parametrize("norm", ["batch", "running"])
@pytest.mark.parametrize("score", [0.1, 1 / 3, -0.7])
def test_a_batch_of_equal_scores_is_whitened_to_exactly_nothing(norm: str, score: float) -> None:
    """Of an estimator that compares with the batch: the mean of 4 times 0.1 need not be 0.1."""
    does = PPOActorInterface(
        advantage=estimator("reinforce_pp"), adv_norm=norm, kl_ctl=0.0, group_size=2
    )
    batch = two_groups([score] * 4)
    longer = SequenceSample.gather([batch, *(renamed(batch, str(i)) for i in range(20))])
    ready = prepare_experience(longer, does, kl_coef=0.0, ranks=DataParallel()).batch
    assert whitened(does, ready).data["advantages"].abs().max() == 0


def renamed(batch: SequenceSample, end: str) -> SequenceSample:
    ids = [name + end for name in batch.ids]
    return SequenceSample.from_tensors(ids, batch.meta.seqlens, batch.data)


def _fields(does: PPOActorInterface) -> dict[str, Any]:
    return {name: getattr(does, name) for name in (*vars(GRPO), "group_size", "reward")}


def plain_gradient_norm(
    module: Any,
    data: SequenceSample,
    scores: list[float],
    *,
    kl_coef: float,
    entropy_coef: float,
) -> float:
    """Norm of the whole gradient, sequence by sequence; on policy all ratios are 1."""
    lengths = data.piece_lengths("packed_input_ids")
    rows = [
        torch.split(data.data[key], lengths)
        for key in ("packed_input_ids", "prompt_mask", "packed_logprobs", "packed_ref_logprobs")
    ]
    sequences = list(zip(*rows, strict=True))
    penalties = [
        kl_coef * float((own - ref)[~is_prompt].sum()) for _, is_prompt, own, ref in sequences
    ]
    num_tokens = sum(int((~is_prompt).sum()) for _, is_prompt, _, _ in sequences)
    module.zero_grad()
    for i, (tokens, is_prompt, _, _) in enumerate(sequences):
        members = range(i - i % GROUP, i - i % GROUP + GROUP)
        group = [scores[k] - penalties[k] for k in members]
        advantage = scores[i] - penalties[i] - sum(group) / GROUP
        bonus = entropy_coef if len({scores[k] for k in members}) > 1 else 0.0
        logits = module(input_ids=tokens[None]).logits[0, :-1]
        logprobs = torch.log_softmax(logits, -1)
        mine = ~is_prompt[1:]
        own = logprobs.gather(1, tokens[1:, None])[:, 0][mine]
        entropy = -(logprobs.exp() * logprobs).sum(-1)[mine]
        (-(advantage * own + bonus * entropy).sum() / num_tokens).backward()
    squares = sum(float(p.grad.double().square().sum()) for p in module.parameters())
    module.zero_grad()
    return squares**0.5
