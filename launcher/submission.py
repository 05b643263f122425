"""The note that a launch leaves about its hand-over to submitit, until the supervisor has a record.

Without it a trial whose supervisor died before it could take an attempt would look like one that
never started.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Submission:
    """``submitit/submission.json``.

    Attributes:
        job_id: submitit's.
        host, pid, start: of the process that runs the job (realsys.api.trial.is_alive).
        after_attempt: number of the last attempt before this hand-over; 0 for the first.
        at: seconds since the epoch.
    """

    job_id: str
    host: str
    pid: int
    start: int
    after_attempt: int
    at: float
