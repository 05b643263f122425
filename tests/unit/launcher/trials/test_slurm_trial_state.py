"""What a trial on Slurm is in, from its own records and what Slurm says: total, and never guessed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import golden
import pytest

from launcher.slurm.query.job_query import JobInfo
from launcher.trials.explain import explain
from launcher.trials.submission import Submission
from launcher.trials.trial_view import Records, view_of
from realsys.trial.liveness import Liveness
from realsys.trial.records import AttemptRecord, ExitMarker, Result, StopRequest, WorkerRecord
from realsys.trial.trial_state import JobState, State, TrialFacts, decide

NOW = 1_800_000_000.0
SUBMISSION = Submission(
    job_id="7", scheduler="slurm", job_ids=("7",), host="login", after_attempt=0, at=NOW
)
ATTEMPT = AttemptRecord(
    number=1,
    token="t",
    host="n1",
    supervisor_pid=5,
    supervisor_start=1,
    started_at=NOW,
    job_id="7",
    nodes="n[1-2]",
)


def job(state: JobState, slurm_state: str = "", **more: object) -> JobInfo:
    return JobInfo(job_id="7", state=state, slurm_state=slurm_state or state.name, **more)  # type: ignore[arg-type]


def records(**more: object) -> Records:
    defaults = {"trial": "ppo-math/run1", "folder": "/x", "now": NOW, "submission": SUBMISSION}
    unknown = {"submission_alive": Liveness.UNKNOWN}
    return Records(**{**defaults, **unknown, **more})  # type: ignore[arg-type]


def running(**more: object) -> Records:
    return records(attempt=ATTEMPT, supervisor=Liveness.UNKNOWN, **more)


def test_every_combination_of_facts_means_a_state():
    for (
        pending,
        supervisor,
        result,
        stop,
        leases,
        working,
        state,
        requeued,
        cancelled,
    ) in itertools.product(
        Liveness, Liveness, (None, *Result), *[(False, True)] * 3, JobState, *[(False, True)] * 2
    ):
        facts = TrialFacts(
            planned=True,
            pending=pending,
            supervisor=supervisor,
            result=result,
            stop_requested=stop,
            leases=leases,
            working=working,
            job=state,
            requeued=requeued,
            cancelled=cancelled,
        )
        found = decide(facts)
        assert isinstance(found, State)
        if found is State.COMPLETED:  # of the marker alone, whatever Slurm says
            assert result is Result.COMPLETED


@pytest.mark.parametrize(
    ("state", "means"),
    [
        (JobState.WAITING, State.QUEUED),
        (JobState.HELD, State.HELD),
        (JobState.PAUSED, State.PAUSED),
        (JobState.RUNNING, State.STARTING),
        (JobState.FINISHING, State.STARTING),
        (JobState.STOPPED, State.STOPPED),
        (JobState.DONE, State.LOST),
        (JobState.FAILED, State.LOST),
        (JobState.INFRA_FAILURE, State.LOST),
        (JobState.GONE, State.LOST),
        (JobState.UNKNOWN, State.UNKNOWN),
    ],
)
def test_before_the_first_attempt_the_job_says_it_all(state, means):
    assert view_of(records(job=job(state))).state is means


@pytest.mark.parametrize(
    ("state", "means"),
    [
        (JobState.WAITING, State.QUEUED),  # requeued by Slurm: the attempt could not say so
        (JobState.HELD, State.HELD),
        (JobState.PAUSED, State.PAUSED),
        (JobState.RUNNING, State.STARTING),
        (JobState.FINISHING, State.STOPPING),
        (JobState.STOPPED, State.LOST),
        (JobState.DONE, State.LOST),  # COMPLETED without a marker is no success
        (JobState.FAILED, State.LOST),
        (JobState.INFRA_FAILURE, State.LOST),
        (JobState.GONE, State.LOST),
        (JobState.UNKNOWN, State.UNKNOWN),
    ],
)
def test_an_attempt_without_a_marker_is_as_its_job(state, means):
    assert view_of(running(job=job(state))).state is means


def test_a_slurmctld_that_does_not_answer_is_no_news_while_leases_are_held():
    worker = WorkerRecord(worker="m/0", host="n1", pid=1, start=1, attempt=1, token="t")
    held = running(job=job(JobState.UNKNOWN), workers={"m/0": worker})
    assert view_of(held).state is State.STARTING
    assert view_of(running(job=None)).state is State.UNKNOWN


def test_a_requeued_job_counts_more_than_the_marker_of_the_run_before():
    marker = ExitMarker(result=Result.STOPPED, attempt=1, ended_at=NOW + 5, phase="main")
    stopped = running(exit=marker, job=job(JobState.DONE))
    assert view_of(stopped).state is State.STOPPED
    assert view_of(replace(stopped, job=job(JobState.WAITING))).state is State.QUEUED
    again = job(JobState.RUNNING, restarts=1)
    assert view_of(replace(stopped, job=again)).state is State.STARTING
    same = job(JobState.RUNNING, restarts=0)  # the supervisor still writes its report
    assert view_of(replace(stopped, job=same)).state is State.STOPPED


def test_a_stop_request_of_this_attempt_shows():
    request = StopRequest(grace_seconds=60, by="me", at=NOW, attempt=1)
    assert view_of(running(job=job(JobState.RUNNING), stop=request)).state is State.STOPPING


def test_a_waiting_job_says_why_and_when():
    waiting = job(
        JobState.WAITING,
        "PENDING",
        reason="Priority",
        reason_words="jobs with a higher priority come first",
        expected_start=NOW + 3600,
    )
    view = view_of(records(job=waiting))
    assert "higher priority" in view.reason
    assert "expected to start" in view.reason
    assert any("PENDING (Priority)" in line for line in explain(view))


def test_a_cancelled_waiting_job_is_stopped_and_names_who_did_it():
    mine = replace(SUBMISSION, cancelled_by="ada")
    view = view_of(records(submission=mine, job=job(JobState.GONE)))
    assert view.state is State.STOPPED
    golden.check(view.reason)
    assert view.fix == "realsys resume ppo-math/run1"
    by_root = view_of(records(job=job(JobState.STOPPED, "CANCELLED by 0")))
    golden.check(by_root.reason)


@pytest.mark.parametrize(
    ("slurm_state", "state", "why"),
    [
        ("TIMEOUT", JobState.FAILED, "it reached its time limit"),
        ("NODE_FAIL", JobState.INFRA_FAILURE, "it lost a node"),
        ("PREEMPTED", JobState.INFRA_FAILURE, "it was preempted by another job"),
        ("OUT_OF_MEMORY", JobState.FAILED, "it used more memory than it requested"),
        ("DEADLINE", JobState.FAILED, "it could not end before its deadline"),
        ("CANCELLED by 0", JobState.STOPPED, "it was cancelled by root"),
        ("COMPLETED", JobState.DONE, "Slurm says COMPLETED"),
    ],
)
def test_a_lost_attempt_is_explained_by_what_slurm_knows(slurm_state, state, why):
    ended = job(state, slurm_state, started_at=NOW, ended_at=NOW + 90)
    view = view_of(running(job=ended))
    assert view.state is State.LOST
    golden.check(view.reason)
    assert "realsys resume ppo-math/run1" in view.fix


def test_explain_names_missing_workers_and_what_to_do():
    view = view_of(running(job=job(JobState.RUNNING)))
    view = replace(
        view, workers=tuple(worker_row(f"model_worker/{i}", "not started") for i in range(14))
    )
    lines = list(explain(view))
    golden.check(lines[2])
    assert lines[2].endswith("and 2 more")
    golden.check(lines[-1])


def worker_row(name: str, state: str):
    from launcher.trials.trial_view import WorkerView

    return WorkerView(worker=name, state=state)
