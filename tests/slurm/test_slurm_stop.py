"""`realsys stop` on a real Slurm: at random moments, and never a process left on any node."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from real_trials import LONG_PPO
from slurm_cluster import SlurmCluster
from slurm_trials import SlurmTrials
from stand_in_slurm import make_plan, write_plan
from told import row

from launcher.cli.command_line import run
from launcher.sites.places import user_name
from launcher.submit.dispatch_job import dispatch
from launcher.trials.status import trial_view
from launcher.trials.submission import read_submission
from realsys.trial.liveness import processes_of
from realsys.trial.records import AttemptRecord, TrialFiles, trial_dir, write_record
from realsys.trial.trial_state import State

STOPS = int(os.environ.get("REALSYS_TEST_STOPS", "4"))  # 20 take more than three minutes
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


def test_a_stop_is_told_as_a_stop_and_does_not_touch_another_trial(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    words = (*LONG_PPO, f"actor.path={tiny_policy}")
    one = slurm_trials.launch("ppo-math", "one", *words)
    other = slurm_trials.launch("ppo-math", "other", *words)
    (job_id,) = slurm_trials.wait_for_step(one, 2).job_ids
    slurm_trials.wait_for_step(other, 1)
    assert slurm_trials.run("stop", "ppo-math/one").returncode == 0
    row("realsys stop").check(trial_view(one))
    assert slurm.show_job(job_id)["JobState"] == "CANCELLED"
    view = trial_view(other)
    assert view.state is State.RUNNING
    slurm_trials.wait_for_step(other, view.step + 3)


def test_jobs_that_got_the_ids_of_lost_ones_are_left_alone(
    start_slurm: Callable[..., SlurmCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld loses its state and counts anew: the ids of two trials are those of my other work."""
    monkeypatch.setenv("REALSYS_FILE_ROOT", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with start_slurm(nodes=1, gpus=0, accounting=False) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        waiting, begun = (_waiting_trial(tmp_path, name) for name in ("waiting", "begun"))
        ids = [read_submission(files).job_id for files in (waiting, begun)]  # type: ignore[union-attr]
        assert [trial_view(files).state for files in (waiting, begun)] == [State.QUEUED] * 2
        memory = read_submission(waiting).job  # type: ignore[union-attr]
        assert memory is not None
        assert cluster.show_job(ids[0])["Comment"].strip() == memory.comment
        assert (list(memory.submitted), memory.cluster_name) == ([ids[0]], "lab")
        start = AttemptRecord(
            number=1, token="t", host="n1", supervisor_pid=1, supervisor_start=1,
            started_at=time.time(), job_id=ids[1], nodes="n1",
        )  # fmt: skip
        write_record(begun.attempt(1).record, start)

        while (
            time.time() < memory.submitted[ids[0]] + 3
        ):  # none gives an id out again in its second
            time.sleep(0.1)
        cluster.stop_slurmctld()
        for old in (cluster.shape.folder / "state").iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        cluster.start_slurmctld(clean=True)
        work = cluster.submit("--begin=now+1hour", command="sleep 600")
        mine = cluster.submit("--comment=mine", command="sleep 600")  # the node is not back yet
        assert [str(work), str(mine)] == ids

        assert [trial_view(files).state for files in (waiting, begun)] == [State.LOST] * 2
        row("its id was given to another job").check(trial_view(begun))
        for words in (
            ["stop", "ppo-math/waiting"],
            ["stop", "ppo-math/begun"],
            ["stop", "--all", "--yes"],
            ["rm", "ppo-math/waiting", "--yes"],
            ["rm", "ppo-math/begun", "--yes"],
        ):
            assert run(words) == 0, words
        assert not waiting.root.exists()
        states = [cluster.show_job(job)["JobState"] for job in (work, mine)]
        assert set(states) <= {"PENDING", "RUNNING"}


def _waiting_trial(root: Path, name: str) -> TrialFiles:
    """A trial whose job waits for an hour to come."""
    plan = make_plan(root)
    assert plan.job is not None
    folder = trial_dir(root, user_name(), "ppo-math", name)
    small = [replace(part, nodes=1) for part in plan.job.components]
    job = replace(plan.job, components=tuple(small), begin="now+1hour")
    files = write_plan(replace(plan, trial_name=name, trial_dir=str(folder), job=job))
    dispatch(files, replace(plan, trial_name=name, trial_dir=str(folder), job=job), "hash")
    return files
