"""Stops a trial's Slurm job from any node with access to Slurm, and verifies that it has ended.

A pending job is cancelled. A running one gets a stop request, through Slurm if its store does not answer;
what remains after the grace is killed in its steps and its batch script at once, since tasks ignore the
SIGTERM of a plain scancel (realsys/worker/srun_task.py). It has ended when Slurm says so: a job is no
longer COMPLETING once slurmd has confirmed the end of every process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.control.stop_request import request_stop, wait_for_end
from launcher.sites.places import user_name
from launcher.slurm.query.states import JobState
from launcher.slurm.slurm_commands import run_slurm, scancel
from launcher.trials.job_board import JobBoard
from launcher.trials.status import TrialReader
from launcher.trials.submission import Submission, record_cancellation
from launcher.trials.trial_state import State
from launcher.trials.trial_view import TrialView
from realsys.api.errors import ClusterError

QUIET_S = 30.0  # after its exit marker: for the report page and submitit's result
GONE_S = 40.0  # KillWait is 30 s by default
POLL_PAUSES_S = (0.3, 0.5, 1.0, 2.0)  # the last one repeatedly


def stop_job(
    reader: TrialReader,
    submission: Submission,
    view: TrialView,
    grace_s: float,
    extra_s: float,
    record_action: Callable[[str], None],
) -> bool:
    """Stops the jobs; returns when none is left. False if there was none.

    Args:
        submission: with the job of the last attempt (``submission.effective_submission``).
    Raises:
        ClusterError: Slurm does not answer, or a job remains after it was killed.
    """
    if view.state not in State.live() and view.state is not State.UNKNOWN:
        if _ended(reader, submission):
            return False
        _await_gone(reader, submission, QUIET_S)
    elif view.state in (State.QUEUED, State.HELD) or view.attempt <= submission.after_attempt:
        _cancel_waiting(reader, submission, record_action)
    else:
        if not request_stop(reader, view, grace_s, record_action):
            _request_stop_by_slurm(submission, record_action)
        if wait_for_end(reader, grace_s + extra_s):
            _await_gone(reader, submission, QUIET_S)
    if not _ended(reader, submission):
        _kill(submission, record_action)
    if not _await_gone(reader, submission, GONE_S):
        raise ClusterError(
            f"job {submission.job_id} is still in Slurm {GONE_S:g} s after it was killed",
            where=f"squeue -j {submission.job_id}",
            fix="a process hangs in the kernel of a node, or slurmd does not answer: ask the site",
        )
    record_action(
        f"job {', '.join(submission.job_ids)} has left Slurm; no process of the trial is left"
    )
    return True


def _request_stop_by_slurm(submission: Submission, record_action: Callable[[str], None]) -> None:
    """Sends SIGTERM through Slurm to the supervisor alone, which handles it as a stop request.

    The supervisor passes it on over its own connection (realsys/supervisor/signals.py).
    """
    try:
        scancel([submission.job_id], signal="TERM")
    except ClusterError as error:
        record_action(f"the stop request through Slurm failed too: {error.what}")
        return
    record_action(
        f"requested a stop after the current step from job {submission.job_id} through Slurm"
    )


def _cancel_waiting(
    reader: TrialReader, submission: Submission, record_action: Callable[[str], None]
) -> None:
    scancel(submission.job_ids)
    record_action(f"cancelled job {', '.join(submission.job_ids)}, which had not started a run")
    record_cancellation(reader.files, submission, by=user_name())


def _kill(submission: Submission, record_action: Callable[[str], None]) -> None:
    """Sends SIGKILL to the steps and the batch script, then cancels the job in case it is requeued."""
    record_action(f"killing job {', '.join(submission.job_ids)}")
    run_slurm(["scancel", "--full", "--signal=KILL", *submission.job_ids])
    scancel(submission.job_ids)


def _ended(reader: TrialReader, submission: Submission) -> bool:
    """Whether all jobs of the trial have ended. Raises ClusterError if Slurm can't tell."""
    board = JobBoard()
    accounting = reader.plan.cluster.slurm.accounting if reader.plan else None
    job = board.job(submission, accounting=accounting)
    if job is None or job.state is JobState.UNKNOWN:
        raise ClusterError(
            f"Slurm does not report the state of job {submission.job_id}: {'; '.join(board.problems)}",
            where=f"squeue -j {submission.job_id}",
            fix="try again when slurmctld answers (scontrol ping)",
        )
    return all(found.state.has_ended for found in board.jobs_of(submission))


def _await_gone(reader: TrialReader, submission: Submission, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    pauses = iter(POLL_PAUSES_S)
    while not _ended(reader, submission):
        if time.monotonic() > deadline:
            return False
        time.sleep(next(pauses, POLL_PAUSES_S[-1]))
    return True
