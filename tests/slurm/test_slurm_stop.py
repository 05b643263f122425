"""`realsys stop` on a real Slurm: at random moments, and never a process left on any node."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from real_trials import LONG_PPO, name_of
from slurm_cluster import SlurmCluster
from slurm_trials import SlurmTrials
from told import row

from launcher.trials.status import trial_view
from realsys.trial.liveness import processes_of
from realsys.trial.trial_state import State

STOPS = int(os.environ.get("REALSYS_TEST_STOPS", "5"))  # 20 take more than three minutes
LONGEST_S = 12.0  # start, training and a checkpoint are all in it


@pytest.mark.timeout(600)
def test_stops_at_random_moments_leave_nothing(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    """The trial is resumed each time: later stops meet a run that loads a checkpoint, too."""
    moments = random.Random(2)
    words = (*LONG_PPO, "actor.parallel=d2t1p1")
    files = slurm_trials.launch(
        "ppo-math", "s", *words, "scheduling.model_worker.mem=600000", f"actor.path={tiny_policy}"
    )
    for number in range(STOPS):
        time.sleep(moments.uniform(0.0, LONGEST_S if number % 2 else 2.0))
        grace_s = moments.choice([0.0, 5.0])
        done = slurm_trials.run("stop", "ppo-math/s", "--grace", str(grace_s))
        assert done.returncode == 0, done.stderr
        view = trial_view(files)
        assert view.state is State.STOPPED, f"{number}: {view.state} {view.reason}"
        left = {pid for job in view.job_ids for pid in slurm.processes_of(int(job))}
        assert not left, f"{number}: {left}"
        assert not processes_of(files.root), f"{number}: {processes_of(files.root)}"
        if number + 1 < STOPS:
            slurm_trials.resume(files)


def test_a_stop_is_told_as_a_stop(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    words = (*LONG_PPO, f"actor.path={tiny_policy}")
    files = slurm_trials.launch("ppo-math", "s", *words)
    view = slurm_trials.wait_for_step(files, 2)
    assert slurm_trials.run("stop", name_of(files)).returncode == 0
    row("realsys stop").check(trial_view(files))
    assert slurm.show_job(view.job_ids[0])["JobState"] == "CANCELLED"


def test_two_trials_at_once_do_not_touch_each_other(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    words = (*LONG_PPO, f"actor.path={tiny_policy}")
    one = slurm_trials.launch("ppo-math", "one", *words)
    other = slurm_trials.launch("ppo-math", "other", *words)
    slurm_trials.wait_for_step(one, 1)
    slurm_trials.wait_for_step(other, 1)
    assert slurm_trials.run("stop", "ppo-math/one").returncode == 0
    assert trial_view(one).state is State.STOPPED
    view = trial_view(other)
    assert view.state is State.RUNNING
    slurm_trials.wait_for_step(other, view.step + 3)
