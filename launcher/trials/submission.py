"""The record of a submission to submitit, used until the supervisor has an attempt record.

Without it, a trial whose supervisor died before it took an attempt, or whose job waits in Slurm's queue,
would look as if it had never been started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from realsys.api.errors import RealsysError
from realsys.slurm.job_identity import JobIdentity
from realsys.trial.machine_identity import MachineIdentity
from realsys.trial.records import AttemptRecord, TrialFiles, write_record
from realsys.trial.trial_reader import check_regular, read_bounded_record

MAX_SCRIPT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class JobMemory:
    """What Slurm showed of a submission's jobs once it had accepted them.

    Attributes:
        comment: as Slurm shows it, since a site may change it; as it was sent if Slurm was not asked.
        submitted: job id → submit time by the controller's clock; empty if Slurm was not asked.
        cluster_name: as squeue prints it; empty if Slurm was not asked.
    """

    comment: str = ""
    submitted: Mapping[str, float] = field(default_factory=dict)
    cluster_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Content of ``submitit/submission.json``.

    Attributes:
        job_id: submitit's; on Slurm that of the job whose batch step is the supervisor.
        scheduler: ``local`` or ``slurm``.
        job_ids: on Slurm, all jobs of the trial: one, except in the layout split.
        host: the launching host.
        pid, start: of the process that runs the job (realsys.trial.records.is_alive); 0 on Slurm.
        machine: of that process; None: of an older revision.
        after_attempt: number of the last attempt before this submission; 0 for the first.
        at: seconds since the epoch.
        folder: where submitit's files of the job are, if not beside this record: the elements of an
            array share the first one's.
        cancelled_by: the user who cancelled the job before it took an attempt; empty: not cancelled.
        index: of an element of a job array, whose id is in one ArrayRecord for all (``job_id`` is then
            empty in the file, and filled in by read_submission).
        cluster: as sbatch --parsable named it; empty: that of slurm.conf; None: not recorded, by an
            older revision.
        job: what identifies the jobs, whatever may get their ids later.
        began_at: not in the file: start of the attempt that effective_submission took the job from.
    """

    job_id: str
    scheduler: str = "local"
    job_ids: tuple[str, ...] = ()
    host: str
    pid: int = 0
    start: int = 0
    machine: MachineIdentity | None = None
    after_attempt: int
    at: float
    folder: str = ""
    cancelled_by: str = ""
    index: int | None = None
    cluster: str | None = None
    job: JobMemory | None = None
    began_at: float | None = None

    @property
    def on_slurm(self) -> bool:
        """Whether it is a Slurm job."""
        return self.scheduler == "slurm"

    def identities(self) -> list[JobIdentity]:
        """Returns what its jobs are recognised by, in the order of ``job_ids``."""
        memory = self.job or JobMemory()
        found = []
        for position, job_id in enumerate(self.job_ids or (self.job_id,)):
            seen = memory.submitted.get(job_id)
            if seen is None and self.began_at is not None and not position:
                # Another submission's, of the same attempt: only its code may be another revision.
                comment = " ".join(memory.comment.split(" ")[:4])
                found.append(JobIdentity(job_id=job_id, comment=comment, began_at=self.began_at))
                continue
            found.append(
                JobIdentity(
                    job_id=job_id,
                    cluster=memory.cluster_name,
                    comment=memory.comment,
                    submitted_at=self.at if seen is None else seen,
                    was_seen=seen is not None,
                )
            )
        return found


def read_submission(files: TrialFiles) -> Submission | None:
    """Reads the last submission; None if there is none, or Slurm has not accepted the array yet.

    Raises:
        TrialError: the record is damaged.
    """
    found = read_bounded_record(Submission, files.submission)
    if found is None:
        return None
    folder = Path(found.folder) if found.folder else files.submitit
    if found.index is not None and not found.job_id:
        array = read_bounded_record(ArrayRecord, array_record(folder))
        if array is None:
            return None
        found = with_array_job(found, array)
    if found.on_slurm and found.job is None:  # an older revision's
        found = replace(found, job=JobMemory(comment=_sent_comment(folder, found.job_id)))
    return found


def _sent_comment(folder: Path, job_id: str) -> str:
    """Reads the job's comment from its script; empty if it can't be read."""
    whole = re.split(r"[_;+]", job_id, maxsplit=1)[0]
    with suppress(OSError):
        path = folder / f"{whole}_submission.sh"
        check_regular(path, max_bytes=MAX_SCRIPT_BYTES)
        text = path.read_text(encoding="utf-8", errors="replace")
        if line := re.search(r'^#SBATCH --comment=(?:"(.*)"|(.*))$', text, re.MULTILINE):
            return line[1] or line[2] or ""
    return ""


def known_submission(files: TrialFiles) -> Submission | None:
    """Reads the last submission; None also if it can't be read."""
    with suppress(RealsysError, OSError):
        return read_submission(files)
    return None


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """Content of ``array.json`` in the folder of an array's first trial: Slurm has accepted the array."""

    job_id: str
    at: float
    cluster: str | None = None
    job: JobMemory | None = None  # ``submitted`` has the array's id


def array_record(folder: Path) -> Path:
    """Path of the ArrayRecord, in the first trial's submitit folder."""
    return folder / "array.json"


def with_array_job(submission: Submission, array: ArrayRecord) -> Submission:
    """Fills in an element's job id from the array's (pure)."""
    job_id, memory = f"{array.job_id}_{submission.index}", array.job
    if memory is not None and (seen := memory.submitted.get(array.job_id)) is not None:
        memory = replace(memory, submitted={job_id: seen})
    return replace(
        submission,
        job_id=job_id,
        job_ids=(job_id,),
        at=array.at,
        cluster=array.cluster,
        job=memory,
    )


def effective_submission(submission: Submission, attempt: AttemptRecord | None) -> Submission:
    """Returns the submission with the job that holds the last attempt first (pure).

    After two concurrent resumes the record is the later one's, but the earlier one's job may hold the
    attempt.
    """
    if not submission.on_slurm or attempt is None or attempt.number <= submission.after_attempt:
        return submission
    recorded = submission.job_ids or (submission.job_id,)
    if not attempt.job_id or attempt.job_id in [job_id.partition(";")[0] for job_id in recorded]:
        return submission
    return replace(
        submission,
        job_id=attempt.job_id,
        job_ids=(attempt.job_id, *recorded),
        began_at=attempt.started_at,
    )


def batch_logs(files: TrialFiles, submission: Submission | None) -> list[Path]:
    """Lists standard error of the submission's process before its supervisor had a log, oldest first.

    All elements of an array are in one folder.
    """
    folder = Path(submission.folder) if submission and submission.folder else files.submitit
    job = submission.job_id.partition(";")[0] if submission else "*"
    try:
        return sorted(folder.glob(f"{job}_*_log.err"), key=lambda path: path.stat().st_mtime)
    except OSError:
        return []


def record_cancellation(files: TrialFiles, submission: Submission, *, by: str) -> None:
    """Records who cancelled the job before it ran, unless a later submission exists."""
    newest = read_submission(files)
    if newest is None or newest.job_id == submission.job_id:
        write_record(files.submission, replace(submission, cancelled_by=by))
