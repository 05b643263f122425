"""Ends several trials at once: jobs that wait in Slurm's queue by one scancel, the others side by side.

What becomes of each is launcher/control/stop.py's work; this file only keeps the number of Slurm commands
and the time from growing with the number of trials.
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
from launcher.trials.submission import Submission, note_cancelled, read_submission
from launcher.trials.trial_state import State
from launcher.trials.trial_view import TrialView
from realsys.api.errors import RealsysError
from realsys.trial.folders import check_ours
from realsys.trial.records import TrialFiles

AT_ONCE = 16
Pair = tuple[TrialFiles, TrialView]


def running(trials: Sequence[TrialFiles]) -> list[Pair]:
    """Those that are not over, or may not be; one query to Slurm for all."""
    views = trial_views(trials)
    stoppable = State.live() | {State.UNKNOWN}
    return [pair for pair in zip(trials, views, strict=True) if pair[1].state in stoppable]


def stop_several(
    trials: Sequence[Pair], *, grace_s: float, tell: Callable[[str], None]
) -> dict[str, RealsysError]:
    """Returns when nothing of the trials is left: trial's name → why it could not be stopped."""
    rest = _cancel_waiting(trials, tell)
    failed: dict[str, RealsysError] = {}

    def stop_one(files: TrialFiles) -> None:
        name = trial_name(files)
        try:
            report = stop(files, grace_s=grace_s, tell=lambda text: tell(f"{name}: {text}"))
            tell(f"{name} is {report.view.state.value}")
        except RealsysError as error:
            failed[name] = error

    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="stop")
    try:
        for _ in pool.map(stop_one, rest):
            pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return failed


def _cancel_waiting(trials: Sequence[Pair], tell: Callable[[str], None]) -> list[TrialFiles]:
    """Cancels the jobs that have not started a run; returns the trials that are left to stop."""
    rest: list[TrialFiles] = []
    waiting: list[tuple[TrialFiles, Submission]] = []
    for files, view in trials:
        submission = read_submission(files) if _is_ours(files) else None  # else stop() refuses it
        in_queue = view.state in (State.QUEUED, State.HELD)
        if submission and in_queue and view.attempt <= submission.after_attempt:
            waiting.append((files, submission))
        else:
            rest.append(files)
    if not waiting:
        return rest
    scancel([job_id for _, submission in waiting for job_id in submission.job_ids])
    for files, submission in waiting:
        note_cancelled(files, submission, by=user_name())
    tell(f"cancelled the jobs of {len(waiting)} trials that had not started")
    board = JobBoard()
    board.expect(submission for _, submission in waiting)
    started = []
    for files, submission in waiting:
        job = board.job(submission)
        if job is None or not job.state.has_ended:  # it began to run between the two commands
            started.append(files)
    return rest + started


def _is_ours(files: TrialFiles) -> bool:
    try:
        check_ours(files)
        refuse_copy(files, moved_too=False)
    except RealsysError:
        return False
    return True
