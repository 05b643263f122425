"""Settings chosen for a real model: what, when not, and who is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
from real_shapes import HALF_A_BILLION, model_folder

from experiments.grpo_math import grpo_math
from experiments.known_results import qwen_gsm8k
from experiments.parts import model_files
from experiments.parts.chosen_settings import (
    MeasuredQuestions,
    StartingModel,
    chosen_for_rl,
    chosen_for_sft,
)
from experiments.recipes import ACTOR, grpo
from experiments.sft import sft_math
from experiments.task import MathTask
from launcher.cli.command_line import run
from launcher.submit.planning import chosen_experiment, make_plan
from realsys.api.options import ModelOptions, OptimizerOptions

SMOL = StartingModel(params=134_515_008, positions=8192, chats=True)
HALF = StartingModel(params=494_032_768, positions=32768, chats=True)
BASE = StartingModel(params=1_543_714_304, positions=4096, chats=False)
SEVEN = StartingModel(params=7_615_616_512, positions=32768, chats=True)
SHORT = StartingModel(params=124_439_808, positions=256, chats=False)
GSM8K = MeasuredQuestions(longest=260, exact=False, total=7473, held_out=1319)
SUMS = MeasuredQuestions(longest=32, exact=True, total=400)
OF_GIVEN_MODELS = {"algorithm.entropy_coef", "algorithm.kl_ctl"}
PPO: dict[str, Any] = {"critic": True, "gpus": True}

# Model, questions, further arguments → part of what is chosen.
RL: tuple[
    tuple[StartingModel, MeasuredQuestions | None, Mapping[str, Any], Mapping[str, Any]], ...
] = (
    (
        SMOL,
        SUMS,
        {},
        {
            "actor.optimizer.lr": 1e-5,
            "task.max_prompt_len": 64,
            "gen.max_new_tokens": 512,
            "group_size": 8,
            "train_bs_n_seqs": 8,
            "task.eval_size": 40,  # a tenth
            "algorithm.ppo_n_minibatches": 1,
            "actor.max_tokens_per_mb": 2048,
            "ref.max_tokens_per_mb": 2048,
        },
    ),
    (
        HALF,
        GSM8K,
        {"gpus": True},
        {
            "actor.optimizer.lr": 3e-6,
            "task.max_prompt_len": 512,  # 260 and a quarter
            "gen.max_new_tokens": 512,
            "group_size": 8,
            "train_bs_n_seqs": 64,
        },
    ),
    (
        SEVEN,
        GSM8K,
        PPO,
        {
            "actor.optimizer.lr": 1e-6,
            "critic.optimizer.lr": 1e-5,
            "task.max_prompt_len": 512,
            "gen.max_new_tokens": 1024,
            "group_size": 1,
            "train_bs_n_seqs": 512,
            "actor.recompute": True,
            "critic.recompute": True,
        },
    ),
    (SEVEN, None, {"gpus": True, "group_size": 16}, {"train_bs_n_seqs": 32}),
    (SHORT, SUMS, {"max_prompt_len": 100}, {"gen.max_new_tokens": 156}),
    (SEVEN, None, {"adapters": frozenset({"actor"})}, {"actor.optimizer.lr": 1e-5}),
    (SMOL, None, {"adapters": frozenset({"actor"})}, {"actor.optimizer.lr": 1e-4}),
    (
        SEVEN,
        None,
        {**PPO, "adapters": frozenset({"critic"})},
        {"actor.optimizer.lr": 1e-6, "critic.optimizer.lr": 1e-4},
    ),
    (BASE, None, {}, {"gen.max_new_tokens": 512}),  # without a chat template
    (BASE, None, {"max_prompt_len": 3900}, {"gen.max_new_tokens": 196}),  # what is left
    (SHORT, None, {"max_prompt_len": 100}, {"gen.max_new_tokens": 156}),
    (SHORT, replace(SUMS, longest=190), {}, {"task.max_prompt_len": 190, "gen.max_new_tokens": 66}),
    (SHORT, None, {"min_new_tokens": 300}, {"gen.max_new_tokens": 300}),
    (SMOL, replace(SUMS, total=10, held_out=3), {"group_size": 2}, {"train_bs_n_seqs": 10}),
)


@pytest.mark.parametrize(("model", "questions", "more", "expected"), RL)
def test_reinforcement_learning_begins_with(model, questions, more, expected):
    asked = {
        "gpus": False,
        "critic": False,
        "adapters": frozenset(),
        "group_size": None,
        "max_prompt_len": 128 if questions is None else None,
        **more,
    }
    made = list(chosen_for_rl(model, questions, **asked))
    found = {one.path: one.value for one in made}
    assert {path: found.get(path) for path in expected} == expected
    if len(expected) > 3:
        assert found == expected
    assert all(one.why for one in made)


def test_fine_tuning_begins_with():
    found = {c.path: c.value for c in chosen_for_sft(HALF, GSM8K, gpus=False, lora=True)}
    assert found == {
        "model.optimizer.lr": 2e-4,
        "task.max_prompt_len": 512,
        "max_answer_len": 1024,
        "model.max_tokens_per_mb": 2048,
    }
    (rate, recompute) = chosen_for_sft(SEVEN, None, gpus=True, lora=False)
    assert (rate.value, recompute.path) == (1e-5, "model.recompute")


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A model of half a billion weights, without a chat template."""
    return model_folder(tmp_path / "model", HALF_A_BILLION)


def test_a_plan_and_its_record_say_what_was_chosen_and_why(real, file_root, capsys):
    words = (f"actor.path={real}", "task.max_prompt_len=16", "task.eval_size=4")
    plan = make_plan("grpo-math", words)
    found = {one.path: one for one in plan.chosen}
    assert found["actor.optimizer.lr"].value == plan.options["actor"]["optimizer"]["lr"] == 3e-6
    golden.check(found["gen.max_new_tokens"].why)
    (train,) = [c for c in plan.phases[-1].config.model_rpcs if c.is_train]
    assert (train.n_seqs, train.mb_spec.max_tokens_per_mb) == (8, 2048)
    assert found["scheduling.model_worker.mem"].value > 8192
    assert "group_size" not in found  # the recipe has it already
    assert run(["plan", "grpo-math", *words]) == 0
    assert "256    494 M weights" in capsys.readouterr().out
    assert run(["show", "--config", "grpo-math", *words]) == 0
    (told,) = [x for x in capsys.readouterr().out.splitlines() if "gen.max_new_tokens" in x]
    assert "256" in told
    golden.check(told)


def test_a_critic_is_chosen_for_too(real, file_root):
    plan = make_plan("ppo-math", (f"actor.path={real}", "train_bs_n_seqs=8"))
    found = {one.path: one.value for one in plan.chosen}
    assert found["critic.optimizer.lr"] == 3e-5
    assert found["critic.max_tokens_per_mb"] == 2048
    assert found["group_size"] == 1


def test_what_the_user_or_a_recipe_gives_stays(real):
    given = [f"actor.path={real}", "actor.optimizer.lr=3e-4", "task.max_prompt_len=16"]
    options, chosen = chosen_experiment("grpo-math", given)
    assert options.actor.optimizer.lr == 3e-4  # the recipe's own, but given
    assert not any(one.path == "actor.optimizer.lr" for one in chosen)
    adam = OptimizerOptions(lr=7e-5)
    recipe = grpo(MathTask(), actor=replace(ACTOR, path=str(real), optimizer=adam))
    found = {one.path: one.value for one in replace(recipe, group_size=16).chosen(())}
    assert "actor.optimizer.lr" not in found
    assert "group_size" not in found
    assert found["train_bs_n_seqs"] == 4  # for 64 answers
    published = replace(qwen_gsm8k(), actor=ModelOptions(path=str(real)))
    assert published.chosen(()) == ()


def test_small_models_keep_the_declared_defaults(real, monkeypatch):
    assert grpo_math().chosen(()) == ()
    monkeypatch.setattr(model_files, "SMALL_PARAMS", 1_000_000_000)
    given = replace(grpo_math(), actor=replace(ACTOR, path=str(real)))
    assert {one.path for one in given.chosen(())} == OF_GIVEN_MODELS


def test_questions_are_measured_and_the_preparing_phase_chooses_too(real, tmp_path):
    path = tmp_path / "q.jsonl"
    rows = [json.dumps({"prompt": "a " * (1 + i % 3), "answer": "1"}) for i in range(50)]
    path.write_text("\n".join(rows))
    options, chosen = chosen_experiment("grpo-math", [f"actor.path={real}", f"task.path={path}"])
    found = {one.path: (one.value, one.why) for one in chosen}
    assert found["task.eval_size"] == (5, "of 50 questions")
    assert options.task.max_prompt_len == int(found["task.max_prompt_len"][0]) <= 64
    sft = sft_math()
    tuned = replace(grpo_math(), sft=replace(sft, model=replace(sft.model, path=str(real))))
    found = {one.path: one.value for one in tuned.chosen(["sft.model.max_tokens_per_mb"])}
    assert "sft.model.max_tokens_per_mb" not in found
    assert found["sft.model.optimizer.lr"] == 2e-5
    assert found["actor.optimizer.lr"] == 3e-6


def test_a_mixture_s_sources_keep_their_questions(real, file_root):
    sources = ("task=mixture", "task.sources.a=math", "task.sources.a.max_prompt_len=16")
    plan = make_plan("grpo-math", (f"actor.path={real}", *sources))
    assert {one.path for one in plan.chosen} >= {"actor.optimizer.lr", "gen.max_new_tokens"}
    assert not any(one.path.startswith("task.") for one in plan.chosen)


@pytest.mark.parametrize("path", ["/nowhere", ""])
def test_a_model_that_can_t_be_read_is_the_checks_business(path):
    made = replace(grpo_math(), actor=ModelOptions(path=path)).chosen(())
    assert {one.path for one in made} <= OF_GIVEN_MODELS


# Recipe and words → entropy bonus, weight of the KL, whether there is a reference.
OBJECTIVES = {
    "grpo-math": ((), 0.0, 0.0),
    "rloo-math": ((), 0.0, 0.0),
    "gspo-math": ((), 0.0, 0.0),
    "cispo-math": ((), 0.0, 0.0),
    "dapo-math": ((), 0.0, 0.0),
    "grpo-math-async": ((), 0.0, 0.0),
    "ppo-math": ((), 0.0, 0.01),
    "ppo-math-async": ((), 0.0, 0.01),
    "grpo-math given": (("algorithm.entropy_coef=0.01", "algorithm.kl_ctl=0.01"), 0.01, 0.01),
    "grpo-math loss": (("algorithm.kl_in=loss",), 0.0, 0.01),
    "grpo-math ema": (("algorithm.ref_ema_eta=0.1",), 0.0, 0.01),
    "grpo-math adaptive": (("algorithm.use_adaptive_kl_ctl=true",), 0.0, 0.01),
    "grpo-math ref": (("ref.offload=true",), 0.0, 0.01),
    "grpo-math target": (("algorithm.entropy_target=0.5",), 0.01, 0.0),
    "grpo-math placed": (("placement.allocation=ref_inf:d1,*:d1",), 0.0, 0.01),
}


@pytest.mark.parametrize("start", ["actor.path", "sft.model.path", ""])
@pytest.mark.parametrize(("recipe", "row"), OBJECTIVES.items())
def test_a_model_of_one_s_own_is_pulled_by_scores_alone(recipe, row, start, real):
    words, entropy, kl = row
    path = (f"{start}={real}",) if start else ()
    options, chosen = chosen_experiment(recipe.split()[0], [*words, *path])
    if not start:  # what is made from scratch keeps its recipe's
        entropy, kl = 0.01, 0.0 if recipe == "dapo-math" else 0.01
    assert (options.algorithm.entropy_coef, options.algorithm.kl_ctl) == (entropy, kl)
    calls = {call.name for call in options._calls}
    assert ("ref_inf" in calls) is (kl > 0)
    told = {one.path for one in chosen if one.why}
    assert ("algorithm.kl_ctl" in told) is bool(start and kl == 0 and recipe != "dapo-math")
    assert not any(one.path.startswith("ref.") for one in chosen if not kl)
