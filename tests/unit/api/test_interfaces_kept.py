"""What interfaces keep is found again in a checkpoint, by call, although their settings have changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import golden

from launcher.submit.planning import default_experiment
from realsys.api.dataflow import MFCDef
from realsys.api.errors import CheckpointError
from realsys.api.model import ModelName
from realsys.api.plain import to_plain
from realsys.api.worker_configs import ModelWorker
from realsys.model_worker.shards import Shards

ACTOR = ModelName("actor")


class Keeps:
    """An interface that remembers a number."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]


def calls_of(max_new_tokens: int) -> tuple[MFCDef, ...]:
    options = default_experiment("ppo-math-async")
    longer = replace(options, gen=replace(options.gen, max_new_tokens=max_new_tokens))
    return tuple(longer.initial_setup().model_rpcs)


def settings_of(call: MFCDef) -> str:
    return json.dumps(to_plain(call.interface_impl), sort_keys=True)


def shards_of(calls: tuple[MFCDef, ...], *numbers: int) -> tuple[Shards, list[Keeps]]:
    """The shards with an interface for each setting of the actor's calls."""
    shards = Shards(ModelWorker(model_rpcs=calls), device="cpu")
    kept = []
    settings = dict.fromkeys(settings_of(c) for c in calls if c.role == "actor")
    for text, number in zip(settings, numbers or (0,) * len(settings), strict=True):
        kept.append(Keeps(number))
        shards._interfaces[ACTOR, text] = kept[-1]  # type: ignore[assignment]
    return shards, kept


def test_with_other_settings_each_interface_gets_its_own() -> None:
    written, _ = shards_of(
        calls_of(16), 3, 5
    )  # actor_inf, and actor_train, which asserts a staleness
    state = written.state_dict()
    assert list(state["interfaces"]) == [f"{ACTOR} actor_inf", f"{ACTOR} actor_train"]
    read, kept = shards_of(calls_of(99))
    read.load_state_dict(state, where="here")
    assert [one.number for one in kept] == [3, 5]


def test_a_checkpoint_of_before_named_them_by_their_settings() -> None:
    calls = calls_of(16)
    former = {f"{ACTOR} {settings_of(c)}": {"number": 7} for c in calls if c.role == "actor"}
    read, kept = shards_of(calls)
    read.load_state_dict({"models": {}, "interfaces": former}, where="here")
    assert [one.number for one in kept] == [7, 7]
    other, _ = shards_of(calls_of(99))
    with golden.raises(CheckpointError):
        other.load_state_dict({"models": {}, "interfaces": former}, where="here")
