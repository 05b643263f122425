"""Explains the state of a trial on Slurm from its job, with what to do (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.job.conditions import CONDITIONS
from launcher.slurm.query.reasons import reason_fix
from launcher.terminal.text import duration, moment
from realsys.trial.trial_state import JobState, State

if TYPE_CHECKING:
    from launcher.slurm.query.job_query import JobInfo
    from launcher.trials.trial_view import Records

_ENDS = {
    "TIMEOUT": (
        "it reached its time limit",
        "allow more: {resume} --time LIMIT (or --requeue, if the site allows it)",
    ),
    "NODE_FAIL": ("it lost a node", ""),
    "PREEMPTED": (
        "it was preempted by another job",
        "with slurm.requeue: true it would continue automatically",
    ),
    "OUT_OF_MEMORY": (
        "it used more memory than it requested",
        "request more: {resume} scheduling.<worker type>.mem=MIB",
    ),
    "DEADLINE": ("it could not end before its deadline", "{resume} --deadline WHEN, a later one"),
    "BOOT_FAIL": ("a node did not boot", ""),
    "LAUNCH_FAILED": ("Slurm could not start it on its nodes", "realsys doctor"),
}


_WAYS = "if it is the trial's, scancel {0}; if not, realsys stop {1} --assume-ended"
_STILL_RUNS = "nothing for now: it runs; `realsys stop` asks it to end without Slurm"


def explain_job(state: State, records: Records) -> tuple[str, str] | None:
    """Returns (reason, fix) if the job explains the state; None if the trial's own records do."""
    submission, job = records.submission, records.job
    assert submission is not None
    resume = f"realsys resume {records.trial}"
    if job is not None and job.doubt and job.state is JobState.UNKNOWN and state is State.UNKNOWN:
        job_id = submission.job_id
        return (
            job.doubt,
            f"look at `scontrol show job {job_id}`: {_WAYS.format(job_id, records.trial)}",
        )
    if job is not None and job.state is JobState.GONE and state in State.live():
        why = job.doubt or f"Slurm no longer knows job {submission.job_id}"
        return f"{why}; but {len(records.workers)} of its workers hold their leases", _STILL_RUNS
    if job is None or job.state is JobState.UNKNOWN:
        if state is not State.UNKNOWN:
            return None
        return (
            f"Slurm does not report the state of job {submission.job_id}, and no worker holds a lease",
            "try again when slurmctld answers (scontrol ping)",
        )
    if state in (State.QUEUED, State.HELD):
        return _waiting(job, records)
    if state is State.PAUSED:
        return f"job {job.job_id} is suspended", f"scontrol resume {job.job_id} (an operator may)"
    if state is State.STOPPED and records.exit is None:
        by = submission.cancelled_by or _canceller(job)
        return f"job {job.job_id} was cancelled{by and f' by {by}'} before it ran", resume
    if state is State.LOST:
        return _lost(job, records, resume)
    return None


def _waiting(job: JobInfo, records: Records) -> tuple[str, str]:
    again = "again " if records.attempt is not None else ""
    start = f"; expected to start {moment(job.expected_start)}" if job.expected_start else ""
    words, fix = job.reason_words or job.reason, job.fix or reason_fix(job.reason)
    if (other := _waits_for(records)) and job.reason in _DEPENDENCY:
        words = _DEPENDENCY[job.reason].replace("{other}", other)
        fix = f"realsys status {other}"
        if job.reason != "Dependency":
            fix += "; then cancel this one (realsys stop) and launch it without --after"
    return f"job {job.job_id} waits {again}in Slurm's queue: {words}{start}", fix


_DEPENDENCY = {
    "Dependency": "it waits for {other}",
    "DependencyNeverSatisfied": "{other}, which it waits for, did not end as required",
}


def _waits_for(records: Records) -> str:
    """Returns the trial or sweep named by --after, as `realsys status` takes it."""
    after = records.plan.job.after if records.plan and records.plan.job else None
    name, colon, condition = (after or "").rpartition(":")
    return name if colon and condition in CONDITIONS else after or ""


def _lost(job: JobInfo, records: Records, resume: str) -> tuple[str, str]:
    """Explains a missing exit marker by Slurm's record of the job's end."""
    when = (
        f" after {duration(job.ended_at - job.started_at)}"
        if job.ended_at and job.started_at
        else ""
    )
    started = records.attempt is not None
    if job.state is JobState.GONE:
        how, fix = job.doubt or "Slurm no longer knows it", ""
    elif job.slurm_state.startswith("CANCELLED") or job.state is JobState.STOPPED:
        by = _canceller(job)
        how, fix = f"it was cancelled{by and f' by {by}'}", ""
    else:
        base = job.slurm_state.split()[0] if job.slurm_state else ""
        how, fix = _ENDS.get(base, (_exit(job), ""))
        fix = fix.replace("{resume}", resume)
    what = "ended without an exit marker" if started else "ended before its attempt began"
    where = f"read {records.batch_log}" if records.batch_log and not started else ""
    last = "" if resume in fix else resume
    return f"job {job.job_id} {what}{when}: {how}", "; ".join(filter(None, (where, fix, last)))


def _exit(job: JobInfo) -> str:
    if job.signal:
        return f"its batch script was ended by signal {job.signal}"
    if job.exit_code:
        return f"its batch script ended with code {job.exit_code}"
    return f"Slurm says {job.slurm_state}"


def _canceller(job: JobInfo) -> str:
    """Extracts the user's name from sacct's ``CANCELLED by 1000``."""
    word = job.slurm_state.rpartition(" by ")[2]
    if not word.isdigit():
        return ""
    import pwd

    try:
        return pwd.getpwuid(int(word)).pw_name
    except KeyError:
        return f"uid {word}"
