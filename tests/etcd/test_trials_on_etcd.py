"""Whole trials whose workers find each other in a real etcd, and what its outages do to them: nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdCluster
from history_check import check_history, read_history
from paced import Pace
from real_trials import (
    LONG_PPO,
    SMALL_PPO,
    Trials,
    explain,
    metrics_of,
    trained_ids,
    weights_of,
)

from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State


@pytest.fixture
def own_etcd(start_etcd: Callable[..., EtcdCluster]) -> Iterator[EtcdCluster]:
    """One that the test may harm."""
    with start_etcd() as cluster:
        yield cluster


def site(trials: Trials, name_resolve: str) -> str:
    """A site file with this store."""
    path = trials.file_root.parent / "site.yaml"
    path.write_text(
        f"name: lab\nscheduler: local\nfile_root: {trials.file_root}\nname_resolve: {name_resolve}\n"
    )
    return str(path)


def launch(trials: Trials, policy: Path, name: str, *words: str) -> TrialFiles:
    return trials.launch("ppo-math", name, f"actor.path={policy}", *words)


def finished(trials: Trials, files: TrialFiles) -> TrialFiles:
    view = trials.wait(files, timeout_s=200)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


def assert_same_run(one: TrialFiles, other: TrialFiles) -> None:
    assert metrics_of(one) == metrics_of(other)
    assert trained_ids(one) == trained_ids(other)
    for role in ("actor", "critic"):
        assert weights_of(one, role) == weights_of(other, role)


def test_ten_seconds_without_etcd_change_nothing(
    trials: Trials, tiny_policy: Path, own_etcd: EtcdCluster, tmp_path: Path
) -> None:
    pace = Pace(tmp_path, 0.0)
    words = (*SMALL_PPO, *pace.words)
    undisturbed = finished(trials, launch(trials, tiny_policy, "calm", *words))
    pace.set(1.0)
    url = "etcd://" + own_etcd.endpoints[0]
    files = launch(trials, tiny_policy, "shaken", "--cluster", site(trials, url), *words)
    trials.wait_for_step(files, 3)
    own_etcd.kill()
    time.sleep(10)
    own_etcd.restart()
    pace.set(0.0)
    finished(trials, files)
    assert_same_run(undisturbed, files)
    assert [a.number for a in files.all_attempts()] == [1]
    assert check_history(read_history(files.root)) == []
    log = files.attempt(1).log("supervisor").read_text()
    assert "lost-worker detection suspended" in log, "the outage was not noticed at all"


def test_a_run_on_the_jobs_own_etcd_is_the_same_run(trials: Trials, tiny_policy: Path) -> None:
    on_files = finished(trials, launch(trials, tiny_policy, "file", *SMALL_PPO))
    cluster = site(trials, "etcd+job://")
    files = launch(trials, tiny_policy, "etcd", "--cluster", cluster, *SMALL_PPO)
    trials.wait_for_step(files, 1)
    access = files.attempt(1).etcd_access
    assert access.stat().st_mode & 0o777 == 0o600
    assert access.parent.stat().st_mode & 0o777 == 0o700
    finished(trials, files)
    assert_same_run(on_files, files)
    told = trials.run("status", "ppo-math/etcd")
    assert (told.returncode, told.stderr) == (0, "")
    assert "model_worker/0   done" in told.stdout
    assert check_history(read_history(files.root)) == []


def test_stop_reaches_a_run_on_the_jobs_own_etcd(trials: Trials, tiny_policy: Path) -> None:
    cluster = site(trials, "etcd+job://")
    files = launch(trials, tiny_policy, "etcd", "--cluster", cluster, *LONG_PPO)
    trials.wait_for_step(files, 2)
    done = trials.run("stop", "ppo-math/etcd", "--grace", "30")
    assert done.returncode == 0, done.stderr
    assert trials.wait(files).state is State.STOPPED
    trials.resume(files)
    trials.wait_for_step(files, (trials.wait_for_step(files, 1).step or 0) + 2)
    assert [a.number for a in files.all_attempts()] == [1, 2]
    done = trials.run("stop", "ppo-math/etcd", "--grace", "30")
    assert done.returncode == 0, done.stderr
