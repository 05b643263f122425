"""The user stories of docs/your_data.md, as written, on both schedules."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_trials import Trials, explain, metrics_of

from realsys.models.tiny_llama import build_tiny_llama
from realsys.trial.trial_state import State

pytestmark = pytest.mark.process

PAGE = (Path(__file__).parents[2] / "docs" / "your_data.md").read_text()
STEPS = 3
SMALL = (
    "scheduling.model_worker.cpu=1",
    "task.eval_size=8",
    "train_bs_n_seqs=8",
    "group_size=4",
    "gen.max_new_tokens=6",
    f"exp_ctrl.benchmark_steps={STEPS}",
)
SMALL_SFT = (
    "sft.task.eval_size=8",
    "sft.train_bs_n_seqs=8",
    "sft.scheduling.model_worker.cpu=1",
    "sft.exp_ctrl.benchmark_steps=6",
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = [f"{a}{b}{c}" for a in "abcdef" for b in "abcd" for c in "abc"]


@pytest.fixture(scope="module")
def module_trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """One file root for all: the fine-tuned policy is made once."""
    trials = Trials(tmp_path_factory.mktemp("your_data") / "root")
    yield trials
    trials.end_all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, its data in larger numbers, and a model with a chat template."""
    folder = tmp_path_factory.mktemp("data")
    for block, name in zip(blocks("python"), ("words.py", "chats.py"), strict=True):
        assert len(block.strip().splitlines()) <= 40
        (folder / name).write_text(block)
    for block, name in zip(blocks("json"), ("words.jsonl", "chats.jsonl"), strict=True):
        (folder / name).write_text("".join(records(json.loads(block))))
    corpus = [*(folder / "chats.jsonl").read_text().splitlines(), TEMPLATE]
    build_tiny_llama(
        folder / "MODEL", seed=1, corpus=corpus, hidden_size=32, num_layers=1, num_heads=2,
        num_kv_heads=1, vocab_size=300,
    )  # fmt: skip
    config = folder / "MODEL" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return folder


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def records(example: dict[str, Any]) -> Iterator[str]:
    """Records of the shape of the page's, about other words."""
    text = json.dumps(example)
    for number, word in enumerate(WORDS):
        made = re.sub(r"\bbac\b", word[::-1], re.sub(r"\bcab\b", word, text))
        yield made.replace('"level": 1', f'"level": {number % 4}') + "\n"


def test_the_page_shows_its_records(folder: Path) -> None:
    """`realsys data show` of the page, run as a user would."""
    (line,) = re.findall(r"^realsys (data show .*)$", PAGE, flags=re.MULTILINE)
    words = [in_folder(folder, word) for word in line.split()]
    command = [sys.executable, "-m", "launcher.cli.entry", *words, "task.eval_size=8"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "template        the tokenizer's chat template" in done.stdout
    assert "<|user|>Write it backwards: aab<eos>\n<|assistant|>\nknown answer: baa" in done.stdout


def launches(name: str) -> list[list[str]]:
    """Words of the page's launches of one experiment."""
    lines = re.findall(rf"^realsys launch ({name} .*)$", PAGE, flags=re.MULTILINE)
    return [line.partition("#")[0].split() for line in lines]


def in_folder(folder: Path, word: str) -> str:
    """A word whose file is the one in ``folder``."""
    name, equals, value = word.rpartition("=")
    return f"{name}{equals}{folder / value}" if (folder / value).exists() else word


@pytest.mark.parametrize("name", ["grpo-words", "grpo-chats"])
def test_a_story_runs_as_written_on_both_schedules(
    module_trials: Trials, folder: Path, name: str
) -> None:
    found = launches(name)
    assert len(found) == 2
    for number, (experiment, *words) in enumerate(found):
        given = [in_folder(folder, word) for word in words]
        small = SMALL + SMALL_SFT * (name == "grpo-chats")
        files = module_trials.launch(experiment, f"run{number}", *given, *small)
        view = module_trials.wait(files)
        assert view.state is State.COMPLETED, explain(files, view)
        rows = [row for row in metrics_of(files) if "critic/score/mean" in row]
        assert len(rows) == STEPS, words
        means = [float(row["critic/score/mean"]) for row in rows]
        assert all(0 <= mean <= 1 for mean in means)
