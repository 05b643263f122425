"""The programs of docs/code_tasks.md, scored by their tests in the sandbox, as a user launches them."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import DocPage, in_folder
from real_trials import Trials, explain, metrics_of, small_ppo

from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

PAGE = DocPage("code_tasks.md")
STEPS = 3
SMALL = (*small_ppo("gen.max_new_tokens=24"), f"exp_ctrl.benchmark_steps={STEPS}")
SMALL_SFT = (
    "sft.init.hidden_size=32",
    "sft.init.num_layers=1",
    "sft.init.num_heads=2",
    "sft.init.num_kv_heads=1",
    "sft.task.train_size=480",
    "sft.task.eval_size=0",
    "sft.scheduling.model_worker.cpu=1",
)


def finished(trials: Trials, experiment: str, name: str, *words: str) -> TrialFiles:
    files = trials.launch(experiment, name, *words)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


def assert_scored_by_tests(files: TrialFiles, *, where: str) -> None:
    rows = [row for row in metrics_of(files) if "critic/score/mean" in row]
    assert len(rows) == STEPS
    shares = [float(str(row[f"{where}tests_passed"])) for row in rows]
    means = [float(str(row["critic/score/mean"])) for row in rows]
    assert all(0 <= share <= 1 for share in shares)
    if where == "rew_inf/reward/":  # of the same answers
        assert shares == pytest.approx(means, abs=1e-6)
    assert "answers_set_aside" not in " ".join(rows[0])


def test_functions_to_write_on_all_schedules_of_the_page(
    module_trials: Trials, tmp_path: Path
) -> None:
    PAGE.write_code(tmp_path, "functions.py")
    found = PAGE.commands("launch", "grpo-functions")
    assert len(found) == 3
    for number, (experiment, *words) in enumerate(found):
        given = in_folder(tmp_path, words)
        files = finished(module_trials, experiment, f"run{number}", *given, *SMALL, *SMALL_SFT)
        is_async = "schedule=async" in words
        assert_scored_by_tests(files, where="rollout/reward/" if is_async else "rew_inf/reward/")


def test_problems_from_a_file(module_trials: Trials, tmp_path: Path) -> None:
    (records,) = PAGE.blocks("json")
    assert len(records.splitlines()) == 2
    (tmp_path / "problems.jsonl").write_text(records * 20)
    build_tiny_llama(
        tmp_path / "MODEL", seed=1, corpus=records.splitlines(), hidden_size=32, num_layers=1,
        num_heads=2, num_kv_heads=1, vocab_size=300,
    )  # fmt: skip
    ((experiment, *words),) = PAGE.commands("launch", "task=file")
    small = [word for word in SMALL if not word.startswith("task.train_size")]
    given = in_folder(tmp_path, words)
    files = finished(module_trials, experiment, "problems", *given, *small)
    assert_scored_by_tests(files, where="rew_inf/reward/")
