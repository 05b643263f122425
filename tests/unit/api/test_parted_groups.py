"""Micro-batches within a group of answers: which sequences go together, and that nothing else changes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from estimators_named import estimator
from hypothesis import given
from hypothesis import strategies as st
from near import assert_near, near

from realsys.api.data import MicroBatchSpec
from realsys.api.model import FinetuneSpec, ModelName, ParallelGroups, ProcessTopology
from realsys.api.options import OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.data.packing import runs_within
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface
from realsys.interfaces.ppo.ppo_critic import PPOCriticInterface
from realsys.models.factories import hf_critic, tiny_llama

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
INPUT = "packed_input_ids"
SIZE: dict[str, Any] = {"hidden_size": 32, "num_layers": 2}


def sample() -> SequenceSample:
    """q has four answers of 3, 2, 4 and 1 tokens, and r one of 2; a prompt belongs to all of an id."""
    lengths = ((3, 2, 4, 1), (2,))
    ones = ((1, 1, 1, 1), (1,))
    return SequenceSample.from_tensors(
        ("q", "r"),
        {INPUT: lengths, "rewards": ones, "packed_prompts": ((2,), (1,))},
        {
            INPUT: torch.arange(12),
            "rewards": torch.arange(5) / 10,
            "packed_prompts": torch.tensor([70, 71, 80]),
        },
        {"task": ["math", "code"]},
    )


# ---- which go together -------------------------------------------------------------------------


def test_a_group_is_parted_between_its_answers_where_it_does_not_fit():
    assert runs_within([(3, 2, 4, 1), (2,)], max_tokens=5) == [(0, 0, 2), (0, 2, 4), (1, 0, 1)]
    assert runs_within([(3, 2, 4, 1), (2,)], max_tokens=10) == [(0, 0, 4), (1, 0, 1)]
    assert runs_within([(3, 9, 4)], max_tokens=5) == [(0, 0, 1), (0, 1, 2), (0, 2, 3)]
    assert runs_within([(3, 9, 4), ()], max_tokens=None) == [(0, 0, 3), (1, 0, 0)]


@given(st.lists(st.lists(st.integers(0, 30), max_size=6), max_size=5), st.integers(1, 40))
def test_runs_hold_every_sequence_once_in_order_and_are_within_the_limit(lengths, limit):
    runs = runs_within(lengths, max_tokens=limit)
    held = [(i, k) for i, a, b in runs for k in range(a, b)]
    assert held == [(i, k) for i, pieces in enumerate(lengths) for k in range(len(pieces))]
    assert {run.id_index for run in runs} == set(range(len(lengths)))
    for i, a, b in runs:
        assert b - a <= 1 or sum(lengths[i][a:b]) <= limit
        if sum(lengths[i]) <= limit:
            assert (a, b) == (0, len(lengths[i]))


def test_each_run_has_its_sequences_under_every_key():
    pieces = sample().microbatches(MicroBatchSpec(max_tokens_per_mb=5))
    found = {
        i: (run, x)
        for runs, mb in pieces
        for run, i, x in zip(runs, mb.ids, mb.unpack(), strict=True)
    }
    assert sorted(found) == ["q[0:2]", "q[2:4]", "r"]
    run, second = found["q[2:4]"]
    assert run == (0, 2, 4)
    assert second.data[INPUT].tolist() == [5, 6, 7, 8, 9]
    assert second.data["rewards"].tolist() == near([0.2, 0.3])
    assert second.data["packed_prompts"].tolist() == [70, 71]  # of the whole group
    assert second.meta.seqlens == {
        INPUT: ((4, 1),),
        "rewards": ((1, 1),),
        "packed_prompts": ((2,),),
    }
    assert second.meta.metadata == {"task": ("math",)}


def test_a_group_whose_keys_disagree_about_its_sequences_stays_whole():
    odd = sample().update(
        SequenceSample.from_tensors(
            ("q", "r"), {"turns": ((1, 1, 1), (1,))}, {"turns": torch.arange(4)}
        )
    )
    pieces = odd.microbatches(MicroBatchSpec(max_tokens_per_mb=5))
    assert [mb.ids for _, mb in pieces] == [("q",), ("r",)]


# ---- nothing else changes ----------------------------------------------------------------------


def experience() -> SequenceSample:
    """Two questions with four answers each, all that PPO trains on drawn at random."""
    draw = torch.Generator().manual_seed(0)
    lengths = ((9, 12, 7, 11), (8, 14, 6, 10))
    flat = list(itertools.chain(*lengths))
    num, ones = sum(flat), ((1,) * 4,) * 2
    per_token = ("packed_logprobs", "packed_ref_logprobs", "values")
    data = {key: torch.rand(num, generator=draw) - 6.5 for key in per_token}
    data[INPUT] = torch.randint(3, 512, (num,), generator=draw)
    data["prompt_mask"] = torch.cat([torch.arange(n) < 4 for n in flat])
    data["rewards"] = torch.rand(8, generator=draw)
    data["seq_no_eos_mask"] = torch.arange(8) % 3 == 0
    for group, start in ((0, 0), (1, sum(lengths[0]))):
        prompt = torch.randint(3, 512, (4,), generator=draw)
        for begin in itertools.accumulate(lengths[group][:-1], initial=start):
            data[INPUT][begin : begin + 4] = prompt
    seqlens = {k: ones if k in ("rewards", "seq_no_eos_mask") else lengths for k in data}
    return SequenceSample.from_tensors(("q", "r"), seqlens, data)


def trained(
    make: Any, size: Any, limit: int | None, changes: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    args = {"ppo_n_minibatches": 1, "kl_ctl": 0.1, **changes, "group_size": 4}
    does = (PPOActorInterface if make is tiny_llama else PPOCriticInterface)(**args)
    backend = FSDPBackend(optimizer=OptimizerOptions(lr=1e-3, eps=1e-4))
    model = backend.initialize(make(**size, **COMPANY), SPEC)
    sizes = []
    run_module = model.module.run_module
    model.module.run_module = lambda mb: sizes.append(mb.piece_lengths(INPUT)) or run_module(mb)
    stats = does.train_step(model, experience(), MicroBatchSpec(max_tokens_per_mb=limit))
    assert all(len(lengths) == 1 or sum(lengths) <= (limit or 10**9) for lengths in sizes)
    assert (len(sizes) > 2) == (limit is not None)
    return stats, model.module.state_dict()["weights"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("which", "changes"),
    [
        ("actor", {"loss_aggregation": "token_mean", "entropy_coef": 0.1}),
        ("actor", {"loss_aggregation": "seq_mean_token_sum"}),
        ("actor", {"loss_aggregation": "seq_mean_token_mean", "mask_truncated": True}),
        ("actor", {"loss_aggregation": "seq_mean_token_sum_norm", "advantage": estimator("grpo")}),
        ("critic", {}),
    ],
)
def test_training_does_not_depend_on_how_groups_are_parted(
    which: str, changes: Any, tmp_path: Path
) -> None:
    make, size = tiny_llama, SIZE
    if which == "critic":
        policy = FSDPBackend().initialize(tiny_llama(**SIZE, **COMPANY), SPEC)
        policy.module.save_to_hf(tokenizer=policy.tokenizer, save_dir=str(tmp_path / "model"))
        make, size = hf_critic, {"path": str(tmp_path / "model")}
    whole, weights = trained(make, size, None, changes)
    parted, same = trained(make, size, 15, changes)
    assert parted == near(whole)
    assert_near(same, weights)


def test_log_probabilities_come_back_in_order():
    does, batch = PPOActorInterface(group_size=4), experience()
    model = FSDPBackend().initialize(tiny_llama(**SIZE, **COMPANY), SPEC)
    whole = does.inference(model, batch, MicroBatchSpec()).data["logprobs"]
    for limit in (1, 15, 25):
        found = does.inference(model, batch, MicroBatchSpec(max_tokens_per_mb=limit))
        assert_near(found.data["logprobs"], whole)
        assert found.meta.seqlens["logprobs"] == batch.meta.seqlens[INPUT]
