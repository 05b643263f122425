"""Whole trials with named makers and trainers: several shapes, a lost maker, a lost trainer, a replay."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from paced import Pace
from real_trials import (
    SMALL_PPO,
    SMALL_PPO_STEPS,
    Trials,
    explain,
    make_policy,
    metrics_of,
    small_ppo,
    trained_ids,
    wait_until,
    weights_of,
    worker_pid,
)

from realsys.observability.metrics import read_metrics
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

THREE_BY_TWO = (
    "schedule.makers={maker_0: 'trainer_0', maker_1: 'trainer_0, trainer_1', maker_2: 'trainer_1'}",
    "schedule.trainers={trainer_0: 'maker_0, maker_1, maker_2', trainer_1: 'maker_0, maker_1, maker_2'}",
    "schedule.buffer_limit=8",
    "schedule.update_steps=2",
    "schedule.max_staleness=3",
)
# Each trainer has all weights and feeds a maker of its own.
TWO_BY_TWO = (
    "schedule.makers={maker_0: trainer_0, maker_1: trainer_1}",
    "schedule.trainers={trainer_0: maker_0, trainer_1: maker_1}",
    "actor.backend=megatron",
    "critic.backend=megatron",
    "schedule.max_staleness=2",
)


@pytest.fixture(scope="module")
def module_trials(tmp_path_factory: pytest.TempPathFactory):
    trials = Trials(tmp_path_factory.mktemp("detached") / "root")
    yield trials
    trials.end_all()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy") / "two", num_heads=4, num_kv_heads=2)


def column(files: TrialFiles, name: str) -> list[float]:
    """A metric's values, of the steps that have it."""
    rows = read_metrics(files.phase(files.root).metrics)
    return [float(row[name]) for row in rows if name in row]


def assert_each_trained_once(files: TrialFiles, *, num_steps: int) -> None:
    assert set(Counter(trained_ids(files)).values()) == {1}
    assert len(trained_ids(files)) == 8 * num_steps


def test_three_makers_two_trainers_and_one_maker_is_killed(
    module_trials: Trials, policy: Path, tmp_path: Path
) -> None:
    pace = Pace(tmp_path, 1.2)  # it has not ended before both are started again
    longer = small_ppo("task.train_size=64")
    words = (f"actor.path={policy}", *THREE_BY_TWO, *longer, *pace.words)
    files = module_trials.launch("ppo-math-detached", "three", *words)
    view = module_trials.wait_for_step(files, 3)
    for worker in ("generation_server/1", "rollout_worker/1"):
        os.kill(worker_pid(view, worker), signal.SIGKILL)
    restarts = files.attempt(1).restarts
    wait_until(
        files, lambda _: restarts.exists() and restarts.read_text().count("\n") == 2, timeout_s=120
    )
    pace.set(0.0)
    done = module_trials.wait(files, timeout_s=240)
    assert (done.state, done.attempt) == (State.COMPLETED, 1), explain(files, done)
    assert_each_trained_once(files, num_steps=2 * SMALL_PPO_STEPS)
    assert max(column(files, "actor/staleness/max")) == 3
    told = [json.loads(line) for line in restarts.read_text().splitlines()]
    assert sorted(row["worker"] for row in told) == ["generation_server/1", "rollout_worker/1"]
    made = files.phase(files.root).rows_of(1).root / "rollouts"
    rows = {p.stem: p.read_text().splitlines() for p in sorted(made.glob("*.jsonl"))}
    assert sorted(rows) == ["0", "1", "2"]
    assert all(rows.values()), "every maker has made something"


def test_each_trainer_feeds_its_maker_and_a_lost_trainer_costs_nothing(
    module_trials: Trials, policy: Path, tmp_path: Path
) -> None:
    pace = Pace(tmp_path, 0.7)  # it has not ended before the trainer is lost
    words = (f"actor.path={policy}", *TWO_BY_TWO, *SMALL_PPO, *pace.words)
    files = module_trials.launch("ppo-math-detached", "two", *words)
    view = module_trials.wait_for_step(files, 3)
    os.kill(worker_pid(view, "model_worker/1"), signal.SIGKILL)
    view = module_trials.wait(files, timeout_s=120)
    assert view.state is State.FAILED, explain(files, view)
    pace.set(0.0)
    module_trials.resume(files)
    view = module_trials.wait(files, timeout_s=240)
    assert view.state is State.COMPLETED, explain(files, view)
    assert_each_trained_once(files, num_steps=SMALL_PPO_STEPS)
    assert max(column(files, "actor/staleness/max")) <= 2


def test_a_replay_trains_the_same_weights(module_trials: Trials, policy: Path) -> None:
    files = module_trials.launch(
        "ppo-math-detached",
        "once",
        f"actor.path={policy}",
        "schedule.max_staleness=2",
        "schedule.staleness_policy=drop",
        *SMALL_PPO,
    )
    view = module_trials.wait(files, timeout_s=240)
    assert view.state is State.COMPLETED, explain(files, view)
    told = module_trials.run("replay", "ppo-math-detached/once", "--trial", "again", timeout_s=240)
    assert told.returncode == 0, told.stderr
    assert "the same weights," in told.stderr
    again = module_trials.files("ppo-math-detached", "again")
    assert trained_ids(again) == trained_ids(files)
    for role in ("actor", "critic"):
        assert weights_of(again, role) == weights_of(files, role)
    learnt = [
        [{k: v for k, v in row.items() if not k.startswith("rollout/")} for row in metrics_of(run)]
        for run in (files, again)
    ]
    assert learnt[0] == learnt[1]
