"""A run that was stopped, or killed at any moment, ends as the one that nobody disturbed."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from real_trials import (
    SMALL_PPO,
    SMALL_PPO_STEPS,
    Trials,
    explain,
    kill_everything,
    metrics_of,
    trained_ids,
    wait_until,
    weights_of,
)

from launcher.trial_state import State
from realsys.api.trial import TrialFiles

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> TrialFiles:
    trials = Trials(tmp_path_factory.mktemp("undisturbed") / "root")
    files = trials.launch("ppo-math", "whole", f"actor.path={tiny_policy}", *SMALL_PPO)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


def assert_same_run(files: TrialFiles, reference: TrialFiles) -> None:
    assert metrics_of(files) == metrics_of(reference)
    for role in ("actor", "critic"):
        assert weights_of(files, role) == weights_of(reference, role), role
    assert trained_ids(files) == trained_ids(reference)


def test_one_seed_gives_one_run_bit_for_bit(
    trials: Trials, undisturbed: TrialFiles, tiny_policy: Path
) -> None:
    files = trials.launch("ppo-math", "again", f"actor.path={tiny_policy}", *SMALL_PPO)
    assert trials.wait(files).state is State.COMPLETED
    assert_same_run(files, undisturbed)


def test_another_seed_gives_another_run(
    trials: Trials, undisturbed: TrialFiles, tiny_policy: Path
) -> None:
    files = trials.launch("ppo-math", "other", f"actor.path={tiny_policy}", "seed=2", *SMALL_PPO)
    assert trials.wait(files).state is State.COMPLETED
    assert metrics_of(files) != metrics_of(undisturbed)


def test_each_prompt_of_an_epoch_is_trained_exactly_once(undisturbed: TrialFiles) -> None:
    counts = Counter(trained_ids(undisturbed))
    # 24 steps of 8 = 2 epochs of 96.
    assert counts == Counter({f"{epoch}-{index}": 1 for epoch in (0, 1) for index in range(96)})


def test_stop_and_resume_equals_the_undisturbed_run(
    trials: Trials, undisturbed: TrialFiles, tiny_policy: Path
) -> None:
    files = trials.launch("ppo-math", "stopped", f"actor.path={tiny_policy}", *SMALL_PPO)
    trials.wait_for_step(files, 4)
    stopped = trials.run("stop", "ppo-math/stopped")
    assert stopped.returncode == 0, stopped.stderr
    view = trials.wait(files)
    assert view.state is State.STOPPED
    assert 4 <= (view.step or 0) < SMALL_PPO_STEPS, "the run ended before it was stopped"
    trials.resume(files)
    assert trials.wait(files).state is State.COMPLETED
    assert_same_run(files, undisturbed)


@pytest.mark.parametrize("step", [1, 5, 9])
def test_kill_9_of_everything_and_resume_equals_the_undisturbed_run(
    trials: Trials, undisturbed: TrialFiles, tiny_policy: Path, step: int
) -> None:
    files = trials.launch("ppo-math", "killed", f"actor.path={tiny_policy}", *SMALL_PPO)
    trials.wait_for_step(files, step)
    kill_everything(files)
    view = wait_until(files, lambda v: v.state not in State.live(), timeout_s=10)
    assert view.state is State.LOST
    trials.resume(files)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    assert_same_run(files, undisturbed)


def test_a_torn_checkpoint_is_refused_and_the_one_before_it_taken(
    trials: Trials, undisturbed: TrialFiles, tiny_policy: Path
) -> None:
    files = trials.launch("ppo-math", "torn", f"actor.path={tiny_policy}", *SMALL_PPO)
    trials.wait_for_step(files, 7)  # checkpoints after 3 and 6
    kill_everything(files)
    newest = sorted(files.phase(files.root).recover.glob("step-*"))[-1]
    state = newest / "model_worker-0.pt"
    state.write_bytes(state.read_bytes()[:-100])
    wait_until(files, lambda v: v.state not in State.live(), timeout_s=10)
    trials.resume(files)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    log = (files.root / "attempts/0002/logs/master_worker-0.log").read_text()
    assert f"checkpoint refused folder={newest}" in log
    assert_same_run(files, undisturbed)


def test_a_signal_to_the_supervisor_stops_the_trial_after_a_step(
    trials: Trials, tiny_policy: Path
) -> None:
    files = trials.launch("ppo-math", "signalled", f"actor.path={tiny_policy}", *SMALL_PPO)
    view = trials.wait_for_step(files, 2)
    assert view.supervisor_pid is not None
    import os

    os.kill(view.supervisor_pid, signal.SIGTERM)
    view = trials.wait(files)
    assert view.state is State.STOPPED, explain(files, view)
