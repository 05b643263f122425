"""``--after TRIAL[:ok|any|notok]``: a job that waits for another trial's, or for all of a sweep's."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.submission import read_submission
from launcher.trials import find_sweep, find_trial, trial_name
from realsys.api.errors import ConfigError
from realsys.api.trial import TrialFiles

CONDITIONS = {"ok": "afterok", "any": "afterany", "notok": "afternotok"}


def dependency_on(after: str) -> str:
    """sbatch's --dependency for it, e.g. ``afterok:123``.

    Raises:
        NoSuchTrial: no such trial or sweep.
        ConfigError: an unknown condition, or a trial that has no Slurm job.
    """
    name, colon, condition = after.rpartition(":")
    if not colon:
        name, condition = after, "ok"
    if condition not in CONDITIONS:
        raise ConfigError(
            f"--after {after!r} ends in {condition!r}",
            where="command line --after",
            fix="write TRIAL, TRIAL:ok, TRIAL:any or TRIAL:notok",
        )
    jobs = [_job_of(files) for files in find_sweep(name) or [find_trial(name)]]
    return ":".join([CONDITIONS[condition], *_merged(jobs)])


def _job_of(files: TrialFiles) -> str:
    """The job of the trial's last hand-over."""
    submission = read_submission(files)
    if submission is None or not submission.on_slurm:
        raise ConfigError(
            f"{trial_name(files)} has no Slurm job to wait for",
            where="command line --after",
            fix="wait for it with `realsys wait`, or name a trial on Slurm (realsys ls)",
        )
    return submission.job_id


def _merged(jobs: Sequence[str]) -> list[str]:
    """One array's elements as the array: a dependency's length is limited."""
    arrays = {job.partition("_")[0] for job in jobs}
    return list(arrays) if len(jobs) > 1 and len(arrays) == 1 else list(jobs)
