"""A sweep's settings → plans → trial folders → on Slurm, job arrays; launcher/submit/sweep.py decides.

Every plan is made, and every mistake reported, before anything is written; every folder is created before
anything is submitted. All or none: if a later job is refused, the earlier ones are cancelled. The trials
of a sweep share one copy of the code, the first one's: the others link to it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from launcher.submit.dispatch_job import Element, cancel_submission, dispatch, dispatch_array
from launcher.submit.planning import LaunchOptions, Planner
from launcher.submit.submit import (
    discard_folder,
    make_trial,
    record_of,
    translate_os_errors,
    write_environment,
)
from launcher.submit.sweep import Point, array_text, job_groups, merged_problems, points_of
from launcher.terminal import output
from launcher.trials.find_trials import next_free_name
from launcher.trials.submission import Submission, read_submission
from realsys.api.errors import ClusterError, ConfigError, TrialError, flat, raise_all
from realsys.api.plan import LaunchPlan, plan_hash, plan_text
from realsys.trial.records import TrialFiles
from realsys.trial.snapshot import take_snapshot


@dataclass(frozen=True, kw_only=True)
class PlannedSweep:
    """The trials of a sweep, not yet written; ``plans`` in the order of ``points``."""

    experiment: str
    name: str
    points: tuple[Point, ...]
    plans: tuple[LaunchPlan, ...]

    @property
    def title(self) -> str:
        """``experiment/sweep``."""
        return f"{self.experiment}/{self.name}"

    @property
    def on_slurm(self) -> bool:
        """Whether Slurm runs it."""
        return self.plans[0].job is not None

    def groups(self) -> list[list[int]]:
        """Groups the points by job or job array, on Slurm."""
        return job_groups([plan.job for plan in self.plans if plan.job is not None])


def plan_sweep(
    experiment: str,
    words: Sequence[str],
    *,
    name: str | None = None,
    parallel: int | None = None,
    **options: Unpack[LaunchOptions],
) -> PlannedSweep:
    """Makes the plans of all trials.

    Args:
        name: of the sweep; None: the next free ``sweep<N>``.
        parallel: number of trials that may run at a time. Slurm enforces it for a job array; a sweep
            with different jobs, or on the local machine, can't have a limit above 1.
        options: as of ``make_plan``.
    Raises:
        ConfigErrors: every mistake of every trial, each once.
        TrialError: a sweep or a trial of that name exists.
    """
    planner = Planner(experiment, **options)
    taken, name = name, next_free_name(planner.folder, "sweep") if name is None else name
    if taken is not None:
        _check_free(planner.folder, experiment, taken)
    points, plans = points_of(words, name), []
    problems: dict[int, Sequence[ConfigError]] = {}
    for point in points:
        try:
            plans.append(planner.plan(point.words, trial=point.trial))
        except ConfigError as error:
            problems[point.number] = flat(error)
    raise_all(merged_problems(points, problems))
    planned = PlannedSweep(
        experiment=experiment, name=name, points=tuple(points), plans=tuple(plans)
    )
    if parallel is not None:
        _check_parallel(planned, parallel)
    return planned


def make_trials(
    planned: PlannedSweep, *, command: Sequence[str], imports: Sequence[str]
) -> list[TrialFiles]:
    """Creates the folders of all trials, or of none.

    Raises:
        TrialError: one exists already. ClusterError: the file system refused.
    """
    made: list[TrialFiles] = []
    try:
        with translate_os_errors(Path(planned.plans[0].trial_dir)):
            for point, plan in zip(planned.points, planned.plans, strict=True):
                record = record_of(plan, command, sweep=planned.name, point=point.values)
                made.append(make_trial(plan, record))
            if planned.plans[0].snapshot:
                take_snapshot(made[0], imports)
                for files in made[1:]:
                    _share_code(made[0], files)
    except BaseException:
        for files in made:
            discard_folder(files)
        raise
    return made


def submit_jobs(
    planned: PlannedSweep, trials: Sequence[TrialFiles], *, parallel: int | None = None
) -> list[str]:
    """Submits all trials to Slurm, or none; returns each job's or array's id: ``12``, ``13_[0-3%2]``.

    Raises:
        ClusterError: Slurm refused; the folders are removed again, except those of earlier jobs that it
            does not cancel.
    """
    jobs = []
    try:
        for group in planned.groups():
            with translate_os_errors(trials[group[0]].root):
                jobs.append(_submit_group(planned, trials, group, parallel))
    except BaseException:
        _cancel_and_remove(trials, f"{planned.experiment}/{planned.name}")
        raise
    return jobs


def _submit_group(
    planned: PlannedSweep, trials: Sequence[TrialFiles], group: Sequence[int], parallel: int | None
) -> str:
    """Submits one job, or one job array."""
    elements = []
    for i in group:
        plan = planned.plans[i]
        write_environment(trials[i], plan)
        elements.append(
            Element(
                index=planned.points[i].number,
                files=trials[i],
                plan=plan,
                plan_hash=plan_hash(plan_text(plan)),
            )
        )
    if len(elements) == 1:
        one = elements[0]
        return dispatch(one.files, one.plan, one.plan_hash).job_id
    array = array_text([e.index for e in elements], parallel)
    submissions = dispatch_array(elements, name=planned.name, array=array)
    return f"{submissions[0].job_id.partition('_')[0]}_[{array}]"


def _cancel_and_remove(trials: Sequence[TrialFiles], sweep: str) -> None:
    """Cancels the trials' jobs, each cluster's at once, and removes the folders of those that have none
    left and have not run. The folder of a job that Slurm does not cancel stays, to be stopped later."""
    # Read all submissions first: array elements depend on the first element's folder.
    submissions = {files: read_submission(files) for files in trials}
    of_cluster: dict[str | None, list[Submission]] = {}
    for submission in submissions.values():
        if submission is not None:
            of_cluster.setdefault(submission.cluster, []).append(submission)
    left: set[str | None] = set()
    for cluster, held in of_cluster.items():
        job_ids = tuple(dict.fromkeys(job_id for one in held for job_id in one.job_ids))
        try:
            cancel_submission(replace(held[0], job_ids=job_ids))
        except (ClusterError, KeyboardInterrupt) as error:
            left.add(cluster)
            why = error.what if isinstance(error, ClusterError) else "interrupted"
            output.say(
                f"{len(job_ids)} submitted jobs could not be cancelled: {why}; later: realsys stop {sweep}"
            )
    for files, submission in submissions.items():
        is_left = submission is not None and submission.cluster in left
        if not is_left and not files.all_attempts():
            shutil.rmtree(files.root, ignore_errors=True)


def _share_code(first: TrialFiles, files: TrialFiles) -> None:
    """Links a trial to the first one's copy of the code, relatively, so that the root can move."""
    for source in (first.code, first.snapshot, first.root / "dirty.diff"):
        if source.exists():
            (files.root / source.name).symlink_to(os.path.relpath(source, files.root))


def _check_free(folder: Path, experiment: str, name: str) -> None:
    """Raises TrialError if a trial or a sweep has the name."""
    pattern = re.compile(re.escape(name) + r"(-\d+)?")
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    if found := [n for n in names if pattern.fullmatch(n)]:
        raise TrialError(
            f"{experiment} already has trials of that name: {found[0]}"
            + (f" and {len(found) - 1} more" if len(found) > 1 else ""),
            where=str(folder),
            fix="pick another --trial name (without one, the next free sweep<N> is taken)",
        )


def _check_parallel(planned: PlannedSweep, parallel: int) -> None:
    """Raises ConfigError for a limit that can't be enforced."""
    if not planned.on_slurm and parallel > 1:
        raise ConfigError(
            f"--parallel {parallel}: on this machine a sweep's trials run one after the other",
            where="command line --parallel",
            fix="leave it out, or name a Slurm cluster with --cluster (realsys clusters)",
        )
    if planned.on_slurm and (groups := len(planned.groups())) > 1:
        raise ConfigError(
            f"--parallel {parallel}: the trials need different jobs ({groups}), but Slurm can only limit "
            "a single job array",
            where="command line --parallel",
            fix="leave it out, or sweep over values that need the same nodes in one --layout single",
        )
