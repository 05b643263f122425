"""Job dependencies for ``--after TRIAL[:ok|any|notok]``: on another trial, or on all trials of a sweep.

Slurm is given dependencies only on trials that have not ended. A few minutes after a job's end it no
longer knows the job and treats a dependency on it as fulfilled, whatever its outcome; so the outcome of
ended trials is read from their own records.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.job.conditions import CONDITIONS
from launcher.trials.find_trials import find_sweep, find_trial, trial_name
from launcher.trials.status import trial_views
from launcher.trials.submission import effective_submission, read_submission
from realsys.api.errors import ConfigError
from realsys.trial.records import AttemptRecord, TrialFiles, read_record
from realsys.trial.trial_state import State

_WHERE = "command line --after"
_FULFILLED = {
    "ok": frozenset({State.COMPLETED}),
    "any": State.final(),
    "notok": State.final() - {State.COMPLETED},
}


def dependency_on(after: str) -> str | None:
    """Builds sbatch's --dependency, e.g. ``afterok:123``; None if there is nothing to wait for.

    Raises:
        NoSuchTrial: no such trial or sweep.
        ConfigError: an unknown condition, a trial without a Slurm job, or one that has ended without
            meeting the condition.
    """
    name, colon, condition = after.rpartition(":")
    if not colon:
        name, condition = after, "ok"
    if condition not in CONDITIONS:
        raise ConfigError(
            f"--after {after!r} has an unknown condition {condition!r}",
            where=_WHERE,
            fix="write TRIAL, TRIAL:ok, TRIAL:any or TRIAL:notok",
        )
    trials = find_sweep(name) or [find_trial(name)]
    jobs = [_job_of(files) for files in trials]
    views = trial_views(trials)
    states = [view.state for view in views]
    for files, view in zip(trials, views, strict=True):
        if view.state not in State.final() and view.job is not None and view.job.doubt:
            raise ConfigError(
                f"Slurm can't wait for {trial_name(files)}: {view.job.doubt}",
                where=_WHERE,
                fix="wait for it with `realsys wait`",
            )
    for files, state in zip(trials, states, strict=True):
        if state in State.final() and state not in _FULFILLED[condition]:
            raise ConfigError(
                f"{trial_name(files)} is {state.value}: a job that waits for it with :{condition} would "
                "never start",
                where=_WHERE,
                fix="resume that trial first (realsys resume), or wait with :any",
            )
    left = [job for job, state in zip(jobs, states, strict=True) if state not in State.final()]
    # afternotok of a whole array means that some element failed; of single elements, that all did.
    waited_for = left if condition == "notok" or len(left) < len(jobs) else _merged(left)
    return ":".join([CONDITIONS[condition], *waited_for]) if left else None


def _job_of(files: TrialFiles) -> str:
    """Returns the job of the trial's last submission."""
    submission = read_submission(files)
    if submission is None or not submission.on_slurm:
        raise ConfigError(
            f"{trial_name(files)} has no Slurm job to wait for",
            where=_WHERE,
            fix="wait for it with `realsys wait`, or name a trial on Slurm (realsys ls)",
        )
    last = files.all_attempts()[-1:]
    attempt = read_record(AttemptRecord, last[0].record) if last else None
    return effective_submission(submission, attempt).job_id


def _merged(jobs: Sequence[str]) -> list[str]:
    """Merges the elements of one array into the array's id, to keep the option short."""
    arrays = {job.partition("_")[0] for job in jobs}
    return list(arrays) if len(jobs) > 1 and len(arrays) == 1 else list(jobs)
