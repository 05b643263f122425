"""How much time a job has left, where it is shown, and the warning when the run needs more."""

from __future__ import annotations

from dataclasses import replace

import golden
import pytest
from stand_in_slurm import make_plan
from test_slurm_trial_state import ATTEMPT, NOW, job, records, running

from launcher.cli.tables import print_status
from launcher.slurm.plan_lines import limit_lines, time_limit_warning
from launcher.trials.explain import explain
from launcher.trials.render import progress_line
from launcher.trials.trial_view import view_of
from realsys.api.cluster import PartitionSpec, SlurmSpec
from realsys.trial.records import Progress
from realsys.trial.trial_state import JobState, State

TEN_MIN = {"started_at": NOW - 60, "time_limit_s": 600}


def view(tmp_path, *, eta_s=None, requeue=False, state=JobState.RUNNING, **of_job):
    plan = make_plan(tmp_path, slurm=SlurmSpec(grace_seconds=120), requeue=requeue)
    progress = Progress(attempt=1, phase="main", step=3, total_steps=9, eta_seconds=eta_s)
    found = running(plan=plan, progress=progress, job=job(state, **{**TEN_MIN, **of_job}))
    return view_of(replace(found, attempt=replace(ATTEMPT, started_at=NOW - 50)))


def shown(capsys, found) -> tuple[str, str]:
    print_status(found)
    return tuple(capsys.readouterr())


def test_time_left_and_the_limit_are_in_every_view(tmp_path, capsys):
    """The limit is the one that Slurm holds the job to, whether somebody asked for it or not."""
    found = view(tmp_path, eta_s=100.0)
    assert (found.time.limit_s, found.time.left_s, found.time.over_s) == (600, 540.0, None)
    said, warned = shown(capsys, found)
    golden.line(said, "time ")
    assert "time limit" not in warned
    golden.check(list(explain(found)))


def test_a_run_that_will_not_be_done_in_time_is_warned_about(tmp_path, capsys):
    """540 s are left, of which the last 120 are for saving: 480 s of work are 60 s too many."""
    found = view(tmp_path, eta_s=480.0)
    assert found.time.over_s == 60.0
    _, warned = shown(capsys, found)
    golden.check(warned)
    assert "realsys resume ppo-math/run1" in warned
    golden.check(explain(found))
    golden.check(progress_line(found))


def test_with_requeue_the_run_goes_on_by_itself(tmp_path, capsys):
    _, warned = shown(capsys, view(tmp_path, eta_s=480.0, requeue=True))
    assert "continues automatically" in warned
    assert "realsys resume" not in warned


@pytest.mark.parametrize(
    ("state", "of_job", "left_s"),
    [
        (JobState.RUNNING, {}, 540.0),
        (JobState.RUNNING, {"started_at": NOW - 700}, 0.0),  # OverTimeLimit, or a late signal
        (JobState.PAUSED, {}, None),  # its clock stands still
        (JobState.RUNNING, {"time_limit_s": None}, "none"),
        (JobState.RUNNING, {"time_limit_s": 0}, "none"),
        (JobState.FAILED, {}, "none"),
    ],
)
def test_the_time_that_is_left(tmp_path, state, of_job, left_s):
    found = view(tmp_path, state=state, **of_job).time
    assert (found.left_s if found else "none") == left_s


def test_a_job_that_waits_shows_the_limit_that_will_hold(capsys):
    waiting = view_of(records(job=job(JobState.WAITING, "PENDING", time_limit_s=180)))
    assert waiting.state is State.QUEUED
    said, _ = shown(capsys, waiting)
    golden.check(said)


def with_limit(tmp_path, **partition):
    plan = make_plan(tmp_path, partitions={"p": PartitionSpec(**partition)})
    parts = tuple(replace(c, partition="p") for c in plan.job.components)
    return replace(plan, job=replace(plan.job, components=parts))


def test_a_launch_says_which_limit_it_has_got(tmp_path):
    (said,) = limit_lines(with_limit(tmp_path, default_time="30:00"))
    golden.check(said)
    assert limit_lines(replace(make_plan(tmp_path), job=None)) == []


def test_a_plan_whose_steps_do_not_fit_the_limit_is_warned_about(tmp_path):
    plan = with_limit(tmp_path, default_time="30:00")
    phase = plan.phases[0]
    control = replace(phase.config.exp_ctrl, benchmark_steps=100)
    phase = replace(phase, config=replace(phase.config, exp_ctrl=control))
    plan = replace(plan, phases=(phase,))
    assert time_limit_warning(plan, 16.8) == ""  # 28 min, 30 less two of grace
    told = "100 steps are predicted to take at least 33 min 20 s, but the time limit leaves 28 min 00 s"
    assert told in time_limit_warning(plan, 20.0)
    assert time_limit_warning(replace(plan, job=replace(plan.job, requeue=True)), 20.0) == ""
