"""The rules of docs/rewards.md, as a user launches them, in a synchronous and an asynchronous run."""

from __future__ import annotations

from pathlib import Path

from doc_pages import DocPage, in_folder
from near import near
from real_trials import SMALL_PPO, Trials, explain, metrics_of

from realsys.trial.trial_state import State

PAGE = DocPage("rewards.md")
STEPS = 3
SHORT = (
    *SMALL_PPO,
    f"exp_ctrl.benchmark_steps={STEPS}",
    "sft.init.hidden_size=32",
    "sft.init.num_layers=1",
    "sft.init.num_heads=2",
    "sft.init.num_kv_heads=1",
    "sft.task.train_size=480",
    "sft.task.eval_size=0",
    "sft.scheduling.model_worker.cpu=1",
)
PARTS = {"worked", "worked/steps", "worked/cut", "worked/correct", "brief", "on_topic"}


def test_the_page_runs_as_written(module_trials: Trials, tmp_path: Path) -> None:
    PAGE.write_code(tmp_path, "my_rewards.py")
    found = PAGE.commands("launch", "my_rewards.py")
    assert len(found) == 3
    for number, (experiment, *words) in enumerate(found):
        given = in_folder(tmp_path, words)
        files = module_trials.launch(experiment, f"run{number}", *given, *SHORT)
        view = module_trials.wait(files)
        assert view.state is State.COMPLETED, explain(files, view)
        rows = [row for row in metrics_of(files) if "critic/score/mean" in row]
        assert len(rows) == STEPS, words
        where = "rollout/reward/" if "schedule=async" in words else "rew_inf/reward/"
        parts = {"correct", "steps", "cut"} if number == 0 else PARTS
        for row in rows:
            found = {name.removeprefix(where): row[name] for name in row if name.startswith(where)}
            assert set(found) == parts
            assert all(0 <= value <= 1 for value in found.values())
        if number == 1:  # the mean that is trained on is the weighted sum of what is logged
            for row in rows:
                given_mean = (
                    row[f"{where}worked"]
                    + 0.1 * row[f"{where}brief"]
                    + 0.05 * row[f"{where}on_topic"]
                )
                assert row["critic/score/mean"] == near(given_mean)
