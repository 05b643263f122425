"""The note that a launch leaves about its hand-over to submitit, until the supervisor has a record.

Without it a trial whose supervisor died before it could take an attempt, or whose job waits in Slurm's
queue, would look like one that never started.
"""

from __future__ import annotations

from dataclasses import dataclass

from realsys.api.trial import TrialFiles, read_record


@dataclass(frozen=True, kw_only=True)
class Submission:
    """``submitit/submission.json``.

    Attributes:
        job_id: submitit's; on Slurm that of the job whose batch step is the supervisor.
        scheduler: ``local`` or ``slurm``.
        job_ids: on Slurm, all jobs of the trial: one, but for the layout split.
        host: that launched it.
        pid, start: of the process that runs the job (realsys.api.trial.is_alive); 0 on Slurm.
        after_attempt: number of the last attempt before this hand-over; 0 for the first.
        at: seconds since the epoch.
        folder: where submitit's files of the job are, if not beside this note: the elements of an
            array share the first one's.
        cancelled_by: who cancelled the job before it took an attempt; empty if nobody did.
    """

    job_id: str
    scheduler: str = "local"
    job_ids: tuple[str, ...] = ()
    host: str
    pid: int = 0
    start: int = 0
    after_attempt: int
    at: float
    folder: str = ""
    cancelled_by: str = ""

    @property
    def on_slurm(self) -> bool:
        """Whether Slurm has it."""
        return self.scheduler == "slurm"


def read_submission(files: TrialFiles) -> Submission | None:
    """The last hand-over; None when there was none. Raises TrialError when the note is damaged."""
    return read_record(Submission, files.submission)
