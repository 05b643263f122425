"""`realsys explain`: the whole story of a trial, told in the order of its causes."""

from __future__ import annotations

from datetime import datetime

import golden
import pytest

from launcher.slurm.query.job_query import JobInfo
from launcher.trials.explain import LONG_CALL_S, MAX_NAMES, explain
from launcher.trials.trial_view import TrialView, WorkerView
from realsys.trial.records import ExitMarker, Failure, Progress, Result
from realsys.trial.trial_state import JobState, State

AT = datetime(2026, 11, 21, 9, 30, 5).timestamp()
AT_WORDS = "2026-11-21 09:30:05"


def view(state: State, **more: object) -> TrialView:
    return TrialView(trial="ppo-math/run1", state=state, folder="/x", **more)  # type: ignore[arg-type]


def failure(worker: str, why: str, **more: object) -> Failure:
    return Failure(worker=worker, host="n2", pid=71, why=why, at=AT, **more)  # type: ignore[arg-type]


def marker(first: Failure | None, *others: Failure) -> ExitMarker:
    return ExitMarker(
        result=Result.FAILED,
        attempt=1,
        ended_at=AT + 1,
        phase="main",
        first_failure=first,
        other_failures=others,
    )


def test_a_failed_trial_is_told_from_its_first_failure_to_what_to_do():
    first = failure(
        "model_worker/1",
        "CUDA out of memory",
        log="/x/attempts/0001/logs/model_worker-1.log",
        log_tail=("step 3", "torch.OutOfMemoryError: CUDA out of memory"),
    )
    others = (
        failure(
            "master_worker/0", "actor_train failed on model_worker/1\nTraceback …", secondary=True
        ),
        failure("model_worker/0", ""),
    )
    found = view(
        State.FAILED,
        reason="model_worker/1 (pid 71 on n2): CUDA out of memory",
        fix="read its log, then realsys resume ppo-math/run1",
        job=JobInfo(job_id="7", state=JobState.FAILED, slurm_state="FAILED", nodes="n[1-2]"),
        workers=(WorkerView(worker="model_worker/0", state="gone"),),  # of no interest any more
        exit=marker(first, *others),
        notes=("no space left on the disk of /x",),
    )
    golden.check(explain(found))


def test_of_many_that_failed_after_it_a_dozen_is_named():
    others = [failure(f"model_worker/{i}", "its peer was gone") for i in range(MAX_NAMES + 3)]
    lines = list(explain(view(State.FAILED, exit=marker(failure("m/0", "why"), *others))))
    assert lines[3] == "then: model_worker/0: its peer was gone"
    assert lines[3 + MAX_NAMES :] == ["then: 3 more"]


def test_a_failure_without_a_log_has_no_end_of_it():
    lines = list(explain(view(State.FAILED, exit=marker(failure("m/0", "killed by SIGKILL")))))
    assert lines == [
        "ppo-math/run1 is failed",
        f"first failure: m/0 (pid 71 on n2), {AT_WORDS}",
        "  killed by SIGKILL",
    ]


def test_a_failure_that_nobody_can_name_is_no_error():
    golden.check(list(explain(view(State.FAILED, exit=marker(None), fix="resume"))))


def test_a_running_trial_names_who_is_missing_gone_failed_and_slow():
    busy, quick = LONG_CALL_S + 65, LONG_CALL_S - 1
    found = view(
        State.RUNNING,
        workers=(
            WorkerView(worker="m/0", state="not started"),
            WorkerView(worker="m/1", state="gone"),
            WorkerView(worker="m/2", state="failed"),
            WorkerView(worker="m/3", state="running", mfc="actor_train", seconds_in_state=busy),
            WorkerView(worker="m/4", state="running", mfc="actor_train", seconds_in_state=quick),
            WorkerView(worker="m/5", state="running", seconds_in_state=busy),
        ),
        progress=Progress(
            attempt=1, phase="main", step=4, total_steps=9, running={"actor_train": "m/3, m/4"}
        ),
        job=JobInfo(
            job_id="7",
            state=JobState.RUNNING,
            slurm_state="RUNNING",
            reason="None",
            nodes="n1",
            restarts=2,
            expected_start=AT,
        ),
    )
    golden.check(explain(found))


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        (State.QUEUED, "Priority", f"PENDING (Priority), expected to start {AT_WORDS}"),
        (State.HELD, "(null)", f"PENDING, expected to start {AT_WORDS}"),
        (State.LOST, "", "PENDING"),
    ],
)
def test_a_start_is_expected_only_of_a_job_that_waits(state, reason, said):
    job = JobInfo(
        job_id="7",
        state=JobState.WAITING,
        slurm_state="PENDING",
        reason=reason,
        expected_start=AT,
    )
    golden.check(list(explain(view(state, job=job)))[1])


def test_a_trial_that_is_well_has_nothing_to_do():
    assert list(explain(view(State.COMPLETED))) == ["ppo-math/run1 is completed"]
