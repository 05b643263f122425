"""A real model never gets the built-in toy's defaults without a word; a plan says what it has counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_whole_models import CONFIG, shapes, write

from experiments.parts import model_files, question_files
from experiments.ppo_math import ppo_math
from experiments.sft import sft_math
from experiments.task import MathTask
from launcher.submit.planning import make_plan
from realsys.api.options import ModelOptions
from realsys.data.sources.dataset_arguments import MathRecordsArguments

RL = ("actor.optimizer.lr", "gen.max_new_tokens", "task.eval_size", "scheduling.model_worker.mem")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(model_files, "TOY_PARAMS", 100)
    return write(tmp_path, CONFIG, shapes())


def test_a_real_model_is_told_the_toys_defaults_that_it_would_get(model, file_root):
    words = (f"actor.path={model}", "gen.max_new_tokens=16", "task.max_prompt_len=16")
    (told,) = (w for w in make_plan("ppo-math", words).warnings if "built-in toy" in w)
    for setting in (
        "actor.optimizer.lr=0.0003",
        "task.eval_size=500",
        "scheduling.model_worker.mem=8192",
    ):
        assert setting in told
    assert "max_new_tokens" not in told  # it was set, if to the same value
    assert f"the model in {model} has 1,080 parameters" in told


def test_nothing_is_said_where_all_are_set_or_the_model_is_the_toy(model, monkeypatch):
    short = MathTask(max_prompt_len=32)  # the model has 64 positions
    real = replace(ppo_math(), actor=ModelOptions(path=str(model)), task=short)
    assert not list(real.remarks({*RL, "critic.optimizer.lr"}))
    assert not list(ppo_math().remarks(()))
    monkeypatch.setattr(model_files, "TOY_PARAMS", 10_000_000)
    assert not list(real.remarks(()))


def test_the_preparing_phase_says_it_too(model):
    sft = replace(sft_math(), model=ModelOptions(path=str(model)))
    (told,) = replace(ppo_math(), sft=sft).remarks(
        (*RL, "critic.optimizer.lr", "sft.model.optimizer.lr")
    )
    assert told.startswith("phase sft: ")
    assert "toy: scheduling.model_worker.mem=8192. " in told


def test_a_plan_says_how_many_questions_it_has_counted(model, tmp_path, monkeypatch):
    path = tmp_path / "q.jsonl"
    path.write_text(
        json.dumps({"prompt": "a a a", "answer": "1"})
        + "\n"
        + '{"prompt": "a", "answer": "1"}\n' * 9
    )
    data = MathRecordsArguments(split="train", path=str(path))
    assert not list(question_files.sampled_remarks(data, str(model)))
    monkeypatch.setattr(question_files, "MAX_SAMPLED_QUESTIONS", 4)
    (told,) = question_files.sampled_remarks(data, str(model))
    assert told.startswith(f"3 of 10 questions of {path} were counted")
    assert not list(question_files.sampled_remarks(data, None))  # a made model: counted by workers
