"""Ends a trial's Slurm job from any node that can talk to Slurm, and makes sure that it is gone.

A waiting job is cancelled. A running one is asked first, through Slurm where its store does not answer;
what is left when the grace is over is killed in its steps and in its batch script at once, since tasks
ignore the SIGTERM of a plain scancel (realsys/worker/task.py). Gone means that Slurm says so: slurmd has
confirmed the end of every process when a job is no longer COMPLETING.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.control.stop_request import ask_to_stop, await_end
from launcher.sites.places import user_name
from launcher.slurm.query.states import JobState
from launcher.slurm.slurm_commands import run_slurm, scancel
from launcher.trials.job_board import JobBoard
from launcher.trials.status import TrialReader
from launcher.trials.submission import Submission, note_cancelled
from launcher.trials.trial_state import State
from launcher.trials.trial_view import TrialView
from realsys.api.errors import ClusterError

QUIET_S = 30.0  # after its exit marker: for the report page and submitit's result
GONE_S = 40.0  # KillWait is 30 s by default
ASK_EVERY_S = (0.3, 0.5, 1.0, 2.0)  # the last one again and again


def stop_job(
    reader: TrialReader,
    submission: Submission,
    view: TrialView,
    grace_s: float,
    extra_s: float,
    did: Callable[[str], None],
) -> bool:
    """Returns when no job of the trial is left; False when none was there.

    Args:
        submission: with the job of the last attempt (``submission.that_counts``).
    Raises:
        ClusterError: Slurm does not answer, or a job is still there after it was killed.
    """
    if view.state not in State.live() and view.state is not State.UNKNOWN:
        if _ended(reader, submission):
            return False
        _await_gone(reader, submission, QUIET_S)
    elif view.state in (State.QUEUED, State.HELD) or view.attempt <= submission.after_attempt:
        _cancel_waiting(reader, submission, did)
    else:
        if not ask_to_stop(reader, view, grace_s, did):
            _ask_by_slurm(submission, did)
        if await_end(reader, grace_s + extra_s):
            _await_gone(reader, submission, QUIET_S)
    if not _ended(reader, submission):
        _kill(submission, did)
    if not _await_gone(reader, submission, GONE_S):
        raise ClusterError(
            f"job {submission.job_id} is still there {GONE_S:g} s after it was killed",
            where=f"squeue -j {submission.job_id}",
            fix="a process hangs in the kernel of a node, or slurmd does not answer: ask the site",
        )
    did(f"job {', '.join(submission.job_ids)} has left Slurm; no process of the trial is left")
    return True


def _ask_by_slurm(submission: Submission, did: Callable[[str], None]) -> None:
    """SIGTERM to the supervisor alone, which takes it for a stop request and passes it on by a connection
    of its own (realsys/supervisor/signals.py)."""
    try:
        scancel([submission.job_id], signal="TERM")
    except ClusterError as error:
        did(f"could not ask it through Slurm either: {error.what}")
        return
    did(f"asked job {submission.job_id} through Slurm to stop after its current step")


def _cancel_waiting(
    reader: TrialReader, submission: Submission, did: Callable[[str], None]
) -> None:
    scancel(submission.job_ids)
    did(f"cancelled job {', '.join(submission.job_ids)}, which had not started a run")
    note_cancelled(reader.files, submission, by=user_name())


def _kill(submission: Submission, did: Callable[[str], None]) -> None:
    """SIGKILL to the steps and the batch script, then the cancellation, should it be requeued."""
    did(f"killing job {', '.join(submission.job_ids)}")
    run_slurm(["scancel", "--full", "--signal=KILL", *submission.job_ids])
    scancel(submission.job_ids)


def _ended(reader: TrialReader, submission: Submission) -> bool:
    """Whether Slurm says that all jobs of the trial are over. Raises ClusterError if it can't say."""
    board = JobBoard()
    accounting = reader.plan.cluster.slurm.accounting if reader.plan else None
    job = board.job(submission, accounting=accounting)
    if job is None or job.state is JobState.UNKNOWN:
        raise ClusterError(
            f"Slurm does not say what job {submission.job_id} does: {'; '.join(board.problems)}",
            where=f"squeue -j {submission.job_id}",
            fix="try again when slurmctld answers (scontrol ping)",
        )
    return all(found.state.has_ended for found in board.jobs_of(submission))


def _await_gone(reader: TrialReader, submission: Submission, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    pauses = iter(ASK_EVERY_S)
    while not _ended(reader, submission):
        if time.monotonic() > deadline:
            return False
        time.sleep(next(pauses, ASK_EVERY_S[-1]))
    return True
