"""Decides whether a job that Slurm reports under a remembered id is the job that was submitted (pure).

Ids are given out again: after slurmctld lost its state, when they wrap, and by each cluster from its own
count. So nothing is believed of a job, and above all none is cancelled, before what was remembered at its
submission is compared: comment, submit time and cluster. launcher/slurm/query/own_job.py and the
supervisor (realsys/supervisor/own_jobs.py) ask; nothing here queries Slurm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

SEEN_TOLERANCE_S = 0.5  # between two answers of one controller, which are whole seconds
CLOCK_TOLERANCE_S = 600.0  # between clocks of different hosts


class Ownership(StrEnum):
    """Whose a job is."""

    OURS = "ours"
    NOT_OURS = "not_ours"
    UNKNOWN = "unknown"  # nothing could be compared, or Slurm did not answer
    GONE = "gone"  # Slurm knows no job of that id


@dataclass(frozen=True, kw_only=True)
class JobIdentity:
    """What is remembered of a submitted job.

    Attributes:
        job_id: ``12``, ``12_3``.
        cluster: its name; empty: not known.
        comment: as Slurm showed it, or as it was sent; empty: not recorded.
        submitted_at: seconds since 1970; None: not known.
        was_seen: that is Slurm's own submit time, not the launching host's clock.
        began_at: when an attempt began in the job, by its node's clock; None: not known.
        restarts: number of its requeues until then.
    """

    job_id: str
    cluster: str = ""
    comment: str = ""
    submitted_at: float | None = None
    was_seen: bool = False
    began_at: float | None = None
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class JobTraits:
    """The same of a job that Slurm reports.

    Attributes:
        comment: None if Slurm does not tell it, as an accounting without comments.
        restarts: number of requeues; each sets a new submit time. None: not known.
    """

    cluster: str = ""
    comment: str | None = None
    submitted_at: float | None = None
    restarts: int | None = None


def ownership(identity: JobIdentity, job: JobTraits | None, *, answered: bool = True) -> Ownership:
    """Decides whose the reported job is.

    Args:
        job: None: Slurm reports no job of the id.
        answered: Slurm's answer was complete.
    """
    if job is None:
        return Ownership.GONE if answered else Ownership.UNKNOWN
    comment, time = _same_comment(identity, job), _same_time(identity, job)
    if identity.cluster and job.cluster and identity.cluster != job.cluster:
        if comment and time:  # a federation moved it
            return Ownership.OURS
        return Ownership.NOT_OURS if answered else Ownership.UNKNOWN
    if time and identity.was_seen:  # no controller gives an id out twice in a second
        return Ownership.OURS
    if time is False:
        return Ownership.NOT_OURS
    if comment is False:  # a site may drop or rewrite a comment that was never seen
        return Ownership.UNKNOWN if time else Ownership.NOT_OURS
    return Ownership.OURS if comment or time else Ownership.UNKNOWN


def contradiction(identity: JobIdentity, job: JobTraits) -> str:
    """Says in which respect the reported job is another one; empty if in none."""
    if _same_comment(identity, job) is False:
        return f"its comment is {job.comment!r}" if job.comment else "it has no comment"
    if _same_time(identity, job) is False:
        return "it was submitted at another time"
    if identity.cluster and job.cluster and identity.cluster != job.cluster:
        return f"it is of cluster {job.cluster}"
    return ""


def _same_comment(identity: JobIdentity, job: JobTraits) -> bool | None:
    """Whether the comments agree; None if they can't be compared. A site may put text around ours."""
    if not identity.comment or job.comment is None:
        return None
    ours = rf"(?<![\w/+-]){re.escape(identity.comment)}(?![\w/+-])"
    return re.search(ours, job.comment) is not None


def _same_time(identity: JobIdentity, job: JobTraits) -> bool | None:
    """Whether the submit times agree; None if they can't be compared, as after a requeue."""
    if job.submitted_at is None:
        return None
    is_requeued = job.restarts is None or job.restarts > identity.restarts
    if identity.submitted_at is not None:
        later_s = job.submitted_at - identity.submitted_at
        if abs(later_s) <= (SEEN_TOLERANCE_S if identity.was_seen else CLOCK_TOLERANCE_S):
            return True
        return None if later_s > 0 and is_requeued else False
    if identity.began_at is not None:
        if job.submitted_at <= identity.began_at + CLOCK_TOLERANCE_S:
            return True
        return None if is_requeued else False
    return None
