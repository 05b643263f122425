"""Records that a run has ended of which nothing can be seen from here, for `realsys stop --assume-ended`.

The way out when a trial's host is gone for good, or Slurm's job of its id can't be told from another: the
trial is then lost, and can be resumed or removed. Whoever says so must know it; a run whose workers hold
leases, or may hold them in a store that can't be read, is never assumed to have ended.
"""

from __future__ import annotations

import time
from contextlib import closing

from launcher.sites.places import user_name
from launcher.submit.submit import trial_lock
from launcher.trials.copies import refuse_copy
from launcher.trials.status import StatusReader
from launcher.trials.submission import effective_submission, known_submission
from launcher.trials.trial_view import TrialView, view_of
from realsys.api.errors import TrialError, TrialIsLive
from realsys.trial.folders import check_ours
from realsys.trial.records import AssumedEnd, TrialFiles, write_record
from realsys.trial.trial_state import State


def assume_end(files: TrialFiles) -> TrialView:
    """Records the end of the trial's last attempt or submission, if its state is unknown; returns the view.

    Raises:
        TrialIsLive: there are signs of life.
        TrialError: its state does not depend on it, as when Slurm does not answer; its store or records
            can't be read; or the folder is a copy.
        ClusterError: the trial is another user's.
    """
    check_ours(files)
    refuse_copy(files, moved_too=False)
    with trial_lock(files):
        view, job_id, unread = _seen(files)
        if view.state in State.live():
            raise TrialIsLive(
                f"{view.trial} is {view.state.value}: it has not ended",
                where=view.folder,
                fix=f"stop it: realsys stop {view.trial}",
            )
        if view.state is not State.UNKNOWN:
            return view
        if unread:
            raise TrialError(
                f"whether {view.trial} has ended can't be assumed: {unread}",
                where=view.folder,
                fix="its workers may live: make that readable from here first (realsys doctor checks "
                "whether the store answers)",
            )
        end = AssumedEnd(attempt=view.attempt, job_id=job_id, by=user_name(), at=time.time())
        write_record(files.assumed_end, end)
        now, _, _ = _seen(files)
        if now.state is State.UNKNOWN:
            files.assumed_end.unlink()
            raise TrialError(
                f"whether {now.trial} has ended can't be assumed: {now.reason}",
                where=view.folder,
                fix=now.fix,
            )
        return now


def _seen(files: TrialFiles) -> tuple[TrialView, str, str]:
    """Returns the view, the id of the job that counts, and what could not be read of the run's signs of
    life; empty if all was."""
    with closing(StatusReader(files)) as reader:
        records = reader.records()
        view, unread = view_of(records), reader.unread
    submission = known_submission(files)
    if submission is None:
        return view, "", unread
    return view, effective_submission(submission, records.attempt).job_id, unread
