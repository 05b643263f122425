"""The two tasks of docs/reasoning_gym.md, as written, on both schedules; their scorers give the reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doc_pages import DocPage, in_folder
from real_trials import Trials, explain, metrics_of, small_ppo

from realsys.trial.trial_state import State

PAGE = DocPage("reasoning_gym.md")
STEPS = 3
SMALL = (
    *small_ppo(),
    f"exp_ctrl.benchmark_steps={STEPS}",
    "sft.init.hidden_size=32",
    "sft.init.num_layers=1",
    "sft.init.num_heads=2",
    "sft.init.num_kv_heads=1",
    "sft.task.train_size=480",
    "sft.task.eval_size=0",
    "sft.scheduling.model_worker.cpu=1",
)


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_the_page_runs_as_written(module_trials: Trials, tmp_path: Path, schedule: str) -> None:
    (settings,) = PAGE.blocks("yaml")
    (tmp_path / "two_tasks.yaml").write_text(settings)
    found = dict(zip(("sync", "async"), PAGE.commands("launch", "two_tasks.yaml"), strict=True))
    experiment, *words = found[schedule]
    assert ("schedule=async" in words) == (schedule == "async")
    given = in_folder(tmp_path, words)
    files = module_trials.launch(experiment, schedule, *given, *SMALL)
    view = module_trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    rows = [row for row in metrics_of(files) if "critic/score/mean" in row]
    assert len(rows) == STEPS
    assert all(0 <= float(str(row["critic/score/mean"])) <= 1 for row in rows)
    lines = files.phase(files.root).samples.read_text().splitlines()
    prompts = " ".join(json.loads(line)["prompt"] for line in lines)
    assert "Spell this word backward" in prompts or "calculat" in prompts.lower()
