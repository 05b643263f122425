"""Stops several trials at once: pending Slurm jobs by one scancel, the others concurrently.

launcher/control/stop.py stops each; this module keeps the number of Slurm commands and the time from
growing with the number of trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from launcher.control.stop import stop
from launcher.sites.places import user_name
from launcher.slurm.slurm_commands import scancel
from launcher.trials.copies import refuse_copy
from launcher.trials.find_trials import trial_name
from launcher.trials.job_board import JobBoard
from launcher.trials.status import trial_views
from launcher.trials.submission import Submission, read_submission, record_cancellation
from launcher.trials.trial_view import TrialView
from realsys.api.errors import ClusterError, RealsysError
from realsys.trial.folders import check_ours
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import JobState, State

MAX_CONCURRENT = 16
Pair = tuple[TrialFiles, TrialView]


def running(trials: Sequence[TrialFiles]) -> list[Pair]:
    """Selects the trials that have not ended, or may not have; one query to Slurm for all."""
    views = trial_views(trials)
    stoppable = State.live() | {State.UNKNOWN}
    return [pair for pair in zip(trials, views, strict=True) if pair[1].state in stoppable]


def stop_several(
    trials: Sequence[Pair], *, grace_s: float, on_action: Callable[[str], None]
) -> dict[str, RealsysError]:
    """Stops the trials; returns trial's name → error for those that could not be stopped."""
    rest = _cancel_waiting(trials, on_action)
    failed: dict[str, RealsysError] = {}

    def stop_one(files: TrialFiles) -> None:
        name = trial_name(files)
        try:
            report = stop(
                files, grace_s=grace_s, on_action=lambda text: on_action(f"{name}: {text}")
            )
            on_action(f"{name} is {report.view.state.value}")
        except RealsysError as error:
            failed[name] = error

    pool = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="stop")
    try:
        for _ in pool.map(stop_one, rest):
            pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return failed


def _cancel_waiting(trials: Sequence[Pair], on_action: Callable[[str], None]) -> list[TrialFiles]:
    """Cancels the jobs that have not started a run; returns the trials that remain to be stopped."""
    rest: list[TrialFiles] = []
    queued: list[tuple[TrialFiles, Submission]] = []
    for files, view in trials:
        # stop() refuses the others.
        submission = read_submission(files) if _is_ours(files) else None
        in_queue = view.state in (State.QUEUED, State.HELD)
        if submission and in_queue and view.attempt <= submission.after_attempt:
            queued.append((files, submission))
        else:
            rest.append(files)
    if not queued:
        return rest
    waiting, undecided = _own_jobs(queued)
    rest += undecided  # stop() says what is the matter with each
    for cluster in dict.fromkeys(submission.cluster for _, submission, _ in waiting):
        ids = [job_id for _, s, ids in waiting if s.cluster == cluster for job_id in ids]
        scancel(ids, cluster=cluster)
    for files, submission, _ in waiting:
        record_cancellation(files, submission, by=user_name())
    if waiting:
        on_action(f"cancelled the jobs of {len(waiting)} trials that had not started")
    board = JobBoard()
    board.expect(submission for _, submission, _ in waiting)
    started = []
    for files, submission, _ in waiting:
        job = board.job(submission)
        if job is None or not job.state.has_ended:  # it started between the two commands
            started.append(files)
    return rest + started


def _own_jobs(
    queued: Sequence[tuple[TrialFiles, Submission]],
) -> tuple[list[tuple[TrialFiles, Submission, list[str]]], list[TrialFiles]]:
    """Asks Slurm for the ids that are the trials' own jobs; returns (trial, submission, ids), and the
    trials of which it can't be told.
    """
    board, own, undecided = JobBoard(), [], []
    board.expect(submission for _, submission in queued)
    for files, submission in queued:
        try:
            job = board.job(submission)
            ids = board.cancellable(submission)
        except ClusterError:
            job, ids = None, []
        if job is None or job.state is JobState.UNKNOWN or not ids:
            undecided.append(files)
        else:
            own.append((files, submission, ids))
    return own, undecided


def _is_ours(files: TrialFiles) -> bool:
    try:
        check_ours(files)
        refuse_copy(files, moved_too=False)
    except RealsysError:
        return False
    return True
