"""The task of docs/your_task.md, from nothing, on each schedule that the page names."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import DocPage, in_folder
from real_trials import Trials, explain, metrics_of

from realsys.trial.trial_state import State

PAGE = DocPage("your_task.md")
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the page's file."""
    (block,) = PAGE.blocks("python")
    for call in ("actor_gen", "rew_inf", "actor_train", "inference"):
        assert call not in block
    folder = tmp_path_factory.mktemp("task")
    PAGE.write_code(folder, "backwards.py")
    return folder


def test_the_page_runs_as_written_on_every_schedule(module_trials: Trials, folder: Path) -> None:
    """One after another under one file root: the starting policy is made once."""
    for number, (experiment, *words) in enumerate(PAGE.commands("launch", "grpo-backwards")):
        given = [word.replace("save_freq_steps=10", "save_freq_steps=2") for word in words]
        given = in_folder(folder, given)
        files = module_trials.launch(experiment, f"run{number}", *given, *SMALL)
        view = module_trials.wait(files)
        assert view.state is State.COMPLETED, explain(files, view)
        rows = [row for row in metrics_of(files) if "actor/actor_loss" in row]
        assert len(rows) == STEPS, words
        if "auto_eval=true" in words:
            found = (files.root / "evaluations.jsonl").read_text().splitlines()
            assert found, "saved checkpoints were evaluated"


def test_a_rewarded_answer_is_one_that_the_task_says(module_trials: Trials, folder: Path) -> None:
    """By hand: the metrics' reward is the mean of the page's ``score`` over the answers."""
    files = module_trials.files("grpo-backwards", "run0")
    rows = [row for row in metrics_of(files) if "critic/score/mean" in row]
    means = [float(row["critic/score/mean"]) for row in rows]
    assert len(means) == STEPS
    # Shares of three letters, over 8 × 4 answers.
    for mean in means:
        assert 0 <= mean <= 1
        assert mean * 96 == pytest.approx(round(mean * 96), abs=1e-3)
