"""A job's own etcd on a real Slurm: on the first node, entered from the others, gone with the job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from history_check import check_history, read_history
from paced import Pace
from real_trials import explain, small_ppo, wait_until
from slurm_cluster import SlurmCluster
from slurm_trials import SlurmTrials
from test_slurm_faults import TWO_NODES, nothing_left

from realsys.trial.trial_state import State


def etcds_of(cluster: SlurmCluster, job_id: int) -> list[int]:
    """Pids of the job's etcd servers."""
    return [
        pid
        for pid in cluster.processes_of(job_id)
        if Path(f"/proc/{pid}/comm").read_text().strip() == "etcd"
    ]


def test_a_run_over_two_nodes_whose_etcd_is_killed_completes_and_leaves_nothing(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, tiny_policy: Path, tmp_path: Path
) -> None:
    pace = Pace(tmp_path, 0.8)
    slurm_trials.write_spec(name_resolve="etcd+job://")
    words = (*small_ppo("task.train_size=96"), *TWO_NODES, *pace.words)
    files = slurm_trials.launch("ppo-math", "e", f"actor.path={tiny_policy}", *words)
    view = slurm_trials.wait_for_step(files, 2)
    job_id = int(view.job_ids[0])
    assert len({w.host for w in view.workers}) == 2
    (old,) = etcds_of(slurm, job_id)
    os.kill(old, signal.SIGKILL)
    slurm_trials.wait_for_step(files, view.step + 6)
    wait_until(
        files, lambda _: len(new := etcds_of(slurm, job_id)) == 1 and new != [old], timeout_s=120
    )
    pace.set(0.0)
    done = slurm_trials.wait(files)
    assert (done.state, done.attempt) == (State.COMPLETED, 1), explain(files, done)
    assert check_history(read_history(files.root)) == []
    assert nothing_left(slurm, job_id)
