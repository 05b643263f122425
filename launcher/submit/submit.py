"""LaunchPlan → trial folder → a running supervisor, through submitit; likewise for a resume.

A trial's folder is created exclusively: its name is the lock against a second launch of the same trial.
If anything fails before the supervisor is submitted, the folder is removed again. Decides nothing about
the run (resolve.py does) and does not wait for it (render.py does).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Unpack

from launcher.sites import places
from launcher.sites.site_problems import missing_secrets
from launcher.slurm.login_environment import (
    dropped_variable_warnings,
    host_variables,
    task_variables,
)
from launcher.submit.dispatch_job import dispatch
from launcher.submit.node_exclusion import with_excluded_nodes
from launcher.submit.other_code import check_settings_readable, refused_with_revision
from launcher.submit.plan_change import StoredPlan, read_stored_plan, replace_plan, restore_plan
from launcher.submit.planning import LaunchOptions, import_all, make_plan
from launcher.submit.remake import RemadePlan, RequestedChanges, remake
from launcher.trials.copies import refuse_copy
from launcher.trials.submission import Submission, read_submission
from launcher.trials.trial_view import TrialView
from realsys import __version__
from realsys.api.errors import (
    ClusterError,
    ConfigError,
    RealsysError,
    TrialError,
    TrialIsLive,
    raise_all,
)
from realsys.api.plan import LaunchPlan, plan_hash, plan_text, read_plan
from realsys.api.worker_configs import RolloutWorker
from realsys.config.extras import missing_packages
from realsys.observability.metrics import read_metrics
from realsys.rollout.conversation.form_choice import needed_by_form
from realsys.rollout.conversation.renderer_choice import TEMPLATE, needed_packages
from realsys.rollout.environments.environment_arguments import packages_of_environment
from realsys.slurm.containers import missing_files
from realsys.trial.folders import check_trial, make_trial_folder
from realsys.trial.records import (
    AttemptRecord,
    TrialFiles,
    TrialRecord,
    read_record,
    write_record,
)
from realsys.trial.snapshot import (
    changed_code_warning,
    code_digest,
    provenance_warning,
    take_snapshot,
)
from realsys.trial.trial_state import State
from realsys.worker.environment import write_exports


def launch_trial(
    experiment: str,
    words: Sequence[str] = (),
    *,
    command: Sequence[str],
    trial: str | None = None,
    **options: Unpack[LaunchOptions],
) -> tuple[LaunchPlan, TrialFiles]:
    """Plans a trial and starts its supervisor, or submits its job; returns its plan and its folder's files.

    Args:
        command: recorded in the trial's folder as what launched it.
        trial: its name; None takes the next free ``run<N>``.
        options: as of ``make_plan``.
    Raises:
        ConfigErrors: every mistake in settings, experiment and job. TrialError: the name is taken.
        ClusterError: the site refuses the job, or nothing can be written there.
    """
    from launcher.plan.time_predictions import store_prediction  # loads the planner

    while True:
        plan = make_plan(experiment, words, trial=trial, **options)
        try:
            files = submit(plan, command=command, imports=options.get("imports", ()))
            break
        except TrialError:
            if trial is not None:  # else another launch took run<N> a moment ago: take the next one
                raise
    if options.get("cluster") is not None:
        places.remember_file_root(plan.cluster.file_root)
    store_prediction(plan, files)
    return plan, files


def submit(
    plan: LaunchPlan, *, command: Sequence[str] = (), imports: Sequence[str] = ()
) -> TrialFiles:
    """Creates the trial's folder and starts its first attempt.

    Args:
        command: the user's command line, for the record.
        imports: present paths of ``--import`` files, for the snapshot.
    Raises:
        TrialError: the trial exists; the fix names how to watch, stop or resume it.
        ClusterError: the file system refused.
    """
    with translate_os_errors(Path(plan.trial_dir)):
        record = record_of(plan, command)
        files = make_trial(plan, record)
        try:
            if plan.snapshot:
                take_snapshot(files, imports)
            start_attempt(files, plan, record.plan_hash)
        except BaseException:
            discard_folder(files)
            raise
    return files


def make_trial(plan: LaunchPlan, record: TrialRecord) -> TrialFiles:
    """Creates the trial's folder with its plan and record; starts nothing.

    Raises:
        TrialError: the trial exists.
        ClusterError: another user could replace a folder on the path to it.
        ConfigErrors: an image file, or packages of the workers, are missing, which a plan permits but
            a launch does not.
    """
    raise_all([*missing_images(plan), *packages_missing_here(plan)])
    files = TrialFiles(Path(plan.trial_dir))
    try:
        make_trial_folder(files, root=Path(plan.cluster.file_root))
    except FileExistsError:
        raise trial_exists_error(files, plan.trial) from None
    try:
        write_text(files.plan, plan_text(plan))
        write_record(files.record, record)
    except BaseException:
        discard_folder(files)
        raise
    return files


def missing_images(plan: LaunchPlan) -> Iterator[ConfigError]:
    """Yields image files of the plan's steps that are not visible from here, each once."""
    images = {step.container_image: step.worker_type.value for p in plan.phases for step in p.steps}
    for image, kind in images.items():
        where = f"image of {kind}"
        yield from missing_files(plan.cluster.container, image, where=where, exists=os.path.exists)


def packages_missing_here(plan: LaunchPlan) -> list[ConfigError]:
    """Packages of an extra that workers lack which would run in this Python installation."""
    if plan.job is not None:
        groups = [group for phase in plan.phases for group in phase.scheduling.groups().values()]
        if plan.cluster.venv or all(group.scheduling.container_image for group in groups):
            return []  # the workers' Python is another one
    workers = [worker for phase in plan.phases for worker in phase.config.model_worker]
    backends = {shard.backend.type_ for worker in workers for shard in worker.shards}
    needed = ["torch", "transformers", *(["megatron"] if "megatron" in backends else [])]
    rollouts = [worker for phase in plan.phases for worker in phase.config.rollout_worker]
    evaluators = [worker for phase in plan.phases for worker in phase.config.evaluator]
    asked = [benchmark.player for worker in evaluators for benchmark in worker.benchmarks.values()]
    needed += packages_of_rollouts([*rollouts, *(player for player in asked if player is not None)])
    where = f"workers on site {plan.cluster.name!r}, which run in the Python of this command"
    instead = "or name in the site file what the nodes have: venv, or cpu_image and gpu_image"
    return missing_packages(needed, where=where, instead=instead if plan.job else "")


def packages_of_rollouts(workers: Sequence[RolloutWorker]) -> list[str]:
    """Returns the packages of extras that the workers' agents and environments need."""
    renderers = {str(worker.agent_args.get("renderer", TEMPLATE)) for worker in workers}
    forms = {str(worker.agent_args.get("form", "")) for worker in workers}
    wanted = [*map(needed_packages, renderers), *map(needed_by_form, forms)]
    needed = list(dict.fromkeys(package for packages in wanted for package in packages))
    if any(worker.agent_args.get("schema") == "enforce" for worker in workers):
        needed.append("llguidance")
    for name in {worker.env: None for worker in workers}:
        needed += packages_of_environment(name)
    return needed


def discard_folder(files: TrialFiles) -> None:
    """Removes the folder of a trial that was not submitted."""
    if read_submission(files) is None:
        shutil.rmtree(files.root, ignore_errors=True)


def launch_warnings(plan: LaunchPlan) -> list[str]:
    """Lists what a launch must report: the plan's warnings, and shell variables not passed on to the
    Slurm job.
    """
    warnings = [provenance_warning(TrialFiles(Path(plan.trial_dir)))] if plan.snapshot else []
    warnings += dropped_variable_warnings(os.environ) if plan.job is not None else []
    return [*plan.warnings, *filter(None, warnings)]


def resume_warnings(files: TrialFiles) -> list[str]:
    """Lists what a resume must report: code that differs from the launch's, steps that are lost."""
    with suppress(RealsysError):  # the resume itself reports damaged records
        changed = changed_code_warning(files, read_plan(files.plan))
        return list(filter(None, [changed, lost_steps_warning(files)]))
    return []


def lost_steps_warning(files: TrialFiles) -> str:
    """That steps were done and no checkpoint of them is left; empty if that is not so."""
    if has_checkpoint(files):
        return ""
    with suppress(RealsysError, OSError):
        if rows := read_metrics(files.phase(files.root).metrics):
            return (
                f"no checkpoint is left in {files.phase(files.root).recover}: the {len(rows)} steps that "
                "were done begin again from step 0. Checkpoints come with exp_ctrl.ckpt_freq_steps=N"
            )
    return ""


def resubmit(
    files: TrialFiles,
    *,
    exclude: str | None = None,
    changes: RequestedChanges | None = None,
    command: Sequence[str] = (),
    report: Callable[[str], None] = lambda _: None,
) -> Submission:
    """Starts the next attempt of a trial that is not running; returns its submission.

    Args:
        exclude: hostlist of nodes to exclude.
        changes: settings to apply from this attempt on.
        command: the user's command line, for the record of the changes.
        report: called with each changed setting once the attempt is started.
    Raises:
        TrialIsLive: it is running, or another command is resuming it.
        TrialError: it has completed, or its folder is damaged, was moved or is a copy of another trial's.
        ClusterError: another user could replace its folder, or one on the path to it.
        ConfigError: an ``--import`` file can't be imported any more, its plan was modified, or a
            setting can't be changed.
        MadeByOtherCode: this code can't read its plan or its settings.
    """
    check_trial(files)
    with refused_with_revision(files, "resume"):
        # Reports a damaged plan before anything is modified.
        read_stored_plan(files, finish=False)
    refuse_copy(files, moved_too=True)
    with trial_lock(files):
        current = read_stored_plan(files, finish=True)
        changed = changes is not None and not changes.is_empty
        view = _resumable(files, allow_completed=changed)
        import_all(current.plan.imports)
        with refused_with_revision(files, "resume"):
            check_settings_readable(files, current.plan)
        if current.plan.job is not None:
            raise_all(missing_secrets(current.plan.cluster, os.environ))
        made = None
        if changes is not None and changed:
            made = remake(files, current.record, current.plan, current.raw, changes)
        if view.state is State.COMPLETED:
            if not (made and made.extends_run):
                raise trial_completed_error(files, view.trial)
            if not has_checkpoint(files):
                raise _no_checkpoint_error(files, view.trial)
        with translate_os_errors(files.root):
            if made is None:
                now = without_start_conditions(current.plan, datetime.now())
                return start_attempt(
                    files, with_excluded_nodes(now, exclude) if exclude else now, current.hash
                )
            submission = _start_changed(files, current, made, exclude, command)
    for line in made.lines():
        report(line)
    for warning in made.warnings:
        report(f"warning: {warning}")
    return submission


def _start_changed(
    files: TrialFiles,
    current: StoredPlan,
    made: RemadePlan,
    exclude: str | None,
    command: Sequence[str],
) -> Submission:
    """Starts the next attempt with another plan; keeps the former plan if the submission fails."""
    job = with_excluded_nodes(made.plan, exclude) if exclude else made.plan
    try:
        new = replace_plan(files, current, made.plan, settings=made.lasting, command=command)
        return start_attempt(files, job, new.hash)
    except BaseException:
        restore_plan(files, current)
        raise


def has_checkpoint(files: TrialFiles) -> bool:
    """Whether the main phase has a checkpoint from which a resume could continue."""
    return any(files.phase(files.root).recover.glob("step-*"))


def trial_completed_error(files: TrialFiles, trial: str) -> TrialError:
    """Makes the error for resuming a completed trial."""
    return TrialError(
        f"{trial} has completed; there is nothing to resume",
        where=str(files.root),
        fix="launch another trial, e.g. with more steps and actor.path=<its checkpoint>",
    )


def _no_checkpoint_error(files: TrialFiles, trial: str) -> TrialError:
    return TrialError(
        f"{trial} has completed and keeps no checkpoint to go on from",
        where=str(files.phase(files.root).recover),
        fix="launch another trial with actor.path=<its saved model>; exp_ctrl.ckpt_freq_steps keeps one",
    )


def _resumable(files: TrialFiles, *, allow_completed: bool) -> TrialView:
    """Returns the view of a trial that is not running; raises if it is.

    Args:
        allow_completed: accept a completed trial.
    """
    from launcher.trials.status import trial_view

    view = trial_view(files)
    if view.state in State.live():
        raise TrialIsLive(
            f"{view.trial} is {view.state.value}",
            where=str(files.root),
            fix=f"watch it: realsys watch {view.trial}   stop it: realsys stop {view.trial}",
        )
    if view.state is State.COMPLETED and not allow_completed:
        raise trial_completed_error(files, view.trial)
    if view.state is State.UNKNOWN:
        raise TrialError(
            f"whether {view.trial} still runs is unknown: {view.reason}",
            where=str(files.root),
            fix=view.fix,
        )
    return view


@contextmanager
def trial_lock(files: TrialFiles) -> Iterator[None]:
    """Locks the trial between the check that it does not run and its submission.

    On a file system without locks the supervisors resolve the race: only one of them gets the attempt.
    """
    with translate_os_errors(files.root):
        files.submitit.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(files.submitit / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        trial = "/".join(files.root.parts[-2:])
        raise TrialIsLive(
            f"another command is resuming or removing {trial}",
            where=str(files.root),
            fix=f"nothing: see what it started with `realsys status {trial}`",
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(lock)


def check_attempt_is_ours(files: TrialFiles, number: int, mine: Submission) -> None:
    """Raises TrialIsLive if attempt ``number``, begun after submission ``mine``, belongs to another one."""
    if number <= mine.after_attempt:
        return
    attempt = read_record(AttemptRecord, files.attempt(number).record)
    if attempt is None or not attempt.job_id or attempt.job_id == mine.job_id.partition(";")[0]:
        return
    trial = "/".join(files.root.parts[-2:])
    raise TrialIsLive(
        f"another command has resumed {trial} at the same moment: its job {attempt.job_id} has "
        f"attempt {number}, not job {mine.job_id} of this one",
        where=str(files.root),
        fix=f"nothing: this one's job ends by itself; watch the other: realsys watch {trial}",
    )


def without_start_conditions(plan: LaunchPlan, now: datetime) -> LaunchPlan:
    """Returns the plan without the times and dependency of its first start.

    A deadline that has passed is dropped too, because Slurm would refuse the job for it.
    """
    if plan.job is None:
        return plan
    passed = plan.job.deadline and datetime.fromisoformat(plan.job.deadline) <= now
    deadline = None if passed else plan.job.deadline
    job = replace(plan.job, begin=None, dependency=None, after=None, deadline=deadline)
    return replace(plan, job=job)


def start_attempt(files: TrialFiles, plan: LaunchPlan, hash_of_plan: str) -> Submission:
    """Submits the next attempt; on Slurm, writes the environment that its job takes from this shell
    first.
    """
    if plan.job is not None:
        write_environment(files, plan)
    return dispatch(files, plan, hash_of_plan)


def write_environment(files: TrialFiles, plan: LaunchPlan) -> None:
    """Writes the variables that a job takes over from this shell, into files of mode 0600."""
    write_exports(files.host_environment, host_variables(os.environ))
    task = task_variables(os.environ, plan.cluster.secrets)
    write_exports(files.task_environment, {**task, **plan.cluster.env_vars})


def trial_exists_error(files: TrialFiles, trial: str) -> TrialError:
    """Makes the error for launching a trial whose name is taken, with what can be done instead."""
    from launcher.trials.status import trial_view

    view = trial_view(files)
    if view.state in State.live():
        return TrialIsLive(
            f"{trial} already exists and is {view.state.value}",
            where=str(files.root),
            fix=f"watch it: realsys watch {trial}   stop it: realsys stop {trial}   "
            "or pick another --trial name",
        )
    fix = "pick another --trial name (without one, the next free run<N> is taken)"
    if view.state is not State.COMPLETED:
        fix = f"resume it: realsys resume {trial}   or {fix}"
    return TrialError(
        f"trial {trial} already exists and is {view.state.value}", where=str(files.root), fix=fix
    )


@contextmanager
def translate_os_errors(root: Path, what: str = "the trial") -> Iterator[None]:
    """Translates OSError into a ClusterError with a fix."""
    try:
        yield
    except OSError as error:
        fixes = {
            errno.ENOSPC: "free space there, or set REALSYS_FILE_ROOT to another disk",
            errno.EDQUOT: "your quota is used up: free space, or set REALSYS_FILE_ROOT",
            errno.EACCES: "set REALSYS_FILE_ROOT to a folder of yours",
            errno.EPERM: "set REALSYS_FILE_ROOT to a folder of yours",
            errno.EROFS: "set REALSYS_FILE_ROOT to a folder that can be written",
            errno.ENAMETOOLONG: "use a shorter file_root or trial name",
            errno.ENOTDIR: "a part of the path is a file: set REALSYS_FILE_ROOT to a folder",
        }
        raise ClusterError(
            f"{what} can't be written: {error.strerror or error}",
            where=str(error.filename or root),
            fix=fixes.get(error.errno or 0, "check the folder and the file system"),
        ) from error


def write_text(path: Path, text: str) -> None:
    """Creates a new file durably; fails if it exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def record_of(
    plan: LaunchPlan,
    command: Sequence[str] = (),
    *,
    sweep: str = "",
    point: Mapping[str, str] | None = None,
) -> TrialRecord:
    """Makes the record of a trial launched now."""
    return TrialRecord(
        experiment_name=plan.experiment_name,
        trial_name=plan.trial_name,
        user=plan.user,
        cluster=plan.cluster.name,
        plan_hash=plan_hash(plan_text(plan)),
        created_at=time.time(),
        launch_host=socket.gethostname(),
        command=tuple(command),
        realsys_version=__version__,
        code="" if plan.snapshot else code_digest(plan.imports),
        folder=os.getcwd(),
        sweep=sweep,
        point=dict(point or {}),
    )
