"""LaunchPlan → trial folder → a running supervisor, through submitit; the same again for a resume.

A trial's folder is made exclusively: its name is the lock against a second launch of the same trial.
Whatever goes wrong before the supervisor is handed over, the folder is taken away again. Decides
nothing about the run (resolve.py did) and does not wait for it (render.py does).
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

from launcher.sites.site_problems import missing_secrets
from launcher.slurm.login_environment import (
    dropped_variable_warnings,
    host_variables,
    task_variables,
)
from launcher.submit.dispatch_job import dispatch
from launcher.submit.nodes_to_leave_out import excluding
from launcher.submit.plan_change import Current, put_back, read_current, store
from launcher.submit.planning import import_all
from launcher.submit.remake import Remade, RequestedChanges, remake
from launcher.trials.copies import refuse_copy
from launcher.trials.submission import Submission, read_submission
from launcher.trials.trial_state import State
from launcher.trials.trial_view import TrialView
from realsys import __version__
from realsys.api.errors import (
    ClusterError,
    ConfigError,
    RealsysError,
    TrialError,
    TrialIsLive,
)
from realsys.api.extras import missing_packages
from realsys.api.plan import LaunchPlan, plan_hash, plan_text, read_plan
from realsys.config.problems import raise_all
from realsys.observability.metrics import read_metrics
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
from realsys.worker.environment import write_exports


def submit(
    plan: LaunchPlan, *, command: Sequence[str] = (), imports: Sequence[str] = ()
) -> TrialFiles:
    """Makes the trial's folder and starts its first attempt.

    Args:
        command: what the user typed, for the record.
        imports: ``--import`` files where they are now, for the snapshot.
    Raises:
        TrialError: the trial exists; says how to watch, stop or resume it.
        ClusterError: the file system refuses.
    """
    with translate_os_errors(Path(plan.trial_dir)):
        files = make_trial(plan, record_of(plan, command))
        try:
            if plan.snapshot:
                take_snapshot(files, imports)
            start(files, plan, plan_hash(plan_text(plan)))
        except BaseException:
            discard_folder(files)
            raise
    return files


def make_trial(plan: LaunchPlan, record: TrialRecord) -> TrialFiles:
    """Makes the trial's folder with its plan and record; starts nothing.

    Raises:
        TrialError: the trial exists.
        ClusterError: another user could exchange a folder on the way to it.
        ConfigErrors: an image that is a file is not there, or packages of the workers are not; a plan
            may be made elsewhere, a launch not.
    """
    raise_all([*missing_images(plan), *packages_missing_here(plan)])
    files = TrialFiles(Path(plan.trial_dir))
    try:
        make_trial_folder(files, root=Path(plan.cluster.file_root))
    except FileExistsError:
        raise already_there(files, plan.trial) from None
    try:
        write_text(files.plan, plan_text(plan))
        write_record(files.record, record)
    except BaseException:
        discard_folder(files)
        raise
    return files


def missing_images(plan: LaunchPlan) -> Iterator[ConfigError]:
    """Images of the plan's steps that are files and can't be seen from here, each once."""
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
    where = f"workers on site {plan.cluster.name!r}, which run in the Python of this command"
    instead = "or name in the site file what the nodes have: venv, or cpu_image and gpu_image"
    return missing_packages(needed, where=where, instead=instead if plan.job else "")


def discard_folder(files: TrialFiles) -> None:
    """Removes the folder of a trial that was not handed over."""
    if read_submission(files) is None:
        shutil.rmtree(files.root, ignore_errors=True)


def remarks(plan: LaunchPlan) -> list[str]:
    """What a launch should say besides doing it: the plan's warnings, and what this shell does not
    pass on to a Slurm job."""
    told = [provenance_warning(TrialFiles(Path(plan.trial_dir)))] if plan.snapshot else []
    told += dropped_variable_warnings(os.environ) if plan.job is not None else []
    return [*plan.warnings, *filter(None, told)]


def remarks_on_resume(files: TrialFiles) -> list[str]:
    """What a resume should say besides doing it."""
    with suppress(RealsysError):  # the resume itself says what is wrong with the records
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
    wish: RequestedChanges | None = None,
    command: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> Submission:
    """Starts the next attempt of a trial that is not running; returns who has it.

    Args:
        exclude: hostlist of nodes that it shall not have.
        wish: settings that it shall have from now on.
        command: what the user typed, for the record of those.
        tell: is told each setting that was changed, when the attempt is started.
    Raises:
        TrialIsLive: it is running, or another command resumes it at this moment.
        TrialError: it has completed, or its folder is damaged, was moved or is a copy of another trial's.
        ClusterError: another user could exchange its folder, or one on the way to it.
        ConfigError: a file of its ``--import`` can't be imported any more, its plan was changed, or a
            setting can't be.
    """
    check_trial(files)
    read_current(files, finish=False)  # what is wrong with it is told before anything is touched
    refuse_copy(files, moved_too=True)
    with alone(files):
        current = read_current(files, finish=True)
        changed = wish is not None and not wish.is_empty
        view = _resumable(files, but_completed=changed)
        import_all(current.plan.imports)
        if current.plan.job is not None:
            raise_all(missing_secrets(current.plan.cluster, os.environ))
        made = None
        if wish is not None and changed:
            made = remake(files, current.record, current.plan, current.raw, wish)
        if view.state is State.COMPLETED and not (made and made.further and has_checkpoint(files)):
            raise completed(files, view.trial)
        with translate_os_errors(files.root):
            if made is None:
                now = resumed_now(current.plan, datetime.now())
                return start(files, excluding(now, exclude) if exclude else now, current.hash)
            submission = _start_changed(files, current, made, exclude, command)
    for line in made.lines():
        tell(line)
    for warning in made.warnings:
        tell(f"warning: {warning}")
    return submission


def _start_changed(
    files: TrialFiles, current: Current, made: Remade, exclude: str | None, command: Sequence[str]
) -> Submission:
    """The next attempt with another plan, which is the trial's if the attempt could be handed over."""
    job = excluding(made.plan, exclude) if exclude else made.plan
    try:
        new = store(files, current, made.plan, settings=made.lasting, command=command)
        return start(files, job, new.hash)
    except BaseException:
        put_back(files, current)
        raise


def has_checkpoint(files: TrialFiles) -> bool:
    """Whether the main phase has one that a resume could go on from."""
    return any(files.phase(files.root).recover.glob("step-*"))


def completed(files: TrialFiles, trial: str) -> TrialError:
    """Why a completed trial can't be resumed."""
    return TrialError(
        f"{trial} has completed; there is nothing to resume",
        where=str(files.root),
        fix="launch another trial, e.g. with more steps and actor.path=<its checkpoint>",
    )


def _resumable(files: TrialFiles, *, but_completed: bool) -> TrialView:
    """What is going on in the trial, which is nothing.

    Args:
        but_completed: let one pass that has completed.
    """
    from launcher.trials.status import trial_view

    view = trial_view(files)
    if view.state in State.live():
        raise TrialIsLive(
            f"{view.trial} is {view.state.value}",
            where=str(files.root),
            fix=f"watch it: realsys watch {view.trial}   stop it: realsys stop {view.trial}",
        )
    if view.state is State.COMPLETED and not but_completed:
        raise completed(files, view.trial)
    if view.state is State.UNKNOWN:
        raise TrialError(
            f"whether {view.trial} still runs is unknown: {view.reason}",
            where=str(files.root),
            fix=view.fix,
        )
    return view


@contextmanager
def alone(files: TrialFiles) -> Iterator[None]:
    """Between looking whether a trial runs and handing it over nobody else may do the same.

    Where a file system has no locks, the supervisors sort it out: one of them takes the attempt.
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
            f"another command resumes or removes {trial} at this moment",
            where=str(files.root),
            fix=f"nothing: look at what it started with `realsys status {trial}`",
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(lock)


def refuse_if_taken(files: TrialFiles, number: int, mine: Submission) -> None:
    """Raises TrialIsLive when attempt ``number``, begun after the hand-over ``mine``, is another's."""
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


def resumed_now(plan: LaunchPlan, now: datetime) -> LaunchPlan:
    """The plan without what was about its first start: it is to go on now.

    A deadline that has passed meanwhile is left out, too: Slurm would refuse the job for it.
    """
    if plan.job is None:
        return plan
    passed = plan.job.deadline and datetime.fromisoformat(plan.job.deadline) <= now
    deadline = None if passed else plan.job.deadline
    job = replace(plan.job, begin=None, dependency=None, after=None, deadline=deadline)
    return replace(plan, job=job)


def start(files: TrialFiles, plan: LaunchPlan, hash_of_plan: str) -> Submission:
    """Hands the next attempt over; on Slurm with the environment that its job takes from this shell."""
    if plan.job is not None:
        write_environment(files, plan)
    return dispatch(files, plan, hash_of_plan)


def write_environment(files: TrialFiles, plan: LaunchPlan) -> None:
    """What a job takes over from this shell, into files of mode 0600."""
    write_exports(files.host_environment, host_variables(os.environ))
    task = task_variables(os.environ, plan.cluster.secrets)
    write_exports(files.task_environment, {**task, **plan.cluster.env_vars})


def already_there(files: TrialFiles, trial: str) -> TrialError:
    """Why a trial of a taken name can't be launched, and what can be done instead."""
    from launcher.trials.status import trial_view

    view = trial_view(files)
    if view.state in State.live():
        return TrialIsLive(
            f"{trial} is {view.state.value} already",
            where=str(files.root),
            fix=f"watch it: realsys watch {trial}   stop it: realsys stop {trial}   "
            "or pick another --trial name",
        )
    fix = "pick another --trial name (without one, the next free run<N> is taken)"
    if view.state is not State.COMPLETED:
        fix = f"go on with it: realsys resume {trial}   or {fix}"
    return TrialError(
        f"there is a trial {trial} already, {view.state.value}", where=str(files.root), fix=fix
    )


@contextmanager
def translate_os_errors(root: Path, what: str = "the trial") -> Iterator[None]:
    """Turns what a file system refuses into a ClusterError with what to do."""
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
    """Writes a file that did not exist, through to the disk."""
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
    """The record of a trial that is launched now."""
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
