"""Selects the submitted job among Slurm's records of its id, for every query whose answer is acted on.

realsys/slurm/job_identity.py compares; this module applies it to squeue's row, to accounting's rows of
several runs, and to the rows of several clusters (pure).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from launcher.slurm.query.job_rows import JobInfo
from realsys.slurm.job_identity import (
    JobIdentity,
    JobTraits,
    Ownership,
    contradiction,
    ownership,
)
from realsys.trial.trial_state import JobState

# Of a run in accounting: the job can have another run. After any other end, the next row is another job.
_GOES_ON = ("REQUEUED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "RESIZING", "LAUNCH_FAILED")


def own_job(identity: JobIdentity, found: JobInfo, *, answered: bool = True) -> JobInfo:
    """Returns the job's own record. One of another job becomes GONE, one that can't be told UNKNOWN; then
    ``doubt`` says why.

    Args:
        found: Slurm's record of the id.
        answered: every controller asked has answered.
    """
    records = (found, *found.namesakes)
    for record in records:
        if (own := _own_run(identity, record)) is not None:
            return own
    if found.source == "none":  # no cluster has a record
        return replace(found, namesakes=())
    why = next(filter(None, (contradiction(identity, traits(record)) for record in records)), "")
    verdicts = {ownership(identity, traits(record), answered=answered) for record in records}
    if Ownership.UNKNOWN in verdicts:
        words = f"whether job {identity.job_id} is the trial's can't be told"
        why = why or "neither comment nor submit time can be compared"
        return _doubted(identity, JobState.UNKNOWN, f"{words}: {why}")
    if not answered and found.source != "squeue":  # ours may be in the queue
        return _doubted(identity, JobState.UNKNOWN, f"accounting has another job of the id: {why}")
    words = f"Slurm gave the id {identity.job_id} to another job"
    return _doubted(identity, JobState.GONE, f"{words}: {why}")


def _doubted(identity: JobIdentity, state: JobState, why: str) -> JobInfo:
    return JobInfo(job_id=identity.job_id, state=state, reason_words=why, doubt=why)


def _own_run(identity: JobIdentity, record: JobInfo) -> JobInfo | None:
    """Returns the record if it is ours; of accounting's rows the last run of ours."""
    if record.source == "none":
        return None
    if record.source == "squeue":
        is_ours = ownership(identity, traits(record)) is Ownership.OURS
        return replace(record, namesakes=()) if is_ours else None
    own: list[JobInfo] = []
    for run in (*record.earlier, record):
        verdict = ownership(identity, replace(traits(run), restarts=len(_restarts(own))))
        follows = bool(own) and own[-1].slurm_state.startswith(_GOES_ON)
        if verdict is Ownership.OURS or (follows and verdict is not Ownership.NOT_OURS):
            own.append(run)
        elif own:
            break
    if not own:
        return None
    restarts = len(_restarts(own[:-1])) + (own[-1].slurm_state == "REQUEUED")  # a row will follow
    return replace(own[-1], restarts=restarts, earlier=(), namesakes=())


def _restarts(runs: Iterable[JobInfo]) -> list[JobInfo]:
    """Selects the runs after which the job started anew; a resized job goes on."""
    return [run for run in runs if run.slurm_state != "RESIZING"]


def traits(info: JobInfo) -> JobTraits:
    """Extracts what identifies a job."""
    untold = info.source != "squeue" and not info.comment  # accounting need not keep comments
    return JobTraits(
        cluster=info.cluster,
        comment=None if untold else info.comment,
        submitted_at=info.submitted_at,
        restarts=info.restarts,
    )
