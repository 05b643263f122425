"""Whole trials whose answers are scored by reward workers, of which one is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_trials import Trials, explain, make_policy, metrics_of, small_ppo, weights_of

from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

STEPS = 3
NUM_ANSWERS = STEPS * 8 * 2  # steps, questions, answers to each
# Notes which process scored an answer, and takes long enough for one to be killed meanwhile.
RULE = """
import os, pathlib, sys, time
from realsys.api.registry import register_reward
from realsys.rewards.math_verify import math_verify_reward

def noted(response, answer):
    scorer = "-".join([*sys.argv[1:3], str(os.getpid())])  # reward_worker-0-4711
    with open(pathlib.Path({folder!r}, scorer), "a") as file:
        file.write(".")
    time.sleep({pause_s})
    return 0.5 + math_verify_reward(response=response, answer=answer)

register_reward("noted", noted, trusted=True)
"""


@pytest.fixture(scope="module")
def module_trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    trials = Trials(tmp_path_factory.mktemp("reward-workers") / "root")
    yield trials
    trials.end_all()


def launched(trials: Trials, name: str, *settings: str) -> tuple[TrialFiles, Path]:
    """A run of three steps from a policy that is there; and the folder with a file for each scorer."""
    folder = trials.file_root.parent / name
    folder.mkdir()
    rule = folder.with_suffix(".py")
    rule.write_text(RULE.format(folder=str(folder), pause_s=0.05))
    policy = trials.file_root.parent / "policy"
    if not policy.exists():
        make_policy(policy)
    files = trials.launch(
        "grpo-math",
        name,
        *small_ppo("task.eval_size=0"),
        f"actor.path={policy}",
        f"exp_ctrl.benchmark_steps={STEPS}",
        *("--import", str(rule), "task.reward=noted"),
        *settings,
    )
    return files, folder


def scorers(folder: Path) -> dict[str, int]:
    """Number of answers scored by each process: ``reward_worker-0-4711``."""
    return {file.name: len(file.read_text()) for file in folder.iterdir()}


def kill_one(folder: Path) -> str:
    """Kills a reward worker while it scores; returns its name."""
    deadline_s = time.monotonic() + 240
    while not scorers(folder):
        assert time.monotonic() < deadline_s, "nothing was scored"
        time.sleep(0.02)
    (killed, *_) = scorers(folder)
    os.kill(int(killed.rpartition("-")[2]), signal.SIGKILL)
    return killed


def check_scores(trials: Trials, files: TrialFiles, folder: Path, killed: str) -> None:
    """All answers were scored, by reward workers alone; the killed one was started again."""
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    by = scorers(folder)
    assert {name.rpartition("-")[0] for name in by} <= {"reward_worker-0", "reward_worker-1"}
    assert len(by.keys() - {killed}) >= 1
    assert sum(by.values()) >= NUM_ANSWERS
    log = (files.attempt(1).logs / "supervisor.log").read_text()
    assert "worker down worker=" + "/".join(killed.split("-")[:2]) in log
    rows = [row for row in metrics_of(files) if "critic/score/mean" in row]
    assert len(rows) == STEPS
    assert all(float(str(row["critic/score/mean"])) >= 0.5 for row in rows), "none scored 0"
    assert "set aside" not in " ".join(p.read_text() for p in files.attempt(1).logs.iterdir())


def test_with_two_of_which_one_is_killed_a_run_has_the_same_bits(module_trials: Trials) -> None:
    alone, by_itself = launched(module_trials, "alone")
    files, folder = launched(module_trials, "two", "reward_workers=2")
    check_scores(module_trials, files, folder, kill_one(folder))
    view = module_trials.wait(alone)
    assert view.state is State.COMPLETED, explain(alone, view)
    assert list(scorers(by_itself).values()) == [NUM_ANSWERS]
    assert weights_of(files, "actor") == weights_of(alone, "actor")


def test_rollout_workers_use_them_too(module_trials: Trials) -> None:
    files, folder = launched(module_trials, "async", "reward_workers=2", "schedule=async")
    check_scores(module_trials, files, folder, kill_one(folder))
