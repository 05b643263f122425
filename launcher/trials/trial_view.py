"""Derives a trial's state, reason and worker table from its records (pure).

For status, watch, wait, stop, resume and ls. launcher/trials/status.py reads the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from launcher.slurm.query.time_left import TimeLeft, time_left
from launcher.terminal.text import duration
from launcher.trials.explain_job import explain_job
from launcher.trials.submission import Submission
from realsys.slurm.hostlist import compress
from realsys.slurm.lost_nodes import lost_nodes
from realsys.slurm.srun_messages import patience_s, what_to_do
from realsys.trial.liveness import Liveness
from realsys.trial.records import (
    AttemptRecord,
    ExitMarker,
    Progress,
    Result,
    StopRequest,
    TrialRecord,
    WorkerRecord,
    WorkerStatus,
)
from realsys.trial.trial_state import JobState, State, TrialFacts, decide

if TYPE_CHECKING:
    from launcher.slurm.query.job_query import JobInfo
    from realsys.api.plan import LaunchPlan, PhasePlan
    from realsys.trial.plan_summary import PhaseSummary, PlanSummary


@dataclass(frozen=True, kw_only=True)
class KnownProgress:
    """Progress known from the folder, for an attempt with an unreadable store, plan or record.

    Attributes:
        has_begun: its master has started working.
        step, at: the newest known step and when it ended; 0 if none.
        phase: its phase; "" for the main one.
    """

    has_begun: bool
    step: int = 0
    at: float = 0.0
    phase: str = ""


@dataclass(frozen=True, kw_only=True)
class Records:
    """All records of a trial, read at one moment.

    Attributes:
        plan_fix: what to do about a plan that can't be read; "" if it can be, or there is none.
        unread: why the run's liveness can't be determined; "" if everything could be read.
        unread_attempt: number of the newest attempt, if its record can't be read.
        known: progress known from the folder, if something is unread.
        logged: workers that have a log, while the run shows no progress.
        step_waits: worker type → srun's message while it can't start the step of that type.
        full: which disk of the trial is full; "" if none is.
        batch_log: output of the submission's process, while there is no attempt.
    """

    trial: str
    folder: str
    now: float
    plan: LaunchPlan | PlanSummary | None = None
    plan_fix: str = ""
    record: TrialRecord | None = None
    submission: Submission | None = None
    submission_alive: Liveness = Liveness.NONE
    job: JobInfo | None = None  # Slurm's record; None for a local run
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
    published: frozenset[str] = frozenset()  # preparation phases whose product exists
    metrics: Mapping[str, Any] = field(default_factory=dict)  # last line of the main phase
    notes: tuple[str, ...] = ()  # what could not be read
    unread: str = ""
    unread_attempt: int = 0
    known: KnownProgress | None = None
    logged: frozenset[str] = frozenset()
    step_waits: Mapping[str, str] = field(default_factory=dict)
    full: str = ""
    batch_log: str = ""

    @property
    def on_slurm(self) -> bool:
        """Whether its last submission is a Slurm job."""
        return self.submission is not None and self.submission.on_slurm


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
    restarts: int = 0  # number of its single restarts in this attempt
    restart_why: str = ""  # why it last ended
    has_log: bool = True

    @property
    def is_not_started(self) -> bool:
        """Whether there is no trace of it, not even a log."""
        return self.state == "not started" and not self.has_log


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
    trusted_rules: tuple[str, ...] = ()  # reward rules in the workers' own process
    changes: tuple[str, ...] = ()  # settings that a resume has changed
    is_resumable: bool = True  # as far as its plan is concerned
    known_at: float | None = None  # if the store can't be read: time of step and phase

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen without intervention, as far as can be determined.

        A job whose state Slurm does not report at the moment may run or wait, so waiting for its end
        continues. For a run on another host without Slurm, nothing more can be learned here.
        """
        if self.state is State.UNKNOWN:
            return not self.job_ids
        return self.state not in State.live()


def view_of(records: Records) -> TrialView:
    """Derives the view from the records."""
    attempt, marker = records.attempt, records.exit
    state = decide(_facts(records))
    progress = records.progress
    if progress is not None and (attempt is None or progress.attempt != attempt.number):
        progress = None
    # Calls recorded as running are no longer running.
    if progress is not None and (state not in State.live() or records.known is not None):
        progress = replace(progress, running={}, doing="", eta_seconds=None)
    known = records.known
    if progress is not None and known is not None and known.at > progress.updated_at:
        progress = replace(progress, step=max(progress.step, known.step))
    phase = _current_phase(records, progress)
    reason, fix = _explanation(state, records)
    if records.plan_fix and state in State.final() - {State.COMPLETED}:  # a resume would be refused
        kept = f"{fix}; " if fix and "realsys resume" not in fix else ""
        fix = f"{kept}its plan can't be read here: {records.plan_fix}"
    return TrialView(
        trial=records.trial,
        state=state,
        reason=reason,
        fix=fix,
        folder=records.folder,
        attempt=attempt.number if attempt else records.unread_attempt,
        host=attempt.host if attempt else "",
        supervisor_pid=attempt.supervisor_pid if attempt else None,
        created_at=records.record.created_at if records.record else None,
        started_at=attempt.started_at if attempt else None,
        ended_at=marker.ended_at if marker else None,
        phase=phase.name if phase else "",
        phases=tuple(p.name for p in records.plan.phases) if records.plan else (),
        step=progress.step if progress else (marker.step if marker else known.step if known else 0),
        total_steps=progress.total_steps if progress else 0,
        progress=progress,
        workers=_workers(records, phase),
        exit=marker,
        job=records.job,
        job_ids=records.submission.job_ids if records.submission else (),
        time=_time_left(state, records, progress),
        metrics=records.metrics,
        notes=records.notes,
        trusted_rules=records.plan.trusted_rules if records.plan else (),
        is_resumable=not records.plan_fix,
        changes=_changes(records.record),
        known_at=known.at if known else None,
    )


def _changes(record: TrialRecord | None) -> tuple[str, ...]:
    if record is None or not record.changes:
        return ()
    from launcher.trials.changed_settings import change_lines

    return tuple(change_lines(record.changes))


def _time_left(state: State, records: Records, progress: Progress | None) -> TimeLeft | None:
    if state not in State.live():
        return None
    eta_s = progress.eta_seconds if progress and state is State.RUNNING else None
    return time_left(records.job, records.plan, eta_s=eta_s, now=records.now)


def _facts(records: Records) -> TrialFacts:
    attempt, submission = records.attempt, records.submission
    number = attempt.number if attempt else records.unread_attempt
    supervisor = records.supervisor if attempt else Liveness.NONE
    if attempt is None and records.unread_attempt:  # there is one, but it can't be identified
        supervisor = Liveness.UNKNOWN
    pending = submission is not None and submission.after_attempt >= number
    current = [w for w in records.workers.values() if w.attempt == number]
    progress, job = records.progress, records.job
    state = job.state if job else None
    if records.on_slurm and state is None:
        state = JobState.UNKNOWN
    if state is JobState.GONE and records.known is not None:  # nor can the leases be read
        state = JobState.UNKNOWN
    return TrialFacts(
        planned=records.plan is not None,
        pending=records.submission_alive if pending else Liveness.NONE,
        supervisor=supervisor,
        result=records.exit.result if records.exit else None,
        stop_requested=records.stop is not None and records.stop.attempt == number,
        leases=bool(current),
        working=(progress is not None and progress.attempt == number)
        or (records.known is not None and records.known.has_begun)
        or any(s.state == "running" for s in records.statuses.values()),
        job=state,
        requeued=_is_requeued(records),
        cancelled=submission is not None and bool(submission.cancelled_by),
    )


def _is_requeued(records: Records) -> bool:
    """Whether Slurm restarted or requeued the job after the attempt."""
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
    """Returns the reason for the state, if it needs one, and what to do."""
    attempt, marker, resume = records.attempt, records.exit, f"realsys resume {records.trial}"
    if records.known is not None and (state in _UNREAD_MATTERS):
        return _unread(state, records)
    if records.step_waits and state in (State.STARTING, State.RUNNING):
        return _explain_step_waits(records.step_waits)
    if state is State.STARTING and (silent := _silent_steps(records)):
        return silent
    if records.on_slurm:
        explained = explain_job(state, records)
        if explained is not None and state is State.LOST and records.full:
            return f"{explained[0]}; there is {records.full}", explained[1]
        if explained is not None:
            return explained
    if state is State.FAILED and marker and marker.first_failure:
        failure = marker.first_failure
        why = f"{failure.who}: {failure.why}"
        if lost := lost_nodes(marker, attempt.nodes if attempt else ""):
            return why, f"{resume} --exclude {compress(sorted(lost))}, which uses other nodes"
        return why, failure.fix or (f"read its log, then {resume}" if failure.log else resume)
    if state is State.FAILED:
        return "its supervisor recorded no reason", f"realsys logs {records.trial}; {resume}"
    if state is State.LOST and _facts(records).pending is Liveness.DEAD:
        fix = f"read {records.batch_log}, then {resume}" if records.batch_log else resume
        return "the supervisor ended before its attempt began", fix
    if state is State.LOST and attempt and records.full:
        who = f"the supervisor (pid {attempt.supervisor_pid} on {attempt.host})"
        return f"{who} ended without an exit marker, and there is {records.full}", resume
    if state is State.LOST and attempt:
        return (
            f"the supervisor (pid {attempt.supervisor_pid} on {attempt.host}) ended without an exit "
            "marker: killed, or the host rebooted, or no space was left to write it",
            resume,
        )
    if state is State.STOPPED:
        by = f" by {records.stop.by}" if records.stop else ""
        longer = f"; for a longer limit: {resume} --time LIMIT" if "time limit" in by else ""
        return f"stopped on request{by}", resume + longer
    if state is State.STOPPING and records.stop:
        by, left = records.stop.by, records.stop.at + records.stop.grace_seconds - records.now
        return f"requested by {by}; {max(0.0, left):.0f} s of grace left for the current step", ""
    if state is State.UNKNOWN:
        where = attempt or records.submission
        if records.plan is None and not where:
            return "its records can't be read", f"inspect {records.folder}"
        host, assume = where.host if where else "another host", ASSUME_ENDED.format(records.trial)
        return (
            f"it was started on {host}, and no worker holds a lease",
            f"check with `realsys status` on {host}; if it has ended: {assume}",
        )
    return "", ""


ASSUME_ENDED = "realsys stop {} --assume-ended"  # launcher/control/assume_end.py
SILENT_S = 30.0
_EXPECT = "the run ends automatically if a step can't be started"
_UNREAD_MATTERS = frozenset({State.STARTING, State.RUNNING, State.STOPPING, State.UNKNOWN})


def _unread(state: State, records: Records) -> tuple[str, str]:
    """Describes what is known about a run with an unreadable store or plan, how old that is, and what is
    unknown.
    """
    known = records.known
    assert known is not None
    last = "as far as is known it has not started working"
    if known.step:
        age = duration(max(0.0, records.now - known.at))
        last = f"last known is step {known.step}" + (f" of {known.phase}" if known.phase else "")
        last += f", {age} ago"
    elif known.has_begun:
        last = "it has started working, and no finished step is known"
    why = f"{records.unread}; {last}; the state of its workers is unknown"
    where = records.attempt or records.submission
    if state is State.UNKNOWN and records.submission is not None and records.submission.on_slurm:
        why = f"Slurm does not report the state of job {records.submission.job_id}, and {why}"
    if state is State.UNKNOWN and not records.on_slurm and where is not None:
        return (
            f"it was started on {where.host}; {why}",
            f"check with `realsys status` on {where.host}",
        )
    return why, "try again later; `realsys doctor` checks whether the store answers"


def _explain_step_waits(waits: Mapping[str, str]) -> tuple[str, str]:
    """Explains a step that srun can't start; the supervisor gives up after a while."""
    sentence = next(iter(waits.values()))
    why = f"srun can't start {', '.join(waits)} yet: {sentence}"
    until = f"the run ends automatically if that lasts {duration(patience_s(sentence))}"
    return why, "; ".join(filter(None, (until, what_to_do(sentence))))


def _silent_steps(records: Records) -> tuple[str, str] | None:
    """Explains steps without any output: srun waits two minutes before it prints the cause."""
    if not records.on_slurm or records.attempt is None or records.progress is not None:
        return None
    age_s = records.now - records.attempt.started_at
    workers = _workers(records, _current_phase(records, None))
    silent = dict.fromkeys(w.worker.partition("/")[0] for w in workers if w.is_not_started)
    # Not before all jobs have started.
    requested = [kind for kind in silent if f"srun-{kind}" in records.logged]
    if not requested or age_s < SILENT_S:
        return None
    kinds = ", ".join(requested)
    why = f"srun has not started {kinds} for {duration(age_s)} and has not printed a cause yet"
    return why, f"wait, or check what the job's steps hold: realsys plan, squeue --steps; {_EXPECT}"


def _current_phase(records: Records, progress: Progress | None) -> PhasePlan | PhaseSummary | None:
    if records.plan is None:
        return None
    phases: dict[str, PhasePlan | PhaseSummary] = {p.name: p for p in records.plan.phases}
    named = progress.phase if progress else (records.exit.phase if records.exit else "")
    if progress is None and records.known is not None and records.known.step:
        named = records.known.phase or records.plan.phases[-1].name
    if named in phases:
        return phases[named]
    left = [p for p in records.plan.phases if p.name not in records.published]
    return (left or list(records.plan.phases))[0]


def _workers(records: Records, phase: PhasePlan | PhaseSummary | None) -> tuple[WorkerView, ...]:
    """Lists the phase's workers, whether or not they have registered."""
    expected: Sequence[str] = ()
    if phase is not None and records.attempt is not None:
        groups = phase.scheduling.groups().items()
        expected = [f"{kind}/{i}" for kind, group in groups for i in range(group.count)]
    names = [*expected, *sorted(set(records.workers) - set(expected))]
    return tuple(_worker(name, records) for name in names)


def _state_without_status(records: Records) -> str:
    """Determines the state of a worker without a record in the store."""
    attempt, progress = records.attempt, records.progress
    if records.known is not None:
        return "not known"
    if records.exit is not None:  # the store ended with its job
        return "done" if records.exit.result is Result.COMPLETED else "ended"
    # The master publishes its progress only after every worker has registered.
    came = attempt is not None and progress is not None and progress.attempt == attempt.number
    return "gone" if came else "not started"


def _worker(name: str, records: Records) -> WorkerView:
    record, status = records.workers.get(name), records.statuses.get(name)
    liveness = records.alive.get(name, Liveness.NONE)
    known = {Liveness.ALIVE: True, Liveness.DEAD: False}
    state = status.state if status else _state_without_status(records)
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
        reason=status.reason if status else records.step_waits.get(name.partition("/")[0], ""),
        waits_for=status.waits_for if status else "",
        stalled_s=status.stalled_s if status else 0.0,
        stalled_where=status.stalled_where if status else "",
        restarts=len(restarts),
        restart_why=str(restarts[-1].get("why", "")) if restarts else "",
        has_log=status is not None or name in records.logged,
    )
