"""The tokenizer of a model made from scratch is trained on its task's texts."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import golden
import pytest

from experiments.sft import SFTExperiment
from experiments.task import Columns, FileTask, GeneratedTask, MathTask, Task, register_task
from experiments.tasks.mixture import Mixture
from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.errors import DataError
from realsys.config.plugin_arguments import argument_problems
from realsys.models.from_scratch.tiny_llama import train_tokenizer
from realsys.models.from_scratch.tokenizer_corpus import texts_of


@pytest.fixture
def planets(monkeypatch: pytest.MonkeyPatch) -> Task:
    """A registered task with words that arithmetic does not have."""
    monkeypatch.setattr(plugin_table, "registered", {kind: {} for kind in registry.BUILTIN})

    @register_task
    @dataclass(frozen=True, kw_only=True)
    class Planets(GeneratedTask):
        """Two words."""

        kind = "planets"

        def question(self, rng: random.Random) -> dict[str, str]:
            return {"prompt": f"jupiter {rng.randrange(10)}", "answer": "saturn"}

        @staticmethod
        def score(response: str, answer: str) -> float:
            return float(response == answer)

    return Planets(train_size=8)


@pytest.fixture
def words(tmp_path: Path) -> FileTask:
    file = tmp_path / "words.jsonl"
    rows = [{"asked": f"neptune {i}", "known": "uranus"} for i in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = Columns(prompt="asked", answer="known")
    return FileTask(path=str(file), columns=columns, eval_size=2, reward="math_verify")


def tokens(task: Task, *texts: str) -> list[list[str]]:
    corpus = texts_of(task.answers("train", max_answer_len=8))
    tokenizer = train_tokenizer(corpus, vocab_size=400)
    return [tokenizer.tokenize(text) for text in texts]


def start_args(task: Task) -> dict[str, Any]:
    args = SFTExperiment(task=task).start("float32").args
    assert list(argument_problems("model", "tiny_llama", args, where="model")) == []
    return dict(args)


def test_words_of_the_task_are_tokens(words: FileTask, planets: Task) -> None:
    assert tokens(planets, "jupiter", "saturn") == [["jupiter"], ["saturn"]]
    assert tokens(words, "neptune", "uranus") == [["neptune"], ["uranus"]]
    mixed = Mixture(sources={"planets": planets, "words": words})
    assert tokens(mixed, "jupiter", "uranus") == [["jupiter"], ["uranus"]]


def test_a_few_words_fill_a_vocabulary(planets: Task) -> None:
    texts = texts_of(planets.answers("train", max_answer_len=8))
    assert len(train_tokenizer(texts, vocab_size=512)) == 512


def test_too_large_a_vocabulary_is_refused_with_the_setting_and_the_largest_that_works(
    planets: Task,
) -> None:
    texts = texts_of(planets.answers("train", max_answer_len=8))
    with golden.raises(DataError) as caught:
        train_tokenizer(texts, vocab_size=50000)
    (most,) = set(re.findall(r"(?:sft\.|: )init\.vocab_size=(\d+)", caught.value.fix))
    assert len(train_tokenizer(texts, vocab_size=int(most))) == int(most)
    with pytest.raises(DataError):
        train_tokenizer(texts, vocab_size=int(most) + 1)


def test_arithmetic_needs_no_other_texts() -> None:
    assert "corpus" not in start_args(MathTask())


def test_the_experiment_names_the_tasks_texts(words: FileTask) -> None:
    corpus = start_args(words)["corpus"]
    assert corpus["args"]["path"] == words.path
    assert "corpus" in start_args(Mixture(sources={"sums": MathTask(), "words": words}))
