"""Plans a trial and submits it: what `realsys launch` and ``realsys.launch`` share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.plan.time_predictions import store_prediction
from launcher.sites import places
from launcher.submit.job_options import JobOptions
from launcher.submit.planning import make_plan
from launcher.submit.submit import submit
from realsys.api.errors import TrialError
from realsys.api.plan import LaunchPlan
from realsys.trial.records import TrialFiles


def launch_trial(
    experiment: str,
    words: Sequence[str] = (),
    *,
    command: Sequence[str],
    config: Path | None = None,
    trial: str | None = None,
    cluster: str | None = None,
    imports: Sequence[str] = (),
    job: JobOptions | None = None,
    snapshot: bool = True,
) -> tuple[LaunchPlan, TrialFiles]:
    """Starts a trial's supervisor, or submits its job; returns its plan and its folder's files.

    Args:
        command: recorded in the trial's folder as what launched it.
        trial: its name; None takes the next free ``run<N>``.
        Others as of ``make_plan``.
    Raises:
        ConfigErrors: every mistake in settings, experiment and job. TrialError: the name is taken.
        ClusterError: the site refuses the job, or nothing can be written there.
    """
    while True:
        plan = make_plan(
            experiment,
            words,
            config=config,
            trial=trial,
            cluster=cluster,
            imports=imports,
            job=job,
            snapshot=snapshot,
        )
        try:
            files = submit(plan, command=command, imports=imports)
            break
        except TrialError:
            if trial is not None:  # else another launch took run<N> a moment ago: take the next one
                raise
    if cluster is not None:
        places.remember_file_root(plan.cluster.file_root)
    store_prediction(plan, files)
    return plan, files
