"""Keeps tasks of a requeued job's previous incarnation alive until Slurm kills them.

Slurm gives a requeued job the same id and counts its steps from 0 again. If a node was given up but its
processes live on, an old srun whose task fails asks for the end of "step 123.0", and slurmctld ends the
step that has that number now (seen with 22.05). So a task that finds a newer attempt of the same job does
nothing and waits for Slurm to kill it, which happens as soon as Slurm reaches the node. It holds no GPU:
the worker has ended. This is one of two guards: an old srun also sends that request by itself when it
learns that its node was given up, which nothing here can prevent. Against that the new attempt uses none
of the old numbers (realsys/supervisor/steps/step_numbers.py).
"""

from __future__ import annotations

import time

from realsys.trial.records import AttemptFiles, AttemptRecord, TrialFiles, read_fresh, read_record

LINGER_S = 24 * 3600.0


def newer_attempt_of_same_job(files: TrialFiles, attempt: int) -> AttemptRecord | None:
    """Returns the newest attempt, if it is not ``attempt`` but of the same Slurm job."""
    newest = files.all_attempts()[-1]
    if newest.number <= attempt:
        return None
    ours = read_record(AttemptRecord, files.attempt(attempt).record)
    if ours is None or not ours.job_id:
        return None
    record = read_fresh(AttemptRecord, newest.record)  # written by another host, after its folder
    return record if record is not None and record.job_id == ours.job_id else None


def former_attempts_of_same_job(files: TrialFiles, attempt: int) -> list[AttemptFiles]:
    """Returns the attempts before ``attempt`` of the same Slurm job, its earlier incarnations, oldest
    first."""
    ours = read_record(AttemptRecord, files.attempt(attempt).record)
    if ours is None or not ours.job_id:
        return []
    former = [one for one in files.all_attempts() if one.number < attempt]
    records = [(one, read_record(AttemptRecord, one.record)) for one in former]
    return [one for one, record in records if record and record.job_id == ours.job_id]


def linger(seconds: float = LINGER_S) -> None:
    """Waits to be killed."""
    time.sleep(seconds)
