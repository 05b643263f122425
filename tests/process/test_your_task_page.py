"""The task of docs/your_task.md, from nothing, on each schedule that the page names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_trials import Trials, explain, metrics_of

from realsys.trial.trial_state import State

pytestmark = pytest.mark.process

PAGE = (Path(__file__).parents[2] / "docs" / "your_task.md").read_text()
STEPS = 4
SMALL = (
    "sft.init.hidden_size=32",
    "sft.init.num_layers=1",
    "sft.init.num_heads=2",
    "sft.init.num_kv_heads=1",
    "sft.task.train_size=480",
    "sft.task.eval_size=0",
    "scheduling.model_worker.cpu=1",
    "task.train_size=64",
    "task.eval_size=8",
    "train_bs_n_seqs=8",
    "group_size=4",
    "gen.max_new_tokens=6",
    f"exp_ctrl.benchmark_steps={STEPS}",
)


@pytest.fixture(scope="module")
def module_trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """One file root for all: the starting policy is made once."""
    trials = Trials(tmp_path_factory.mktemp("your_task") / "root")
    yield trials
    trials.end_all()


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's file."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(block.strip().splitlines()) <= 40
    for call in ("actor_gen", "rew_inf", "actor_train", "inference"):
        assert call not in block
    path = tmp_path_factory.mktemp("task") / "backwards.py"
    path.write_text(block)
    return path


def commands() -> list[list[str]]:
    """Words of the page's launches behind ``launch``."""
    lines = re.findall(r"^realsys launch (.*backwards\.py.*)$", PAGE, flags=re.MULTILINE)
    return [line.partition("#")[0].split() for line in lines]


def test_the_page_runs_as_written_on_every_schedule(module_trials: Trials, code: Path) -> None:
    """One after another under one file root: the starting policy is made once."""
    for number, (experiment, *words) in enumerate(commands()):
        given = [str(code) if word == code.name else word for word in words]
        given = [re.sub("save_freq_steps=10", "save_freq_steps=2", word) for word in given]
        files = module_trials.launch(experiment, f"run{number}", *given, *SMALL)
        view = module_trials.wait(files)
        assert view.state is State.COMPLETED, explain(files, view)
        rows = [row for row in metrics_of(files) if "actor/actor_loss" in row]
        assert len(rows) == STEPS, words
        if "auto_eval=true" in words:
            found = (files.root / "evaluations.jsonl").read_text().splitlines()
            assert found, "saved checkpoints were evaluated"


def test_a_rewarded_answer_is_one_that_the_task_says(module_trials: Trials, code: Path) -> None:
    """By hand: the metrics' reward is the mean of the page's ``score`` over the answers."""
    files = module_trials.files("grpo-backwards", "run0")
    rows = [row for row in metrics_of(files) if "critic/score/mean" in row]
    means = [float(row["critic/score/mean"]) for row in rows]
    assert len(means) == STEPS
    # Shares of three letters, over 8 × 4 answers.
    for mean in means:
        assert 0 <= mean <= 1
        assert mean * 96 == pytest.approx(round(mean * 96), abs=1e-3)
