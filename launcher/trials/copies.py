"""Detects copies of a trial's folder, whose records name another trial's processes, keys and folder.

For verbs that change something. Verbs that only display accept any folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from realsys.api.errors import RealsysError, TrialError
from realsys.api.plan import LaunchPlan, read_plan
from realsys.trial.records import TrialFiles


def is_copy(files: TrialFiles, plan: LaunchPlan) -> bool:
    """Whether the plan's own folder exists and is a different one."""
    home = Path(plan.trial_dir)
    return home.exists() and not os.path.samefile(home, files.root)


def refuse_copy(files: TrialFiles, *, moved_too: bool) -> None:
    """Raises TrialError if the plan belongs to another folder.

    Args:
        moved_too: also if that folder no longer exists, so that this is the only one.
    """
    try:
        plan = read_plan(files.plan)
    except RealsysError:
        return  # the code that needs the plan reports the error
    if is_copy(files, plan):
        raise TrialError(
            f"this folder is a copy of {plan.trial}: its records refer to {plan.trial_dir}",
            where=str(files.root),
            fix=f"name the original, {plan.trial_dir}; or launch a new trial, e.g. with "
            "actor.path=<a checkpoint of the copy>",
        )
    if moved_too and not Path(plan.trial_dir).exists():
        raise TrialError(
            f"this folder was moved: its plan and records refer to {plan.trial_dir}",
            where=str(files.root),
            fix=f"move it back: mv {files.root} {plan.trial_dir}",
        )
