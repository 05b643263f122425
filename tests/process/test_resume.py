"""A run that was stopped, or killed at any moment, ends as the one that nobody disturbed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from history_check import check_history, read_history
from paced import Pace
from real_trials import (
    Trials,
    explain,
    kill_everything,
    metrics_of,
    small_ppo,
    trained_ids,
    wait_until,
    weights_of,
)

from realsys.api.plan import read_plan
from realsys.master.checkpoint.recover import read_resumed
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.observability.metrics import read_metrics
from realsys.trial.records import TrialFiles, WorkerStatus, loads
from realsys.trial.trial_state import State

pytestmark = pytest.mark.process

EPOCHS, SIZE, STEPS = 2, 64, 16
STEP_S = 0.7  # to be stopped in its middle, however slow the command that stops it
RUN = small_ppo(f"exp_ctrl.total_train_epochs={EPOCHS}", f"task.train_size={SIZE}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> TrialFiles:
    folder = tmp_path_factory.mktemp("undisturbed")
    trials, quick = Trials(folder / "root"), Pace(folder, 0.0).words
    files = trials.launch("ppo-math", "whole", f"actor.path={tiny_policy}", *RUN, *quick)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    """Of the run that a test disturbs: it has time to, until it lets it hurry."""
    return Pace(tmp_path, STEP_S)


def assert_same_run(files: TrialFiles, reference: TrialFiles) -> None:
    assert metrics_of(files) == metrics_of(reference)
    for role in ("actor", "critic"):
        assert weights_of(files, role) == weights_of(reference, role), role
    assert trained_ids(files) == trained_ids(reference)


def newest_checkpoint(files: TrialFiles) -> Path:
    """Its folder, step-<step>.<attempt>."""
    return sorted(files.phase(files.root).recover.glob("step-*"))[-1]


def assert_told_apart(files: TrialFiles, attempts: int) -> None:
    """Each attempt has rows of its own, and says whose checkpoint it went on from."""
    main = files.phase(files.root)
    told = read_resumed(files, "main")
    assert list(told) == list(range(1, attempts + 1))
    for number, record in told.items():
        assert record.of_attempt < number
        assert main.rows_of(number).metrics.exists()
        if record.of_attempt:
            steps = [row["step"] for row in read_metrics(main.rows_of(record.of_attempt).metrics)]
            assert record.step in steps
    assert os.readlink(main.metrics) == f"rows/{attempts:04d}/metrics.jsonl"
    assert files.attempt(attempts).done("main").exists()
    assert newest_checkpoint(files).name.endswith(f".{attempts}")
    assert check_history(read_history(files.root)) == []


def test_each_prompt_of_an_epoch_is_trained_exactly_once(undisturbed: TrialFiles) -> None:
    counts = Counter(trained_ids(undisturbed))
    # Steps of 8, epochs of 64.
    every = (f"{epoch}-{index}" for epoch in range(EPOCHS) for index in range(SIZE))
    assert counts == Counter(dict.fromkeys(every, 1))
    assert counts.total() == STEPS * 8


def test_a_stop_right_after_a_checkpoint_and_one_right_after_a_resume(
    trials: Trials, undisturbed: TrialFiles, tiny_policy: Path, pace: Pace
) -> None:
    """The step has a checkpoint already: no second one is written, and nothing fails."""
    each = [w.replace("ckpt_freq_steps=3", "ckpt_freq_steps=1") for w in RUN]
    files = trials.launch("ppo-math", "stopped", f"actor.path={tiny_policy}", *each, *pace.words)
    trials.wait_for_step(files, 4)
    for attempt in (1, 2):
        stopped = trials.run("stop", "ppo-math/stopped")
        assert stopped.returncode == 0, stopped.stderr
        view = trials.wait(files)
        assert view.state is State.STOPPED, explain(files, view)
        assert newest_checkpoint(files).name == f"step-{view.step:06d}.{attempt}"
        trials.resume(files)  # the second time at once: attempt 2 may not have begun a step
    pace.set(0.0)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    assert_same_run(files, undisturbed)
    assert_told_apart(files, 3)


def test_kill_9_before_the_first_checkpoint_and_resume_equals_the_undisturbed_run(
    trials: Trials, undisturbed: TrialFiles, tiny_policy: Path, pace: Pace
) -> None:
    files = trials.launch("ppo-math", "killed", f"actor.path={tiny_policy}", *RUN, *pace.words)
    trials.wait_for_step(files, 1)
    kill_everything(files)
    view = wait_until(files, lambda v: v.state not in State.live(), timeout_s=60)
    assert view.state is State.LOST
    pace.set(0.0)
    trials.resume(files)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    assert_same_run(files, undisturbed)
    assert_told_apart(files, 2)


def test_a_torn_checkpoint_is_refused_and_the_one_before_it_taken(
    trials: Trials, undisturbed: TrialFiles, tiny_policy: Path, pace: Pace
) -> None:
    files = trials.launch("ppo-math", "torn", f"actor.path={tiny_policy}", *RUN, *pace.words)
    trials.wait_for_step(files, 7)  # checkpoints after 3 and 6
    kill_everything(files)
    newest = newest_checkpoint(files)
    state = newest / "model_worker-0.pt"
    state.write_bytes(state.read_bytes()[:-100])
    view = wait_until(files, lambda v: v.state not in State.live(), timeout_s=60)
    assert view.state is State.LOST
    pace.set(0.0)
    trials.resume(files)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    log = (files.root / "attempts/0002/logs/master_worker-0.log").read_text()
    assert f"checkpoint refused folder={newest}" in log
    assert_same_run(files, undisturbed)
    assert_told_apart(files, 2)


def test_a_signal_to_the_supervisor_stops_the_trial_after_a_step(
    trials: Trials, undisturbed: TrialFiles, tiny_policy: Path, pace: Pace
) -> None:
    """And another seed gives another run."""
    words = (f"actor.path={tiny_policy}", "seed=2", *RUN, *pace.words)
    files = trials.launch("ppo-math", "signalled", *words)
    view = trials.wait_for_step(files, 2)
    assert view.supervisor_pid is not None
    os.kill(view.supervisor_pid, signal.SIGTERM)
    view = trials.wait(files)
    assert view.state is State.STOPPED, explain(files, view)
    rows = metrics_of(files)
    others = metrics_of(undisturbed)[: len(rows)]
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    trained = [(a, b) for a, b in zip(rows, others, strict=True) if a["step"]]
    assert all(a["actor/actor_loss"] != b["actor/actor_loss"] for a, b in trained)


def test_everybody_of_a_whole_run_says_goodbye(undisturbed: TrialFiles) -> None:
    assert metrics_of(undisturbed)[-1]["step"] == STEPS
    plan = read_plan(undisturbed.plan)
    keys = TrialKeys.of(plan)
    with closing(open_store(plan.name_resolve_url)) as store:
        assert store.find_subtree(keys.workers) == []
        found = store.get_subtree(keys.worker_statuses)
    assert {entry.lease_id for entry in found} == {None}
    assert {loads(WorkerStatus, e.value, where=e.key).state for e in found} == {"done"}
