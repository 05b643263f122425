"""What Slurm refuses, in words with what to do, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from real_trials import SMALL_PPO
from slurm_cluster import SlurmCluster
from slurm_trials import SlurmTrials


def trials_on(cluster: SlurmCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmTrials:
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    made = SlurmTrials(folder / "root", cluster)
    made.write_spec()
    return made


def test_a_bad_account(
    start_slurm: Callable[..., SlurmCluster],
    tmp_path: Path,
    tiny_policy: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with start_slurm(settings={"AccountingStorageEnforce": "associations"}) as cluster:
        trials = trials_on(cluster, tmp_path, monkeypatch)
        words = ["launch", "ppo-math", "--trial", "b", *SMALL_PPO, f"actor.path={tiny_policy}"]
        done = trials.run(*words, "--account", "nobodys")
        assert done.returncode == 5
        assert "account/partition combination" in done.stderr
        assert "--account" in done.stderr
        assert not list(trials.file_root.glob("runs/*/*/*"))  # the name is free again
        checked = trials.run("plan", *words[1:], "--account", "nobodys", "--check")
        assert checked.returncode == 5
        assert "Invalid account" in checked.stderr


def test_a_full_queue(
    start_slurm: Callable[..., SlurmCluster],
    tmp_path: Path,
    tiny_policy: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with start_slurm(accounting=False, settings={"MaxJobCount": "2"}) as cluster:
        trials = trials_on(cluster, tmp_path, monkeypatch)
        cluster.submit(command="sleep 300")
        words = [*SMALL_PPO, f"actor.path={tiny_policy}"]
        done = trials.run("launch", "ppo-math", "--trial", "f", *words)
        assert done.returncode == 5
        assert "MaxJobCount" in done.stderr
        assert not list(trials.file_root.glob("runs/*/*/*"))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--partition", "mian"], "did you mean 'main'?"),
        (["--nodelist", "n9"], "no node 'n9' at this site"),
        (["--exclude", "n[1-9]"], "no node 'n5' at this site"),
        (["--partition", "small", "--time", "10"], "small"),
        (["scheduling.model_worker.gpu=9"], "computes on one GPU, but 9 are requested for each"),
        (["--deadline", "now+5minutes", "--time", "10"], "can't end before the deadline"),
        (["--nodelist", "./nodes"], "for the name of a file"),
    ],
    ids=["partition", "nodelist", "exclude", "partition limit", "gpus", "deadline", "slash"],
)
def test_what_can_be_known_is_refused_before_slurm_is_asked(
    slurm_trials: SlurmTrials, tiny_policy: Path, words: list[str], what: str
) -> None:
    done = slurm_trials.run("launch", "ppo-math", *SMALL_PPO, f"actor.path={tiny_policy}", *words)
    assert done.returncode == 4, done.stderr
    assert what in done.stderr
    assert "fix:" in done.stderr
    assert not list(slurm_trials.file_root.glob("runs/*/*/*"))


def test_no_slurm_here(
    slurm_trials: SlurmTrials, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`plan` needs none; `launch` says where to go."""
    (tmp_path / "bin").mkdir()
    words = ["ppo-math", *SMALL_PPO, f"actor.path={tiny_policy}"]
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path / "bin"))
        assert slurm_trials.run("plan", *words).returncode == 0
        done = slurm_trials.run("launch", *words)
    assert done.returncode == 5
    assert "program sbatch" in done.stderr


def test_a_site_says_that_slurm_would_take_the_job(
    slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    words = ["ppo-math", *SMALL_PPO, f"actor.path={tiny_policy}"]
    done = slurm_trials.run("plan", *words, "--check")
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr
