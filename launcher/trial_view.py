"""What is going on in a trial, told from its records (pure): state, reason, one row a worker.

For status, watch, wait, stop, resume and ls. Reading the records is launcher/status.py's work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.liveness import Liveness
from launcher.slurm.job_story import explain_job
from launcher.slurm.query import JobInfo
from launcher.slurm.states import JobState
from launcher.slurm.time_left import TimeLeft, time_left
from launcher.submission import Submission
from launcher.trial_state import Facts, State, decide
from realsys.api.plan import LaunchPlan, PhasePlan
from realsys.api.trial import (
    AttemptRecord,
    ExitMarker,
    Progress,
    Result,
    StopRequest,
    TrialRecord,
    WorkerRecord,
    WorkerStatus,
)
from realsys.slurm.hostlist import compress
from realsys.slurm.lost_nodes import lost_nodes


@dataclass(frozen=True, kw_only=True)
class Records:
    """Everything that was read of a trial, at one moment."""

    trial: str
    folder: str
    now: float
    plan: LaunchPlan | None = None
    record: TrialRecord | None = None
    submission: Submission | None = None
    submission_alive: Liveness = Liveness.NONE
    job: JobInfo | None = None  # what Slurm says; None on this machine
    attempt: AttemptRecord | None = None
    supervisor: Liveness = Liveness.NONE
    exit: ExitMarker | None = None
    stop: StopRequest | None = None
    progress: Progress | None = None
    workers: Mapping[str, WorkerRecord] = field(default_factory=dict)
    statuses: Mapping[str, WorkerStatus] = field(default_factory=dict)
    alive: Mapping[str, Liveness] = field(default_factory=dict)
    heartbeats: Mapping[str, float] = field(default_factory=dict)  # seconds since the last one
    restarts: Sequence[Mapping[str, Any]] = ()  # rows of the attempt's restarts.jsonl
    published: frozenset[str] = frozenset()  # preparing phases whose product is there
    metrics: Mapping[str, Any] = field(default_factory=dict)  # last line of the main phase
    notes: tuple[str, ...] = ()  # what could not be read


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """One row of the worker table."""

    worker: str
    state: str
    host: str = ""
    pid: int | None = None
    alive: bool | None = None  # None: on another host
    mfc: str = ""
    step: int = 0
    seconds_in_state: float | None = None
    heartbeat_age_s: float | None = None
    reason: str = ""
    waits_for: str = ""  # "model_worker/1: what"
    stalled_s: float = 0.0
    stalled_where: str = ""
    restarts: int = 0  # how often it was started again by itself in this attempt
    restart_why: str = ""  # why it ended the last time


@dataclass(frozen=True, kw_only=True)
class TrialView:
    """A trial as `status` shows it."""

    trial: str
    state: State
    reason: str = ""
    fix: str = ""
    folder: str
    attempt: int = 0
    host: str = ""
    supervisor_pid: int | None = None
    created_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    phase: str = ""
    phases: tuple[str, ...] = ()
    step: int = 0
    total_steps: int = 0
    progress: Progress | None = None
    workers: tuple[WorkerView, ...] = ()
    exit: ExitMarker | None = None
    job: JobInfo | None = None
    job_ids: tuple[str, ...] = ()
    time: TimeLeft | None = None  # of the job; None without a limit
    metrics: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Nothing more will happen by itself, as far as can be said.

        A job of which Slurm says nothing for the moment may run or wait: whoever waits for its end goes
        on waiting. Of a run on another host without a Slurm nobody here will ever know more.
        """
        if self.state is State.UNKNOWN:
            return not self.job_ids
        return self.state not in State.live()


def view_of(records: Records) -> TrialView:
    """The view that the records mean."""
    attempt, marker = records.attempt, records.exit
    state = decide(_facts(records))
    progress = records.progress
    if progress is not None and (attempt is None or progress.attempt != attempt.number):
        progress = None
    if progress is not None and state not in State.live():  # what was computing then, is not now
        progress = replace(progress, running={}, doing="", eta_seconds=None)
    phase = _current_phase(records, progress)
    reason, fix = _explanation(state, records)
    return TrialView(
        trial=records.trial,
        state=state,
        reason=reason,
        fix=fix,
        folder=records.folder,
        attempt=attempt.number if attempt else 0,
        host=attempt.host if attempt else "",
        supervisor_pid=attempt.supervisor_pid if attempt else None,
        created_at=records.record.created_at if records.record else None,
        started_at=attempt.started_at if attempt else None,
        ended_at=marker.ended_at if marker else None,
        phase=phase.name if phase else "",
        phases=tuple(p.name for p in records.plan.phases) if records.plan else (),
        step=progress.step if progress else (marker.step if marker else 0),
        total_steps=progress.total_steps if progress else 0,
        progress=progress,
        workers=_workers(records, phase),
        exit=marker,
        job=records.job,
        job_ids=records.submission.job_ids if records.submission else (),
        time=_time_left(state, records, progress),
        metrics=records.metrics,
        notes=records.notes,
    )


def _time_left(state: State, records: Records, progress: Progress | None) -> TimeLeft | None:
    if state not in State.live():
        return None
    eta_s = progress.eta_seconds if progress and state is State.RUNNING else None
    return time_left(records.job, records.plan, eta_s=eta_s, now=records.now)


def _facts(records: Records) -> Facts:
    attempt, submission = records.attempt, records.submission
    number = attempt.number if attempt else 0
    pending = submission is not None and submission.after_attempt >= number
    current = [w for w in records.workers.values() if w.attempt == number]
    progress, job = records.progress, records.job
    state = job.state if job else None
    if submission is not None and submission.on_slurm and state is None:
        state = JobState.UNKNOWN
    return Facts(
        planned=records.plan is not None,
        pending=records.submission_alive if pending else Liveness.NONE,
        supervisor=records.supervisor if attempt else Liveness.NONE,
        result=records.exit.result if records.exit else None,
        stop_requested=records.stop is not None and records.stop.attempt == number,
        leases=bool(current),
        working=(progress is not None and progress.attempt == number)
        or any(s.state == "running" for s in records.statuses.values()),
        job=state,
        requeued=_is_requeued(records),
        cancelled=submission is not None and bool(submission.cancelled_by),
    )


def _is_requeued(records: Records) -> bool:
    """Whether Slurm has given the job a new start, or a new place in the queue, after the attempt."""
    attempt, job, marker = records.attempt, records.job, records.exit
    if attempt is None or job is None or marker is None:
        return False
    same = job.job_id == attempt.job_id
    if same and job.restarts is not None and job.restarts > attempt.restart_count:
        return True
    if job.state.has_ended:
        return False
    if job.state in (JobState.WAITING, JobState.HELD):
        return True
    return job.started_at is not None and job.started_at > marker.ended_at


def _explanation(state: State, records: Records) -> tuple[str, str]:
    """Why the state is as it is, where that is not plain, and what to do."""
    attempt, marker, resume = records.attempt, records.exit, f"realsys resume {records.trial}"
    if records.submission is not None and records.submission.on_slurm:
        told = explain_job(state, records)
        if told is not None:
            return told
    if state is State.FAILED and marker and marker.first_failure:
        failure = marker.first_failure
        why = f"{failure.worker} (pid {failure.pid} on {failure.host}): {failure.why}"
        if lost := lost_nodes(marker, attempt.nodes if attempt else ""):
            return why, f"{resume} --exclude {compress(sorted(lost))}, which takes other nodes"
        return why, failure.fix or f"read its log, then {resume}"
    if state is State.FAILED:
        return "its supervisor says so without a reason", f"realsys logs {records.trial}; {resume}"
    if state is State.LOST and _facts(records).pending is Liveness.DEAD:
        return (
            "the supervisor ended before it could take an attempt",
            f"read {records.folder}/submitit/*_log.err, then {resume}",
        )
    if state is State.LOST and attempt:
        return (
            f"the supervisor (pid {attempt.supervisor_pid} on {attempt.host}) is gone without an "
            "exit marker: killed, or the host rebooted, or no space was left to write it",
            resume,
        )
    if state is State.STOPPED:
        by = f" by {records.stop.by}" if records.stop else ""
        return f"stopped on request{by}", resume
    if state is State.STOPPING and records.stop:
        by, left = records.stop.by, records.stop.at + records.stop.grace_seconds - records.now
        return f"asked by {by}; {max(0.0, left):.0f} s of grace left for the current step", ""
    if state is State.UNKNOWN:
        where = attempt or records.submission
        if records.plan is None and not where:
            return "its records can't be read", f"look into {records.folder}"
        host = where.host if where else "another host"
        return f"it was started on {host}, and no worker's lease is held", f"ask on {host}"
    return "", ""


def _current_phase(records: Records, progress: Progress | None) -> PhasePlan | None:
    if records.plan is None:
        return None
    phases = {phase.name: phase for phase in records.plan.phases}
    named = progress.phase if progress else (records.exit.phase if records.exit else "")
    if named in phases:
        return phases[named]
    left = [p for p in records.plan.phases if p.name not in records.published]
    return (left or list(records.plan.phases))[0]


def _workers(records: Records, phase: PhasePlan | None) -> tuple[WorkerView, ...]:
    """The phase's workers, whether they have registered or not."""
    expected: Sequence[str] = ()
    if phase is not None and records.attempt is not None:
        groups = phase.scheduling.groups().items()
        expected = [f"{kind.value}/{i}" for kind, group in groups for i in range(group.count)]
    names = [*expected, *sorted(set(records.workers) - set(expected))]
    return tuple(_worker(name, records) for name in names)


def _state_untold(records: Records) -> str:
    """Of a worker that the store says nothing of."""
    attempt, progress = records.attempt, records.progress
    if records.exit is not None:  # the store ended with its job
        return "done" if records.exit.result is Result.COMPLETED else "ended"
    # The master tells its progress only after every worker has registered.
    came = attempt is not None and progress is not None and progress.attempt == attempt.number
    return "gone" if came else "not started"


def _worker(name: str, records: Records) -> WorkerView:
    record, status = records.workers.get(name), records.statuses.get(name)
    liveness = records.alive.get(name, Liveness.NONE)
    known = {Liveness.ALIVE: True, Liveness.DEAD: False}
    state = status.state if status else _state_untold(records)
    restarts = [row for row in records.restarts if row.get("worker") == name]
    ended = ("done", "failed", "lost")
    if liveness is Liveness.DEAD and state not in ended:
        state = "gone"
    elif status is not None and record is None and state not in (*ended, "starting"):
        state = "gone"  # its lease has ended: dead, or cut off
    return WorkerView(
        worker=name,
        state=state,
        host=record.host if record else "",
        pid=record.pid if record else None,
        alive=known.get(liveness),
        mfc=status.mfc if status else "",
        step=status.step if status else 0,
        heartbeat_age_s=records.heartbeats.get(name),
        seconds_in_state=max(0.0, records.now - status.since) if status and status.since else None,
        reason=status.reason if status else "",
        waits_for=status.waits_for if status else "",
        stalled_s=status.stalled_s if status else 0.0,
        stalled_where=status.stalled_where if status else "",
        restarts=len(restarts),
        restart_why=str(restarts[-1].get("why", "")) if restarts else "",
    )
