"""Batches without any answer token: one error, whatever the settings."""

from __future__ import annotations

import itertools
import json
from typing import Any

import golden
import pytest
import torch
from estimators_named import estimator
from off_policy_batches import WHOLE, actor, batch, interface, weights_of

from realsys.api.basics.reward import PARTS
from realsys.api.errors import DataError
from realsys.api.model import Model
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, PROMPT_MASK
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.ppo_experience import prepare_experience

ADVANTAGES = (
    *("grpo", "dr_grpo", "rloo", "maxrl", "pass_at_k", "gdpo", "reinforce_pp"),
    *("reinforce_pp_baseline", "none", "gae"),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whitened": {"adv_norm": "batch"},
    "decoupled": {"use_decoupled_loss": True, "correction": "cap"},
    "KL in the reward": {"kl_ctl": 0.1},
    "KL in the loss": {"kl_ctl": 0.1, "kl_in": "loss"},
    "entropy": {"entropy_coef": 0.1},
    "truncated left out": {"mask_truncated": True},
    "a teacher": {"teachers": {"packed_ref_logprobs": 0.5}},
}


def all_prompt(data: SequenceSample) -> SequenceSample:
    masked = {**data.data, PROMPT_MASK: torch.ones_like(data.data[PROMPT_MASK])}
    parts = [json.dumps([{"a": 1.0}] * len(pieces)) for pieces in data.meta.seqlens[INPUT]]
    seqlens = {**data.meta.seqlens, "values": data.meta.seqlens[INPUT]}
    masked["values"] = torch.zeros(len(masked[INPUT]))
    return SequenceSample.from_tensors(data.ids, seqlens, masked, metadata={PARTS: parts})


@pytest.fixture(scope="module")
def untouched() -> tuple[Model, dict[str, torch.Tensor], SequenceSample]:
    """A policy, its weights, and a batch that must not move them."""
    model = actor()
    return model, weights_of(model), all_prompt(batch())


@pytest.mark.parametrize(
    ("advantage", "settings"),
    list(itertools.product(ADVANTAGES, SETTINGS.values())),
    ids=[f"{a}-{s}" for a, s in itertools.product(ADVANTAGES, SETTINGS)],
)
def test_a_batch_without_answer_tokens_is_one_error(
    advantage: str,
    settings: dict[str, Any],
    untouched: tuple[Model, dict[str, torch.Tensor], SequenceSample],
) -> None:
    teachers = settings.get("teachers", {})
    does = interface(
        advantage=estimator(advantage), **{k: v for k, v in settings.items() if k != "teachers"}
    )
    object.__setattr__(does, "teachers", teachers)
    model, before, data = untouched
    with golden.raises(DataError) as refused:
        does.train_step(model, data, WHOLE)
    assert refused.value.where == PROMPT_MASK
    assert all(torch.equal(x, before[name]) for name, x in weights_of(model).items())


def test_a_critic_s_batch_is_checked_likewise_and_rewards_first() -> None:
    data = all_prompt(batch())
    settings = PPOSettings(advantage=estimator("gae"))
    with golden.raises(DataError):
        prepare_experience(data, settings, kl_coef=0.0, ranks=DataParallel())
    none = torch.full_like(data.data["rewards"], float("nan"))
    unscored = SequenceSample(data.meta, {**data.data, "rewards": none})
    with golden.raises(DataError):
        prepare_experience(unscored, settings, kl_coef=0.0, ranks=DataParallel())
