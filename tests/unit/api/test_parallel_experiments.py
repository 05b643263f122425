"""Experiments laid out over model workers: pools, halves, copies and hooks, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
from changed_settings import changed

from experiments.algorithm import GRPO, PPO
from experiments.compose import RLExperiment
from experiments.grpo_math import grpo_math
from experiments.placement import Split
from experiments.ppo_math import ppo_math, ppo_math_split
from experiments.schedule import OneStepOff
from experiments.sft import sft_math
from realsys.api.dataflow import OffloadHook, ParamReallocHook
from realsys.api.errors import ConfigError
from realsys.api.experiment import Experiment
from realsys.api.model import ModelName
from realsys.api.options import LoRAOptions, ModelOptions

ACTOR = ModelName("actor")


def setup(experiment: Experiment):
    """The resolved configuration of an experiment without problems."""
    assert list(experiment.problems()) == []
    config = experiment.initial_setup().lazy_init()
    assert experiment.scheduling_setup().model_worker.count == len(config.model_worker)
    return config


def shards(experiment: Experiment) -> list[list[str]]:
    """What each worker holds: ``actor@0/d2t1p1#0``."""
    return [[str(s.id) for s in worker.shards] for worker in setup(experiment).model_worker]


def call(experiment: Experiment, name: str):
    return setup(experiment).graph()[name]


PLACEMENT = ("n_model_workers", "pools", "allocation")


def ppo(**settings: Any) -> RLExperiment:
    """``ppo-math`` with members of its roles, its placement and its algorithm, and whole fields."""
    dotted: dict[str, Any] = {}
    for role in ("actor", "critic", "ref", "task"):
        dotted |= {f"{role}.{name}": v for name, v in settings.pop(role, {}).items()}
    if settings.pop("placement", "shared") == "split":
        dotted["placement"] = Split()
    dotted |= {f"placement.{name}": settings.pop(name) for name in PLACEMENT if name in settings}
    if "ref_ema_eta" in settings:
        dotted["algorithm.ref_ema_eta"] = settings.pop("ref_ema_eta")
    made: RLExperiment = changed(ppo_math(), {**dotted, **settings})
    return made


def told(experiment: Experiment) -> list[str]:
    found: list[ConfigError] = []
    try:
        for problem in experiment.problems():
            found.append(problem)
    except ConfigError as error:
        found += getattr(error, "problems", (error,))
    return [f"{p.what} | {p.where} | {p.fix}" for p in found]


# ---- shared -------------------------------------------------------------------------------------------


def test_without_settings_all_roles_share_one_worker() -> None:
    assert shards(ppo_math()) == [
        ["actor@0/d1t1p1#0", "critic@0/d1t1p1#0", "ref@0/d1t1p1#0", "reward@0/d1t1p1#0"]
    ]


def test_there_are_as_many_workers_as_the_largest_role_needs() -> None:
    assert shards(ppo(actor={"parallel": "d2"}, ref={"parallel": "d4"})) == [
        ["actor@0/d2t1p1#0", "critic@0/d1t1p1#0", "ref@0/d4t1p1#0", "reward@0/d1t1p1#0"],
        ["actor@0/d2t1p1#1", "ref@0/d4t1p1#1"],
        ["ref@0/d4t1p1#2"],
        ["ref@0/d4t1p1#3"],
    ]


def test_workers_that_are_given_are_used_along_the_data_axis() -> None:
    held = shards(ppo(n_model_workers=2, critic={"parallel": "t2"}))
    assert held == [
        ["actor@0/d2t1p1#0", "critic@0/d1t2p1#0", "ref@0/d2t1p1#0", "reward@0/d2t1p1#0"],
        ["actor@0/d2t1p1#1", "critic@0/d1t2p1#1", "ref@0/d2t1p1#1", "reward@0/d2t1p1#1"],
    ]


def test_a_role_runs_on_the_first_workers_of_its_pool() -> None:
    experiment = ppo(
        pools={"left": "2", "right": "2"},
        actor={"pool": "left"},
        critic={"pool": "right", "parallel": "d1"},
        ref={"pool": "right"},
    )
    assert shards(experiment) == [
        ["actor@0/d2t1p1#0", "reward@0/d1t1p1#0"],
        ["actor@0/d2t1p1#1"],
        ["critic@0/d1t1p1#0", "ref@0/d2t1p1#0"],
        ["ref@0/d2t1p1#1"],
    ]
    assert setup(experiment).pools == {"left": (0, 1), "right": (2, 3)}


# ---- split --------------------------------------------------------------------------------------------


def test_the_split_experiment_needs_no_setting() -> None:
    assert shards(ppo_math_split()) == [
        ["actor@0/d1t1p1#0", "ref@0/d1t1p1#0"],
        ["critic@0/d1t1p1#0", "reward@0/d1t1p1#0"],
    ]
    assert ppo_math_split().algorithm.critic_warmup_steps > 0


@pytest.mark.parametrize(("n", "left"), [(2, 1), (3, 2), (5, 3), (8, 4)])
def test_split_halves_the_workers_and_wastes_none(n: int, left: int) -> None:
    pools = setup(ppo(placement="split", n_model_workers=n, **batch(48))).pools
    assert pools == {"left": tuple(range(left)), "right": tuple(range(left, n))}


def test_halves_are_as_large_as_the_roles_layouts() -> None:
    experiment = ppo(placement="split", actor={"parallel": "d4"}, critic={"parallel": "d2"})
    assert setup(experiment).pools == {"left": (0, 1, 2, 3), "right": (4, 5)}
    # ref names no layout: it takes the whole of the left half
    assert shards(experiment)[3] == ["actor@0/d4t1p1#3", "ref@0/d4t1p1#3"]


def test_split_halves_follow_an_allocation_too() -> None:
    experiment = ppo(placement="split", allocation="actor:d2,critic_train:t2@right")
    assert setup(experiment).pools == {"left": (0, 1), "right": (2, 3)}


def test_pools_of_ones_own_take_the_place_of_the_halves() -> None:
    experiment = ppo(placement="split", pools={"left": "1", "right": "2"}, **batch(64))
    assert shards(experiment)[1:] == [
        ["critic@0/d2t1p1#0", "reward@0/d1t1p1#0"],
        ["critic@0/d2t1p1#1"],
    ]
    golden.check(told(ppo(placement="split", pools={"left": "1"}))[0])


def test_one_worker_can_t_be_split() -> None:
    (problem,) = told(ppo(placement="split", n_model_workers=1))
    golden.check(problem)


def test_split_without_a_critic_keeps_reference_and_reward_on_the_right() -> None:
    assert shards(replace(grpo_math(), placement=Split(n_model_workers=2))) == [
        ["actor@0/d1t1p1#0"],
        ["ref@0/d1t1p1#0", "reward@0/d1t1p1#0"],
    ]


def batch(n: int) -> dict[str, int]:
    return {"train_bs_n_seqs": n}


# ---- copies and hooks ---------------------------------------------------------------------------------


def test_a_call_in_another_layout_runs_on_a_copy_that_is_filled_before() -> None:
    experiment = ppo(allocation="actor_train:t2,actor_gen:d2")
    generate, train = call(experiment, "actor_gen"), call(experiment, "actor_train")
    assert generate.model_name == ModelName("actor", 1)
    assert generate.pre_hooks == (ParamReallocHook(source=ACTOR),)
    assert (train.model_name, train.pre_hooks) == (ACTOR, ())
    config = setup(experiment)
    assert config.resolved.sync_param_pairs == ((ACTOR, ModelName("actor", 1)),)
    held = {s.id.model_name: s for s in config.model_worker[0].shards}
    trained, copy = held[ACTOR], held[ModelName("actor", 1)]
    assert copy.model == trained.model
    assert (copy.backend.type_, dict(copy.backend.args)) == ("inference", {})
    # Held-out questions go where answers are sampled.
    assert (trained.eval_dataset, copy.eval_dataset is not None) == (None, True)


def test_a_call_on_other_workers_is_a_copy_too_and_equal_layouts_share_one() -> None:
    pools = {"left": "1", "right": "1"}
    experiment = ppo(pools=pools, allocation="actor:d1@left,critic_inf:d1@left,critic:d1@right")
    assert call(experiment, "critic_inf").model_name == ModelName("critic", 1)
    assert call(experiment, "actor_gen").model_name == ACTOR
    nested = ppo(pools={"all": "2", "one": "0-0"}, allocation="actor:d2@all,critic:d1@one")
    assert {n.model_name.replica_id for n in setup(nested).model_rpcs} == {0}


def test_the_reference_can_follow_the_actor() -> None:
    train = call(ppo(ref_ema_eta=0.1), "actor_train")
    assert train.post_hooks == (ParamReallocHook(target=ModelName("ref"), eta=0.1),)


def test_a_role_that_offloads_does_so_after_each_of_its_calls() -> None:
    config = setup(ppo(actor={"offload": True}, allocation="actor_gen:d2", ref_ema_eta=0.5))
    hooks = {c.name: [type(h) for h in c.post_hooks] for c in config.model_rpcs}
    assert hooks["actor_gen"] == [OffloadHook]
    assert hooks["actor_train"] == [ParamReallocHook, OffloadHook]
    assert hooks["ref_inf"] == hooks["critic_train"] == []


def test_staleness_reaches_the_master() -> None:
    config = setup(ppo(schedule=OneStepOff()))
    assert config.master_worker[0].max_staleness == 1
    assert setup(ppo()).master_worker[0].max_staleness == 0


# ---- settings that backends take -----------------------------------------------------------------------


def test_settings_that_are_on_reach_the_backend_and_those_that_are_off_do_not() -> None:
    lora = LoRAOptions(rank=4)
    experiment = ppo(
        actor={"lora": lora, "cpu_offload": True},
        critic={"backend": "megatron", "recompute": True},
        allocation="actor_gen:d2",
    )
    backends = {str(s.id.model_name): s.backend for s in setup(experiment).model_worker[0].shards}
    assert sorted(backends["actor@0"].args) == ["cpu_offload", "lora", "optimizer"]
    assert backends["actor@0"].args["lora"]["rank"] == 4
    assert sorted(backends["critic@0"].args) == ["optimizer", "recompute"]
    assert sorted(backends["actor@1"].args) == ["lora"]  # it holds base and adapters
    assert dict(backends["ref@0"].args) == {}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"backend": "megatron", "cpu_offload": True}, "backend 'megatron' has no cpu_offload"),
        ({"backend": "megatron", "lora": LoRAOptions(rank=2)}, "backend 'megatron' has no lora"),
    ],
)
def test_a_setting_that_the_backend_lacks_is_refused(settings: dict, what: str) -> None:
    (problem,) = [p for p in told(ppo(actor=settings)) if "has no" in p]
    assert problem.startswith(what)


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"actor": {"parallel": "t3"}}, "4 attention heads"),
        ({"actor": {"parallel": "t4"}}, "2 key/value heads"),
        ({"actor": {"parallel": "p2"}}, "pipeline"),
        ({"actor": {"parallel": "p2", "backend": "megatron"}}, "3 layers"),
        ({"allocation": "actor_gen:p2"}, "3 layers"),
        ({"allocation": "reward:t2"}, "role 'reward' has no weights to split"),
    ],
)
def test_a_layout_that_does_not_divide_the_built_in_model_is_refused(
    settings: dict, what: str
) -> None:
    found = told(ppo(**settings))
    assert any(what in problem and "layout" in problem for problem in found), found


def test_every_mistake_is_told_at_once() -> None:
    found = told(
        ppo(
            actor={"parallel": "2x2"},
            pools={"left": "0"},
            allocation="actor_gn:d2",
            task={"reward": "no_such_rule"},
        )
    )
    for what in ("'2x2'", "'0' is not a set", "'actor_gn'", "'no_such_rule'"):
        assert any(what in problem for problem in found), found


def test_a_batch_must_divide_on_the_ranks_that_train() -> None:
    (problem,) = told(ppo(actor={"parallel": "d3"}, ref={"parallel": "d5"}))
    assert "4 minibatches on 3 data-parallel ranks" in problem
    (problem,) = told(ppo(allocation="actor_gen:d5,critic_train:d3"))
    assert "on 3 data-parallel ranks" in problem
    assert "critic.parallel or placement.allocation" in problem


def test_a_reference_follows_an_actor_with_the_same_weights_only(tmp_path: Path) -> None:
    (problem,) = told(ppo(ref_ema_eta=0.1, actor={"lora": LoRAOptions(rank=4)}))
    assert "rank 4, the reference's 0" in problem
    equal = {"lora": LoRAOptions(rank=4)}
    assert told(ppo(ref_ema_eta=0.1, actor=equal, ref=equal)) == []
    sizes = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    found = told(ppo(ref_ema_eta=0.1, ref={"path": str(tmp_path)}))
    assert any("the reference's weights" in problem for problem in found)
    found = told(ppo(ref={"path": str(tmp_path)}))
    assert not any("reference's weights" in problem for problem in found)


def test_megatron_needs_a_family_that_it_knows_in_every_layout(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    folder = str(tmp_path)
    for backend, refused in (("megatron", True), ("fsdp", False)):
        found = told(ppo(critic={"path": folder, "backend": backend}))
        assert any("'gpt2' can't be" in problem for problem in found) is refused


def test_algorithm_and_roles_must_agree() -> None:
    assert "critic" not in setup(ppo(algorithm=GRPO())).resolved.instantiate
    (problem,) = told(replace(grpo_math(), algorithm=PPO()))
    golden.check(problem)
    (problem,) = told(replace(grpo_math(), group_size=1))
    assert "nothing to compare" in problem


def test_fine_tuning_has_one_model_and_no_pools() -> None:
    experiment = replace(sft_math(), model=ModelOptions(parallel="d2", pool="left", offload=True))
    golden.check([problem.partition(" |")[0] for problem in told(experiment)])
    assert shards(replace(sft_math(), model=ModelOptions(parallel="t2"))) == [
        ["model@0/d1t2p1#0"],
        ["model@0/d1t2p1#1"],
    ]


@pytest.mark.parametrize(
    "recipe", [ppo_math, ppo_math_split, grpo_math], ids=lambda recipe: recipe.__name__
)
def test_the_product_of_the_preparation_starts_every_role(
    recipe: Callable[[], RLExperiment],
) -> None:
    config = recipe().with_prepared("sft", "/models/start").initial_setup()
    paths = {s.model.args["path"] for worker in config.model_worker for s in worker.shards}
    assert paths == {"/models/start"}


def test_each_rank_must_have_a_held_out_record() -> None:
    """One without ended the run at its first evaluation."""
    few, enough, none = ({"eval_size": n} for n in (3, 4, 0))
    parallel = {"parallel": "d4"}
    for where, experiment in {
        "actor.parallel": ppo(actor=parallel, task=few),
        "placement.allocation": ppo(allocation="actor_gen:d4", task=few),
        "model.parallel": changed(sft_math(), {"task.eval_size": 3, "model.parallel": "d4"}),
    }.items():
        found = told(experiment)
        words = "3 held-out records do not give one to each of 4 data-parallel ranks"
        assert any(words in p and f"eval_size and {where} |" in p for p in found), found
    assert told(ppo(actor=parallel, task=enough)) == []
    assert told(ppo(actor=parallel, task=none)) == []
