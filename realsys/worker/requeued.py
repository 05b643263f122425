"""What old tasks of a requeued job must not do: end.

Slurm gives a requeued job the same id and counts its steps from 0 again. When a node was given up but its
processes live on, an old srun whose task fails asks for the end of "step 123.0", and slurmctld ends
whatever has that number now (seen with 22.05). So whoever finds that a newer attempt of the same job runs
does nothing and waits for Slurm to end it, which it does as soon as it reaches the node. Holds no GPU: the
worker has gone. That is one of two guards: an old srun also asks by itself, when it hears that its node
was given up, which nothing here can prevent. Against it the new attempt uses none of the old numbers
(realsys/supervisor/steps/step_numbers.py).
"""

from __future__ import annotations

import time

from realsys.trial.records import AttemptFiles, AttemptRecord, TrialFiles, read_fresh, read_record

LINGER_S = 24 * 3600.0


def newer_attempt_of_same_job(files: TrialFiles, attempt: int) -> AttemptRecord | None:
    """The newest attempt, if it is another one than ``attempt`` in the same Slurm job."""
    newest = files.all_attempts()[-1]
    if newest.number <= attempt:
        return None
    ours = read_record(AttemptRecord, files.attempt(attempt).record)
    if ours is None or not ours.job_id:
        return None
    record = read_fresh(AttemptRecord, newest.record)  # written by another host, after its folder
    return record if record is not None and record.job_id == ours.job_id else None


def former_attempts_of_same_job(files: TrialFiles, attempt: int) -> list[AttemptFiles]:
    """The attempts before ``attempt`` in the same Slurm job, oldest first: its earlier incarnations."""
    ours = read_record(AttemptRecord, files.attempt(attempt).record)
    if ours is None or not ours.job_id:
        return []
    former = [one for one in files.all_attempts() if one.number < attempt]
    records = [(one, read_record(AttemptRecord, one.record)) for one in former]
    return [one for one, record in records if record and record.job_id == ours.job_id]


def linger(seconds: float = LINGER_S) -> None:
    """Waits to be ended."""
    time.sleep(seconds)
