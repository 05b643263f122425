"""A node is lost, Slurm requeues its job, and the old processes live on: they can't write any more.

Slurm does not fence: with its slurmd dead, a node's tasks run beside those of the requeued job. Here they
are let run, or stopped at a random moment and woken when the new attempt is steps ahead.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from etcd_server import EtcdCluster
from history_check import check_history, read_history
from paced import Pace
from real_trials import Trials, explain, metrics_of, small_ppo, trained_ids, wait_until, weights_of
from slurm_cluster import SlurmCluster
from slurm_trials import SlurmTrials

from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

# A checkpoint a step, so that a random moment often falls into one.
PPO = small_ppo("exp_ctrl.total_train_epochs=2", "task.train_size=96", "exp_ctrl.ckpt_freq_steps=1")
STEP_S = 1.0
LATER_STEP_S = 4.0  # it must be in its middle when Slurm has given the node up


@pytest.fixture
def etcd_url(tmp_path: Path) -> Iterator[str]:
    with EtcdCluster(tmp_path / "etcd") as etcd:
        yield etcd.url


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> TrialFiles:
    """The same run with nothing in its way, on this machine."""
    folder = tmp_path_factory.mktemp("calm")
    trials, quick = Trials(folder / "root"), Pace(folder, 0.0).words
    files = trials.launch("ppo-math", "calm", f"actor.path={tiny_policy}", *PPO, *quick)
    view = trials.wait(files, timeout_s=240)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


@pytest.fixture
def lose_node(slurm: SlurmCluster) -> Iterator[Callable[[str, int], set[int]]]:
    """Cuts the node of a job off; returns the pids that live on there. Kills them in the end."""
    cut: set[int] = set()

    def lose(node: str, job_id: int) -> set[int]:
        pids = slurm.processes_of(job_id)
        slurm.kill_slurmd(node)
        cut.update(pids)
        return pids

    yield lose
    for pid in cut:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def tell(pids: set[int], number: signal.Signals) -> int:
    told = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            told += 1
    return told


@pytest.mark.parametrize(
    ("store", "stopped"),
    [("file", False), ("etcd", True)],
    ids=["file store, running on", "etcd, asleep and woken"],
)
def test_old_tasks_that_live_on_write_nothing(
    slurm: SlurmCluster,
    slurm_trials: SlurmTrials,
    lose_node: Callable[[str, int], set[int]],
    undisturbed: TrialFiles,
    tiny_policy: Path,
    etcd_url: str,
    tmp_path: Path,
    store: str,
    stopped: bool,
) -> None:
    if store == "etcd":
        slurm_trials.write_spec(name_resolve=etcd_url)
    pace = Pace(tmp_path, STEP_S)
    words = (f"actor.path={tiny_policy}", *PPO, *pace.words)
    files = slurm_trials.launch("ppo-math", "z", "--requeue", *words)
    view = slurm_trials.wait_for_step(files, 5)
    time.sleep(random.uniform(0.0, STEP_S))
    zombies = lose_node(view.host, int(view.job_ids[0]))
    assert len(zombies) >= 4, "supervisor, srun, tasks, workers, their heartbeats"
    if stopped:
        tell(zombies, signal.SIGSTOP)
    pace.set(LATER_STEP_S)
    ahead = view.step + 3
    wait_until(files, lambda v: v.attempt == 2 and v.state is State.RUNNING, timeout_s=180)
    pace.set(STEP_S)
    again = wait_until(files, lambda v: v.attempt == 2 and v.step >= ahead, timeout_s=180)
    assert again.host != view.host
    if stopped:
        assert tell(zombies, signal.SIGCONT) == len(zombies), "somebody killed them before"
    pace.set(0.0)
    done = slurm_trials.wait(files, timeout_s=200)
    assert (done.state, done.attempt) == (State.COMPLETED, 2), explain(files, done)
    rows = read_history(files.root)
    assert check_history(rows) == []
    assert {row["attempt"] for row in rows} == {1, 2}
    assert metrics_of(files) == metrics_of(undisturbed)
    assert trained_ids(files) == trained_ids(undisturbed)
    for role in ("actor", "critic"):
        assert weights_of(files, role) == weights_of(undisturbed, role)
    old = files.attempt(1)
    told = "".join(path.read_text(errors="replace") for path in sorted(old.logs.glob("*.log")))
    assert "taken over" in told or "by its supervisor" in told, told[-3000:]
    if stopped:  # they woke up beside the new attempt: an order to Slurm would have ended its steps
        assert "taken over" in told, told[-3000:]
        assert any(Path(f"/proc/{pid}").exists() for pid in zombies), "they wait for Slurm"
