"""An asynchronous trial on a real Slurm: a step for each kind of worker, one of them killed."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

from real_trials import explain, small_ppo, trained_ids, worker_pid
from slurm_trials import SlurmTrials

from launcher.trial_state import State
from realsys.observability.metrics import read_metrics

LONGER = small_ppo("exp_ctrl.total_train_epochs=4")


def test_servers_and_rollout_workers_are_steps_and_a_killed_server_is_started_again(
    slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    files = slurm_trials.launch(
        "ppo-math-async",
        "a",
        f"actor.path={tiny_policy}",
        "max_staleness=2",
        "rollout.servers=2",
        *LONGER,
    )
    view = slurm_trials.wait_for_step(files, 4, timeout_s=180)
    os.kill(worker_pid(view, "generation_server/1"), signal.SIGKILL)
    done = slurm_trials.wait(files, timeout_s=240)
    assert (done.state, done.attempt) == (State.COMPLETED, 1), explain(files, done)
    steps = [json.loads(line) for line in files.attempt(1).steps.read_text().splitlines()]
    kinds = Counter(row["step"] for row in steps)
    assert set(kinds) == {
        "generation_server",
        "gserver_manager",
        "model_worker",
        "master_worker",
        "rollout_worker",
    }
    assert kinds["generation_server"] == 2, "its first step, and one for the second start"
    assert set(Counter(trained_ids(files)).values()) == {1}
    assert len(trained_ids(files)) == 48 * 8
    rows = read_metrics(files.phase(files.root).metrics)
    lags = [row["actor_train/staleness/max"] for row in rows if row["step"]]
    assert max(map(float, lags)) <= 2
