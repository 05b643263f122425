"""Benchmarks beside the task's own held-out questions: what is asked, and what a plan says of mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden
import pytest

from experiments.compose import RLExperiment
from experiments.ppo_math import ppo_math
from realsys.api.worker_configs import HELD_OUT, Benchmark
from realsys.config.overrides import with_settings
from realsys.planner.memory.memory_of_workers import longest_prompt

EVALUATED = ["auto_eval=true", "exp_ctrl.save_freq_steps=5"]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Five questions."""
    path = tmp_path / "words.jsonl"
    rows = [{"prompt": f"What is {n} and {n}?", "answer": str(2 * n)} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(*given: str) -> RLExperiment:
    made: RLExperiment = with_settings(ppo_math(), words=[*EVALUATED, *given])
    return made


def asked(experiment: RLExperiment) -> dict[str, Benchmark]:
    ready = experiment.with_prepared("sft", "/models/start")
    (evaluator,) = ready.initial_setup().evaluator
    return dict(evaluator.benchmarks)


def problems(experiment: RLExperiment) -> list[tuple[str, str]]:
    return [(p.where, p.fix) for p in experiment.problems()]


def test_all_of_a_benchmarks_file_is_asked(words: Path) -> None:
    made = settings(
        f"benchmarks.words={'math'}", f"benchmarks.words.path={words}", "evaluator.n_of.words=4"
    )
    assert problems(made) == []
    found = asked(made)
    assert list(found) == [HELD_OUT, "words"]
    args = found["words"].dataset.args
    assert (args["eval_path"], args["eval_size"], args["split"]) == (str(words), 5, "test")
    assert (found["words"].n, found[HELD_OUT].n) == (4, 1)


def test_each_benchmark_has_its_own_rule(words: Path) -> None:
    made = settings(
        "task.eval_size=0",
        "benchmarks.words=file",
        f"benchmarks.words.eval_path={words}",
        "benchmarks.words.reward=verifiers",
    )
    found = asked(made)
    assert {name: one.reward for name, one in found.items()} == {"words": "verifiers"}


def test_an_agent_plays_what_it_is_trained_on_and_its_benchmarks(tmp_path: Path) -> None:
    record = {"prompt": "?", "number": 0, "verifiers": {"prompt": []}}
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n")
    made = settings(
        *("schedule=async", "schedule.rollout_request_timeout=77", "task=verifiers"),
        *(f"task.path={tmp_path}/records.jsonl", f"task.eval_path={tmp_path}/records.jsonl"),
        *("task.eval_size=1", "benchmarks.talk=math", "benchmarks.talk.agent=chat"),
        "benchmarks.sums=math",
    )
    found = asked(made)
    own, talk = found[HELD_OUT].player, found["talk"].player
    assert own is not None
    assert talk is not None
    assert (own.agent, talk.agent, found["sums"].player) == ("verifiers", "chat", None)
    assert (own.rollout_request_timeout, talk.env_args) == (77, {"reward": "math_verify"})
    assert own.datasets == (found[HELD_OUT].dataset,)
    shards = made.with_prepared("sft", "/models/start").initial_setup().model_worker[0].shards
    assert {shard.eval_dataset for shard in shards} == {None}, "the trainer has no rule to score by"


def test_a_mixture_as_benchmark_asks_all_of_its_sources(words: Path) -> None:
    made = settings(
        "benchmarks.both=mixture",
        "benchmarks.both.sources.made=math",
        "benchmarks.both.sources.made.eval_size=7",
        "benchmarks.both.sources.words=math",
        f"benchmarks.both.sources.words.path={words}",
        "benchmarks.both.sources.words.max_prompt_len=900",
    )
    assert problems(made) == []
    args = asked(made)["both"].dataset.args
    sizes = {name: source["eval_size"] for name, source in args["sources"].items()}
    assert sizes == {"made": 7, "words": 5}
    assert longest_prompt(args) == 900


def test_mistakes_in_benchmarks_name_the_benchmark(words: Path) -> None:
    found = problems(
        settings(
            "benchmarks.held_out=math",
            "benchmarks.accuracy=math",
            "benchmarks.gone=math",
            "benchmarks.gone.path=/nowhere.jsonl",
            "benchmarks.empty=math",
            "benchmarks.empty.eval_size=0",
            "benchmarks.rule=file",
            f"benchmarks.rule.path={words}",
            "benchmarks.acts=math",
            "benchmarks.acts.agent=external",
            "benchmarks.agent=math",
            "evaluator.n_of.wrds=3",
            "evaluator.n_of.rule=0",
        )
    )
    where = [place for place, _ in found]
    assert {"benchmarks.held_out", "benchmarks.accuracy", "benchmarks.agent"} < set(where)
    assert any(place.startswith("benchmarks.gone.") for place in where)
    assert "benchmarks.empty.eval_size" in where
    assert "benchmarks.acts.agent" in where
    fixes = dict(found)
    assert "benchmarks.rule.reward=math_verify" in fixes["benchmarks.rule.reward"]
    golden.check(fixes["evaluator.n_of.rule"])
    assert "evaluator.n_of.wrds" in where
    assert not any(place.startswith("task") for place in where)


def test_benchmarks_without_evaluation_are_refused() -> None:
    made: RLExperiment = with_settings(ppo_math(), words=["benchmarks.more=math"])
    golden.check(problems(made))


def test_questions_left_out_are_told(words: Path) -> None:
    given: list[Any] = ["benchmarks.words=math", f"benchmarks.words.path={words}"]
    assert not [r for r in settings(*given).remarks(()) if "benchmarks" in r]
    (told,) = [
        r for r in settings(*given, "benchmarks.words.eval_size=2").remarks(()) if "bench" in r
    ]
    golden.check(told)
