"""Questions of reasoning-gym, with a stand-in for the package: which, how often, scored by whom."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import golden
import pytest

from experiments.tasks import reasoning_gym
from experiments.tasks.reasoning_gym import ReasoningGymTask
from realsys.config import extras
from realsys.data.sources import reasoning_gym_questions
from realsys.data.sources.reasoning_gym_questions import DATASET_SIZE, NUM_DATASETS
from realsys.rewards.reasoning_gym_rule import reasoning_gym_reward, whole_score


class Sums:
    """One question of the stand-in; the scorer reads metadata that JSON could not carry."""

    made = 0

    def __init__(self, seed: int, terms: int) -> None:
        self._seed, self._terms = seed, terms
        Sums.made += 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert 0 <= index < DATASET_SIZE
        rng = random.Random(self._seed + index)
        numbers = tuple(rng.randrange(10) for _ in range(self._terms))
        question = " + ".join(map(str, numbers))
        return {"question": question, "answer": str(sum(numbers)), "metadata": {numbers}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        (numbers,) = entry["metadata"]
        assert isinstance(numbers, tuple)
        return 1.0 if answer == str(sum(numbers)) else 0.01


@dataclass
class SumsConfig:
    """Its arguments, as the package declares them."""

    terms: int = 2
    seed: int | None = None
    size: int = 500


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package ``reasoning_gym`` with two generators."""
    made, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"sums": (Sums, SumsConfig), "long_sums": (Sums, object)}  # type: ignore[attr-defined]

    def create_dataset(name: str, *, size: int, seed: int, terms: int = 2) -> Sums:
        assert size == DATASET_SIZE
        return Sums(seed, terms if name == "sums" else 5)

    made.create_dataset, made.factory = create_dataset, factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", made)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    monkeypatch.setattr(extras, "find_spec", lambda name: SimpleNamespace())
    for cache in (reasoning_gym_questions._entry, reasoning_gym_questions._dataset):
        cache.cache_clear()
    Sums.made = 0


def problems(task: ReasoningGymTask) -> list[str]:
    return [p.what for p in task.problems(batch_size=4, tokenizer_dir=None)]


def test_generators_are_drawn_by_their_weights_with_their_arguments() -> None:
    task = ReasoningGymTask(
        names=("sums", "long_sums"),
        weights=(3.0, 1.0),
        config={"sums": {"terms": 3}},
        train_size=400,
    )
    records = task.records("train", seed=1)
    drawn = Counter(record["generator"] for record in records)
    assert 250 < drawn["sums"] < 350
    assert {record["prompt"].count("+") for record in records if record["generator"] == "sums"} == {
        2
    }
    assert records == task.records("train", seed=1) != task.records("train", seed=2)
    assert Sums.made <= 2 * NUM_DATASETS  # some generators read a dictionary when they are made
    held_out = {record["prompt"] for record in task.records("test", seed=1)}
    assert not held_out & {record["prompt"] for record in records}


def test_a_star_draws_all_but_the_scorers_that_can_be_gamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything = ReasoningGymTask(names=("*",), train_size=60)
    assert everything.drawn == ("long_sums", "sums")
    assert problems(everything) == []
    monkeypatch.setattr(reasoning_gym, "PAYING", {"sums": "it pays for any text"})
    assert everything.drawn == ("long_sums",)
    assert {r["generator"] for r in everything.records("train", seed=1)} == {"long_sums"}
    named = ReasoningGymTask(names=("*", "sums"), train_size=60)
    assert named.drawn == ("sums", "long_sums")  # as it is named
    assert list(everything.remarks(None)) == []
    (told,) = named.remarks(None)
    assert "'sums'" in told
    golden.check(told)
    (wrong,) = problems(ReasoningGymTask(names=("*",), weights=(1.0, 2.0)))
    assert "2 weights for 1" in wrong


def test_the_page_lists_the_scorers_that_can_be_gamed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reasoning_gym.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert rows == dict(reasoning_gym_questions.PAYING)


def test_the_prompt_states_the_form_that_a_scorer_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "REFUSING", {"sums": "Answer with digits."})
    (record,) = ReasoningGymTask(names=("sums",), train_size=1).records("train", seed=1)
    assert record["prompt"].endswith("\nAnswer with digits.")


def test_an_answer_that_only_contains_the_right_one_is_not_paid() -> None:
    class Shared(Sums):
        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            known = entry["answer"]
            return 1.0 if answer == known else len(known) / len(answer) * (known in answer)

    data = Shared(1, 2)
    entry = {"question": "?", "answer": "42"}
    for answer in ("42 or 43", "4,242", "It is not 42."):
        assert whole_score(data, entry, answer) == 0.0
    assert whole_score(data, entry, "42") == 1.0


def test_the_generators_own_scorer_is_asked() -> None:
    (record,) = ReasoningGymTask(names=("sums",), train_size=1).records("train", seed=1)
    right = record["answer"]
    for response in (
        right,
        f" {right}\n",
        f"it is <answer>7x</answer> no <answer>{right}</answer>",
    ):
        assert reasoning_gym_reward(response=response, record=record) == 1.0
    assert reasoning_gym_reward(response="x", record=record) == 0.01


def test_mistakes_are_told_with_the_nearest_name() -> None:
    assert problems(ReasoningGymTask(names=("sums",))) == []
    golden.check(problems(ReasoningGymTask()))
    golden.check(problems(ReasoningGymTask(names=("sum",), config={"long_sum": {}})))
    assert problems(ReasoningGymTask(names=("sums",), weights=(1.0, 2.0))) == [
        "2 weights for 1 generators"
    ]
    unlisted = ReasoningGymTask(names=("long_sums",), config={"long_sums": {"term": 3}})
    (told,) = problems(unlisted)
    assert told.startswith("question(rng) raised TypeError")


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        (
            {"sums": {"term": 3}},
            "generator 'sums' has no argument 'term' | task.config.sums.term | did you mean 'terms'?",
        ),
        (
            {"sums": {"nosuch": 3}},
            "generator 'sums' has no argument 'nosuch' | task.config.sums.nosuch | use one of terms",
        ),
        (
            {"sums": {"seed": 3}},
            "seed of generator 'sums' is set by realsys itself | task.config.sums.seed | leave it out",
        ),
        (
            {"sums": {"size": 3}},
            "size of generator 'sums' is set by realsys itself | task.config.sums.size | leave it out",
        ),
        (
            {"long_sums": {"terms": 3}},
            "no question is of generator 'long_sums', so its arguments are not read | "
            "task.config.long_sums | add it to task.names, or leave it out; did you mean 'sums'?",
        ),
        (
            {"sms": {"terms": 3}},
            "reasoning-gym has no generator 'sms' | task.config.sms | did you mean 'sums'",
        ),
    ],
)
def test_arguments_that_nothing_would_read_are_refused(
    config: dict[str, dict[str, int]], reported: str
) -> None:
    task = ReasoningGymTask(names=("sums",), config=config)
    (problem,) = task.problems(batch_size=4, tokenizer_dir=None)
    assert f"{problem.what} | {problem.where} | {problem.fix}".startswith(reported)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_draws_nothing_is_shown(weight: float) -> None:
    named = ("sums", "long_sums")
    reported = f"weight {weight:g} of generator 'sums'"
    assert problems(ReasoningGymTask(names=named, weights=(weight, 2.0))) == [reported]
    assert problems(ReasoningGymTask(names=("sums",), weights=(weight,))) == [reported]


def test_without_the_package_the_plan_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    (missing,) = ReasoningGymTask(names=("sums",)).problems(batch_size=4, tokenizer_dir=None)
    assert missing.fix == "pip install 'realsys[gym]'"
