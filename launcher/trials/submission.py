"""The note that a launch leaves about its hand-over to submitit, until the supervisor has a record.

Without it a trial whose supervisor died before it could take an attempt, or whose job waits in Slurm's
queue, would look like one that never started.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from realsys.trial.records import AttemptRecord, TrialFiles, read_record, write_record


@dataclass(frozen=True, kw_only=True)
class Submission:
    """``submitit/submission.json``.

    Attributes:
        job_id: submitit's; on Slurm that of the job whose batch step is the supervisor.
        scheduler: ``local`` or ``slurm``.
        job_ids: on Slurm, all jobs of the trial: one, but for the layout split.
        host: that launched it.
        pid, start: of the process that runs the job (realsys.trial.records.is_alive); 0 on Slurm.
        after_attempt: number of the last attempt before this hand-over; 0 for the first.
        at: seconds since the epoch.
        folder: where submitit's files of the job are, if not beside this note: the elements of an
            array share the first one's.
        cancelled_by: who cancelled the job before it took an attempt; empty if nobody did.
        index: of an element of a job array, whose id is in one ArrayRecord for all (``job_id`` is empty
            in the file then, and whole in what read_submission returns).
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
    index: int | None = None

    @property
    def on_slurm(self) -> bool:
        """Whether Slurm has it."""
        return self.scheduler == "slurm"


def read_submission(files: TrialFiles) -> Submission | None:
    """The last hand-over; None when there was none, or Slurm has not taken the array yet.

    Raises:
        TrialError: the note is damaged.
    """
    found = read_record(Submission, files.submission)
    if found is None or found.index is None or found.job_id:
        return found
    folder = Path(found.folder) if found.folder else files.submitit
    array = read_record(ArrayRecord, array_record(folder))
    return None if array is None else of_array(found, array)


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """``array.json`` in the folder of an array's first trial: that Slurm has taken it."""

    job_id: str
    at: float


def array_record(folder: Path) -> Path:
    """Where it lies, in the first trial's folder for submitit."""
    return folder / "array.json"


def of_array(note: Submission, array: ArrayRecord) -> Submission:
    """The note of an element with its job, which Slurm named after the array (pure)."""
    job_id = f"{array.job_id}_{note.index}"
    return replace(note, job_id=job_id, job_ids=(job_id,), at=array.at)


def that_counts(submission: Submission, attempt: AttemptRecord | None) -> Submission:
    """The hand-over with the job that has the last attempt first (pure).

    Of two resumes at once the later one's note stands, and the earlier one's job may have the attempt.
    """
    if not submission.on_slurm or attempt is None or attempt.number <= submission.after_attempt:
        return submission
    noted = submission.job_ids or (submission.job_id,)
    if not attempt.job_id or attempt.job_id in [job_id.partition(";")[0] for job_id in noted]:
        return submission
    return replace(submission, job_id=attempt.job_id, job_ids=(attempt.job_id, *noted))


def batch_logs(files: TrialFiles, submission: Submission | None) -> list[Path]:
    """What the hand-over's own process wrote to standard error before its supervisor had a log, oldest
    first; of an array all elements' are in one folder."""
    folder = Path(submission.folder) if submission and submission.folder else files.submitit
    job = submission.job_id.partition(";")[0] if submission else "*"
    try:
        return sorted(folder.glob(f"{job}_*_log.err"), key=lambda path: path.stat().st_mtime)
    except OSError:
        return []


def note_cancelled(files: TrialFiles, submission: Submission, *, by: str) -> None:
    """Writes down who cancelled the job before it ran, unless a later hand-over has a note by now."""
    newest = read_submission(files)
    if newest is None or newest.job_id == submission.job_id:
        write_record(files.submission, replace(submission, cancelled_by=by))
