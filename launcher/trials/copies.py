"""A copy of a trial's folder is not the trial: its records name the processes, keys and folder of another.

For the verbs that act. Those that only show take any folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from realsys.api.errors import RealsysError, TrialError
from realsys.api.plan import LaunchPlan, read_plan
from realsys.trial.records import TrialFiles


def is_copy(files: TrialFiles, plan: LaunchPlan) -> bool:
    """Whether the plan's own folder is there, and another one."""
    home = Path(plan.trial_dir)
    return home.exists() and not os.path.samefile(home, files.root)


def refuse_copy(files: TrialFiles, *, moved_too: bool) -> None:
    """Raises TrialError where the plan is of another folder.

    Args:
        moved_too: also where that one is not there any more, so that this is the only one.
    """
    try:
        plan = read_plan(files.plan)
    except RealsysError:
        return  # whoever needs it says what is wrong with it
    if is_copy(files, plan):
        raise TrialError(
            f"this folder is a copy of {plan.trial}: its records are of {plan.trial_dir}",
            where=str(files.root),
            fix=f"name the original, {plan.trial_dir}; or launch a new trial, e.g. with "
            "actor.path=<a checkpoint of the copy>",
        )
    if moved_too and not Path(plan.trial_dir).exists():
        raise TrialError(
            f"this folder was moved: its plan and records are of {plan.trial_dir}",
            where=str(files.root),
            fix=f"move it back: mv {files.root} {plan.trial_dir}",
        )
