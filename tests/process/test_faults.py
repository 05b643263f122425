"""Each way a trial can lose a process: it ends within seconds, leaves none, and says which and why."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from real_trials import LONG_PPO, Trials, explain, worker_pid

from realsys.trial.liveness import processes_of
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = pytest.mark.process


@pytest.fixture
def running(trials: Trials, tiny_policy: Path) -> TrialFiles:
    files = trials.launch("ppo-math", "run", f"actor.path={tiny_policy}", *LONG_PPO)
    trials.wait_for_step(files, 2)
    return files


def assert_nothing_left(files: TrialFiles, *, within_s: float = 240.0) -> None:
    deadline = time.monotonic() + within_s
    while left := processes_of(files.root):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("worker", "how_far"),
    [
        ("master_worker/0", "step done"),  # the last lines of its own log
        ("model_worker/0", "model_worker/0 was lost, no reply to"),  # and which call missed it
    ],
)
def test_kill_9_of_a_worker_ends_the_run_and_names_it(
    trials: Trials, running: TrialFiles, worker: str, how_far: str
) -> None:
    pid = worker_pid(trials.wait_for_step(running, 2), worker)
    os.kill(pid, signal.SIGKILL)
    view = trials.wait(running, timeout_s=60)
    assert view.state is State.FAILED, explain(running, view)
    assert_nothing_left(running)  # the report is written last
    text = trials.run("status", "ppo-math/run").stdout
    for wanted in (worker, "SIGKILL", str(pid), "realsys resume ppo-math/run", how_far):
        assert wanted in text, f"{wanted!r} is not in:\n{text}"


def test_kill_9_of_the_supervisor_takes_the_workers_with_it(
    trials: Trials, running: TrialFiles
) -> None:
    view = trials.wait_for_step(running, 2)
    assert view.supervisor_pid is not None
    os.kill(view.supervisor_pid, signal.SIGKILL)
    assert_nothing_left(running)
    done = trials.run("status", "ppo-math/run", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert "lost" in done.stdout
    assert "realsys resume ppo-math/run" in done.stdout
    assert document["schema"] == 1


def test_stop_gives_up_after_its_grace_and_still_leaves_no_process(
    trials: Trials, running: TrialFiles
) -> None:
    view = trials.wait_for_step(running, 2)
    os.kill(worker_pid(view, "model_worker/0"), signal.SIGSTOP)  # the step can't be finished
    done = trials.run("stop", "ppo-math/run", "--grace", "2")  # itself, it would wait for ever
    assert done.returncode == 0, done.stderr
    assert processes_of(running.root) == []


def test_a_live_trial_is_not_begun_again_and_a_stop_leaves_no_process_behind(
    trials: Trials, running: TrialFiles, tiny_policy: Path
) -> None:
    second = trials.run(
        "launch", "ppo-math", "--trial", "run", f"actor.path={tiny_policy}", *LONG_PPO
    )
    assert second.returncode != 0
    assert "realsys watch ppo-math/run" in second.stderr
    again = trials.run("resume", "ppo-math/run")
    assert again.returncode != 0
    assert "realsys stop ppo-math/run" in again.stderr
    done = trials.run("stop", "ppo-math/run", "--grace", "30")
    assert done.returncode == 0, done.stderr
    assert processes_of(running.root) == []
    assert trials.wait(running).state is State.STOPPED
    again = trials.run("stop", "ppo-math/run")
    assert again.returncode == 0
    assert "stopped" in (again.stdout + again.stderr)
