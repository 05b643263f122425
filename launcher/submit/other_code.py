"""Refuses a trial whose plan or settings this code can't read, with the revision that can.

For resume and replay. What only shows a trial (status, logs, report, ls) does without its plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from launcher.submit.planning import default_experiment
from realsys.api import registry
from realsys.api.errors import ConfigError, MadeByOtherCode
from realsys.api.plain import from_plain
from realsys.api.plan import LaunchPlan
from realsys.trial.records import TrialFiles, TrialRecord, read_record
from realsys.trial.snapshot import code_that_made


@contextmanager
def refused_with_revision(files: TrialFiles, verb: str) -> Iterator[None]:
    """Raises a MadeByOtherCode from inside again, naming the code that made the trial and how to use it.

    Args:
        verb: what the user wants to do with the trial.
    """
    try:
        yield
    except MadeByOtherCode as error:
        record = read_record(TrialRecord, files.record)
        if record is None:
            raise
        trial = f"{record.experiment_name}/{record.trial_name}"
        made_by, get_it = code_that_made(record, error.revision)
        place = error.where.removeprefix(str(files.plan)).removeprefix(f"{files.plan.name}.")
        raise MadeByOtherCode(
            f"this code can't {verb} {trial}: {error.what}. It was made by {made_by}",
            where=f"{files.plan}: {place}".removesuffix(": "),
            fix=f"use the code that made it: {get_it}; then realsys {verb} {trial}. With this code, its "
            "status, logs, report and checkpoints can be used as before",
        ) from error


def check_settings_readable(files: TrialFiles, plan: LaunchPlan) -> None:
    """Checks that this code knows the trial's settings, before it runs the trial on.

    A trial with a copy of the code of its launch runs that, whatever its settings are called here.

    Raises:
        MadeByOtherCode: naming the first setting that it does not know.
    """
    if plan.snapshot:
        return
    try:
        if plan.options and plan.experiment_name in registry.names("experiment"):
            kind = type(default_experiment(plan.experiment_name))
            from_plain(kind, plan.options, where="options")
    except ConfigError as error:
        made = MadeByOtherCode(
            f"its settings can't be read: {error.what}",
            where=error.where,
            fix="use the revision of realsys that launched the trial",
        )
        made.revision = plan.revision
        raise made from error
