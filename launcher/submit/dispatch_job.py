"""Submits the supervisor through submitit: as a detached local process, or as a Slurm batch job.

The two differ in the executor and in the submission record; the supervisor's command (entry_command.py)
and submitit's folder are the same. Nothing is pickled.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from launcher.job.entry_command import SUPERVISOR, entry_command, job_command
from launcher.submit.late_interrupt import SubmissionInterrupted, kept_back
from launcher.terminal import output
from launcher.trials.submission import (
    ArrayRecord,
    JobMemory,
    Submission,
    array_record,
    with_array_job,
)
from realsys.api.errors import ClusterError
from realsys.api.plan import LaunchPlan
from realsys.trial.folders import PRIVATE, make_folders, root_of, write_private
from realsys.trial.machine_identity import this_machine
from realsys.trial.records import TrialFiles, process_start, write_record

SEEN_TIMEOUT_S = 10.0  # for the first question about an accepted job


@dataclass(frozen=True, kw_only=True)
class Element:
    """A new trial that is the element ``index`` of a job array."""

    index: int
    files: TrialFiles
    plan: LaunchPlan
    plan_hash: str


def dispatch(files: TrialFiles, plan: LaunchPlan, hash_of_plan: str) -> Submission:
    """Submits the trial's supervisor and records the submission.

    Raises:
        ClusterError: the scheduler refused.
        SubmissionInterrupted: Ctrl-C before Slurm had answered; its job is cancelled.
    """
    _make_submitit_folder(files)
    attempts = files.all_attempts()
    after = attempts[-1].number if attempts else 0
    submission = Submission(job_id="", host=socket.gethostname(), after_attempt=after, at=0.0)
    if plan.job is None:
        submission = _dispatch_locally(submission, files, hash_of_plan)
        submission = replace(submission, at=time.time())
        _record(files, submission)
        return submission
    former = files.submission.read_bytes() if files.submission.exists() else None
    with kept_back(output.say) as interrupt:
        try:
            submission = _dispatch_to_slurm(submission, files, plan, hash_of_plan)
        except KeyboardInterrupt:  # the second one
            raise _interrupted(_may_be_queued(plan)) from None
        submission = replace(submission, at=time.time())
        _record(files, submission)
        try:
            if not interrupt.came:
                submission = _with_memory(files, submission)
        except KeyboardInterrupt:
            interrupt.came = True
    if interrupt.came:
        _cancel_interrupted(files, submission, former)
    return submission


def _with_memory(files: TrialFiles, submission: Submission) -> Submission:
    """Records what Slurm shows of the submission's jobs."""
    assert submission.job is not None
    seen = _remembered(submission.cluster, submission.job_ids, submission.job)
    submission = replace(submission, job=seen)
    with suppress(OSError):  # what was sent identifies it, too
        write_record(files.submission, submission)
    return submission


def _record(files: TrialFiles, submission: Submission) -> None:
    try:
        write_record(files.submission, submission)
    except BaseException:
        cancel_submission(submission)  # no record refers to it
        raise


def _cancel_interrupted(
    files: TrialFiles, submission: Submission, former: bytes | None
) -> NoReturn:
    """Cancels an interrupted submission and restores the record of the former one. Raises
    SubmissionInterrupted; if Slurm does not cancel it, its record stays, so that it can be stopped later.
    """
    jobs = ", ".join(submission.job_ids)
    try:
        cancel_submission(submission)
    except (ClusterError, KeyboardInterrupt) as error:
        later = f"realsys stop {'/'.join(files.root.parts[-2:])}"
        raise _interrupted(f"interrupted: {_not_cancelled(jobs, error, later)}") from error
    files.submission.unlink()
    if former is not None:
        write_private(files.submission, former)
    raise _interrupted(f"interrupted: submitted as {jobs}; cancelled")


def _cancel_interrupted_array(
    elements: Sequence[Element], submitted: ArrayRecord, sweep: str
) -> NoReturn:
    """Cancels an interrupted array and removes its records. Raises SubmissionInterrupted; if Slurm does not
    cancel it, they stay, so that it can be stopped later."""
    from launcher.slurm.slurm_commands import scancel

    job_id = submitted.job_id
    try:
        scancel([job_id], cluster=submitted.cluster)
    except (ClusterError, KeyboardInterrupt) as error:
        later = f"realsys stop {sweep}"
        raise _interrupted(f"interrupted: {_not_cancelled(job_id, error, later)}") from error
    for element in elements:
        element.files.submission.unlink(missing_ok=True)
    array_record(elements[0].files.submitit).unlink(missing_ok=True)
    raise _interrupted(f"interrupted: submitted as {job_id}; cancelled")


def _not_cancelled(jobs: str, error: BaseException, later: str) -> str:
    why = error.what if isinstance(error, ClusterError) else "interrupted again"
    return f"submitted as {jobs}, which could not be cancelled: {why}; later: {later}"


def _cancel_unrecorded(job_ids: Sequence[str], *, cluster: str | None) -> None:
    """Cancels jobs that no record refers to; names them if Slurm does not. The caller raises what kept them
    from being recorded."""
    from launcher.slurm.slurm_commands import scancel

    try:
        scancel(job_ids, cluster=cluster)
    except (ClusterError, KeyboardInterrupt) as error:
        where = [f"--clusters={cluster}"] if cluster else []
        later = " ".join(["scancel", *where, *job_ids])
        output.say(_not_cancelled(", ".join(job_ids), error, later))


def _interrupted(text: str) -> SubmissionInterrupted:
    """Makes the interrupt and tells the user: a command line prints none."""
    output.say(text)
    return SubmissionInterrupted(text)


def _may_be_queued(plan: LaunchPlan) -> str:
    name = f"{plan.experiment_name}-{plan.trial_name}"
    return (
        f"interrupted before Slurm answered: a job {name} may be in its queue: squeue --me "
        f"--name={name}, then scancel it"
    )


def dispatch_array(elements: Sequence[Element], *, name: str, array: str) -> list[Submission]:
    """Submits the first attempts of trials with equal jobs as one job array, and records each.

    The script is the first trial's, and submitit's files of all of them are in its folder.

    Args:
        name: of the sweep, for the job's name and comment.
        array: sbatch's --array; its indices are those of the elements.
    Raises:
        ClusterError: Slurm refused; then none of them is submitted.
        SubmissionInterrupted: Ctrl-C before Slurm had answered; the array is cancelled.
    """
    from launcher.slurm.script import comment, render_script, supervisor_python
    from launcher.submit.executors.slurm_executor import BatchExecutor

    first = elements[0]
    plan = replace(first.plan, trial_name=name)

    def script(command: str) -> str:
        return render_script(plan, attempt=1, command=command, array=array)

    for element in elements:
        _make_submitit_folder(element.files)
    folder = first.files.submitit
    executor = BatchExecutor(folder, script=script)
    trials = {e.index: (str(e.files.root), e.plan_hash) for e in elements}
    records = [
        Submission(
            job_id="",  # the ArrayRecord holds Slurm's answer for all
            scheduler="slurm",
            host=socket.gethostname(),
            after_attempt=0,
            at=time.time(),
            folder="" if element is first else str(folder),
            index=element.index,
        )
        for element in elements
    ]
    array_id = ""
    try:  # before they can run: a thousand records take longer to write than Slurm to start
        for element, record in zip(elements, records, strict=True):
            write_record(element.files.submission, record)
        python = supervisor_python(plan, sys.executable)
        with kept_back(output.say) as interrupt:
            try:
                job_ids = executor.submit_array(python, trials)
            except KeyboardInterrupt:
                raise _interrupted(_may_be_queued(plan)) from None
            array_id = job_ids[first.index].partition("_")[0]
            submitted = ArrayRecord(
                job_id=array_id,
                at=time.time(),
                cluster=executor.cluster,
                job=JobMemory(comment=comment(plan, 1)),
            )
            write_record(array_record(first.files.submitit), submitted)
    except BaseException:
        if array_id:
            _cancel_unrecorded([array_id], cluster=executor.cluster)
        for element in elements:
            element.files.submission.unlink(missing_ok=True)
        raise
    if interrupt.came:
        _cancel_interrupted_array(elements, submitted, plan.trial)
    assert submitted.job is not None
    submitted = replace(submitted, job=_remembered(executor.cluster, [array_id], submitted.job))
    with suppress(OSError):
        write_record(array_record(first.files.submitit), submitted)
    return [with_array_job(record, submitted) for record in records]


def cancel_submission(submission: Submission) -> None:
    """Cancels a job that was submitted a moment ago."""
    if submission.on_slurm:
        from launcher.slurm.slurm_commands import scancel

        scancel(submission.job_ids, cluster=submission.cluster)
    else:
        with suppress(ProcessLookupError):
            os.killpg(submission.pid, signal.SIGKILL)  # its session is its own group


def _dispatch_locally(made: Submission, files: TrialFiles, hash_of_plan: str) -> Submission:
    from launcher.submit.executors.local_executor import DetachedLocalExecutor

    executor = DetachedLocalExecutor(
        files.submitit, environment={"REALSYS_TRIAL_DIR": str(files.root)}
    )
    command = entry_command(sys.executable, SUPERVISOR, files.root, hash_of_plan)
    pid = int(executor.start(command))
    start = process_start(pid) or 0
    return replace(made, job_id=str(pid), pid=pid, start=start, machine=this_machine())


def _dispatch_to_slurm(
    made: Submission, files: TrialFiles, plan: LaunchPlan, hash_of_plan: str
) -> Submission:
    """Submits one job, or one per component in the job layout split: all or none."""
    from launcher.slurm.script import comment, render_script, submissions, supervisor_python
    from launcher.submit.executors.slurm_executor import BatchExecutor

    assert plan.job is not None
    attempt = made.after_attempt + 1
    python = supervisor_python(plan, sys.executable)
    job_ids: list[str] = []
    cluster: str | None = None
    for held in submissions(plan.job):

        def script(command: str, held: list[int] = held) -> str:
            return render_script(plan, attempt=attempt, command=command, components=held)

        executor = BatchExecutor(files.submitit, script=script, cluster=cluster)
        command = job_command(python, files.root, hash_of_plan, held, attempt)
        try:
            job_ids.append(executor.start(command))
            cluster = executor.cluster
        except BaseException:
            if job_ids:
                _cancel_unrecorded(job_ids, cluster=cluster)
            raise
    return replace(
        made,
        job_id=job_ids[0],
        scheduler="slurm",
        job_ids=tuple(job_ids),
        cluster=cluster,
        job=JobMemory(comment=comment(plan, attempt)),
    )


def _remembered(cluster: str | None, job_ids: Sequence[str], sent: JobMemory) -> JobMemory:
    """Returns what Slurm shows of jobs that it has just accepted; what was sent, if it does not answer."""
    from launcher.slurm.query.job_query import query_jobs

    end = "" if cluster is None else f";{cluster}"
    keys = {f"{job_id}{end}": job_id for job_id in job_ids}
    found = query_jobs(keys, accounting=False, timeout_s=SEEN_TIMEOUT_S).jobs
    rows = {keys[key]: found[key] for key in keys if found[key].source == "squeue"}
    if len(rows) < len(keys):
        return sent
    first = rows[job_ids[0]]
    times = {job_id: row.submitted_at for job_id, row in rows.items() if row.submitted_at}
    return JobMemory(comment=first.comment, submitted=times, cluster_name=first.cluster)


def _make_submitit_folder(files: TrialFiles) -> None:
    make_folders(files.submitit, root=root_of(files.root), mode=PRIVATE)
