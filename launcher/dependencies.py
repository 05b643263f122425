"""``--after TRIAL[:ok|any|notok]``: a job that waits for another trial's."""

from __future__ import annotations

from launcher.submission import read_submission
from launcher.trials import find_trial, trial_name
from realsys.api.errors import ConfigError

CONDITIONS = {"ok": "afterok", "any": "afterany", "notok": "afternotok"}


def dependency_on(after: str) -> str:
    """sbatch's --dependency for it, e.g. ``afterok:123``.

    Raises:
        NoSuchTrial: no such trial.
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
    files = find_trial(name)
    submission = read_submission(files)
    if submission is None or not submission.on_slurm:
        raise ConfigError(
            f"{trial_name(files)} has no Slurm job to wait for",
            where="command line --after",
            fix="wait for it with `realsys wait`, or name a trial on Slurm (realsys ls)",
        )
    return f"{CONDITIONS[condition]}:{submission.job_id}"
