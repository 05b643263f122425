"""Builds the command of a shell, or another program, beside a running worker, for `realsys exec`.

On Slurm a separate job step that shares the job's resources with the worker (``--overlap``), on the
worker's node and in its image; locally the command itself, in the worker's environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.slurm.slurm_commands import run_slurm, scrubbed
from launcher.trials.status import StatusReader
from launcher.trials.submission import read_submission
from realsys.api.errors import TrialError, did_you_mean
from realsys.api.plan import JobLayout, LaunchPlan, StepPlan
from realsys.slurm.containers import wrap
from realsys.slurm.step_command import het_group
from realsys.trial.liveness import Process
from realsys.trial.records import WorkerRecord


def shell_command(
    reader: StatusReader, worker: str, words: Sequence[str], *, terminal: bool
) -> tuple[list[str], dict[str, str]]:
    """Returns (argv, environment) of the command.

    Raises:
        TrialError: no such worker is registered; the fix names those that are.
        ClusterError: Slurm does not answer.
    """
    records = reader.records()
    record = records.workers.get(worker)
    if record is None:
        known = sorted(records.workers)
        raise TrialError(
            f"{worker} is not registered",
            where=records.trial,
            fix=did_you_mean(worker, known) if known else f"realsys status {records.trial}",
        )
    command = list(words) or [os.environ.get("SHELL", "/bin/sh")]
    submission = read_submission(reader.files)
    if submission is None or not submission.on_slurm or reader.plan is None:
        return command, _environment_of(record)
    step = _step(reader.plan, records.progress.phase if records.progress else "main", worker)
    if records.job is not None and records.job.state.has_ended:
        raise TrialError(
            records.job.doubt or f"Slurm has no running job {records.job.job_id} of the trial",
            where=f"squeue -j {records.job.job_id}",
            fix="check the trial: realsys status",
        )
    job_id = records.attempt.job_id if records.attempt else submission.job_id
    if reader.plan.job is not None and reader.plan.job.layout is JobLayout.SPLIT:
        job_id = submission.job_ids[step.component]
    node = record.node or record.host
    argv = step_beside(reader.plan, step, _number(job_id), node, command, terminal=terminal)
    return argv, scrubbed(os.environ)


def step_beside(
    plan: LaunchPlan,
    step: StepPlan,
    job_id: str,
    node: str,
    command: Sequence[str],
    *,
    terminal: bool,
) -> list[str]:
    """Builds srun's argv (pure). It sees all GPUs of the job on that node; none is taken from a step.

    Args:
        node: its name in Slurm.
    """
    wrapped = wrap(
        plan.cluster.container,
        step.container_image,
        command,
        file_root=plan.cluster.file_root,
        gpu=step.gpus_per_task > 0,
    )
    return [
        "srun",
        f"--jobid={job_id}",
        *het_group(plan.job, step),
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        "--mem=0",
        "--job-name=exec",
        *(["--pty"] if terminal else []),
        *wrapped.srun_options,
        *wrapped.command,
    ]


def _step(plan: LaunchPlan, phase: str, worker: str) -> StepPlan:
    kind = worker.partition("/")[0]
    (step,) = [s for s in plan.phase(phase).steps if s.worker_type.value == kind]
    return step


def _number(job_id: str) -> str:
    """Returns Slurm's own number of an array's element (``12_3``), the only form that srun accepts."""
    if "_" not in job_id:
        return job_id
    done = run_slurm(["squeue", "--noheader", f"--jobs={job_id}", "--format=%A"])
    if not (number := done.stdout.strip()).isdigit():
        raise TrialError(
            f"job {job_id} is not in Slurm's queue",
            where=f"squeue -j {job_id}",
            fix="check the trial: realsys status",
        )
    return number


def _environment_of(record: WorkerRecord) -> dict[str, str]:
    """Reads the worker's environment; raises TrialError if it does not run on this host."""
    if not Process(record.pid, record.start).is_alive():
        raise TrialError(
            f"{record.worker} (pid {record.pid}) does not run on this host",
            where=record.host,
            fix=f"log in to {record.host}, or check: realsys status",
        )
    content = Path(f"/proc/{record.pid}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in content if b"=" in entry)
    return {name: value for name, _, value in pairs}


def run_in_place(argv: list[str], environment: dict[str, str]) -> None:
    """Replaces this process by the command. Returns only by raising TrialError."""
    sys.stdout.flush()
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        raise TrialError(
            f"{argv[0]} can't be run: {error.strerror}", where="realsys exec", fix="check its name"
        ) from error
