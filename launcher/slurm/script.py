"""Renders a trial's batch script and the sbatch command line as text (pure).

What `realsys plan` prints is what `launch` submits, byte for byte. Every decided option is in the script;
the command line carries only paths, since a ``#SBATCH`` line can't hold a line break. The script contains
no environment values and no secrets: it sources two files of mode 0600. Its last command replaces it by
the supervisor (``exec``), so that Slurm's signals reach the supervisor.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from launcher.job.groups import SITE_DEFAULTS
from realsys.api.plan import JobComponent, JobLayout, JobPlan, LaunchPlan
from realsys.slurm.step_command import filename_pattern
from realsys.trial.records import TrialFiles


def render_script(
    plan: LaunchPlan,
    *,
    attempt: int,
    command: str,
    components: Sequence[int] | None = None,
    array: str | None = None,
) -> str:
    """Renders the whole batch script.

    Args:
        attempt: number of the attempt that this submission starts, for the comment.
        command: shell command that the script executes last (entry_command.py).
        components: indices of the plan's components in this job; None: all of them. The job layout
            split submits one script for each.
        array: ``0-5%2``: one job array for several trials of equal shape.
    """
    assert plan.job is not None
    job = plan.job
    held = list(range(len(job.components))) if components is None else list(components)
    lines = ["#!/bin/bash" + (" -l" if plan.cluster.modules else "")]
    for position, index in enumerate(held):
        if position:
            lines.append("#SBATCH hetjob")
        lines += [
            f"#SBATCH --{_option(name, value)}"
            for name, value in component_options(
                plan, job.components[index], attempt=attempt if not position else None
            )
        ]
        if not position and array is not None:
            lines.append(f"#SBATCH --array={array}")
    # Until the supervisor has its handlers: a USR2 that arrives earlier would end the script.
    lines += ["", "trap '' USR2", *body(plan, command)]
    return "\n".join(lines) + "\n"


def component_options(
    plan: LaunchPlan, component: JobComponent, *, attempt: int | None
) -> Iterator[tuple[str, str | None]]:
    """Yields (sbatch's long option, value) in the order of the script; None for a bare flag.

    Options of the job as a whole are in its first component only, the one with an ``attempt``.
    """
    assert plan.job is not None
    if attempt is not None:
        yield "job-name", f"{plan.experiment_name}-{plan.trial_name}"
    for name in SITE_DEFAULTS:
        if value := getattr(component, name):
            yield name, value
    yield "nodes", str(component.nodes)
    yield "ntasks-per-node", "1"
    yield "cpus-per-task", str(component.cpus_per_node)
    yield "mem", "0" if component.exclusive else f"{component.memory_mib_per_node}M"
    if component.gpus_per_node:
        kind = f"{component.gpu_type}:" if component.gpu_type else ""
        yield "gres", f"gpu:{kind}{component.gpus_per_node}"
    if component.exclusive:
        yield "exclusive", None
    for name, option in (("nodelist", "nodelist"), ("exclude", "exclude"), ("time_limit", "time")):
        if value := getattr(component, name):
            yield option, value
    if attempt is None and not component.exclude:
        yield "exclude", ""  # else the first component's would apply here too
    if attempt is not None:
        yield from _whole_job(plan, plan.job, attempt)
    yield from ((name.replace("_", "-"), value or None) for name, value in component.extra.items())


def _whole_job(plan: LaunchPlan, job: JobPlan, attempt: int) -> Iterator[tuple[str, str | None]]:
    if job.begin:
        yield "begin", job.begin
    if job.deadline:
        yield "deadline", job.deadline
    if job.dependency:
        yield "dependency", job.dependency
        yield "kill-on-invalid-dep", "yes"
    yield ("requeue" if job.requeue else "no-requeue"), None
    yield "signal", f"B:USR2@{plan.cluster.slurm.grace_seconds}"
    yield "export", "NIL"
    yield "open-mode", "append"
    yield "comment", comment(plan, attempt)


def comment(plan: LaunchPlan, attempt: int) -> str:
    """Renders the trial's comment for squeue and sacct: ``realsys ppo-math/run1 attempt 1 9fceb02+``."""
    return " ".join(filter(None, ("realsys", plan.trial, f"attempt {attempt}", plan.revision)))


def body(plan: LaunchPlan, command: str) -> Iterator[str]:
    """Yields the shell lines that follow the options."""
    files = TrialFiles(Path(plan.trial_dir))
    for variables in (files.host_environment, files.task_environment):
        yield f". {shlex.quote(str(variables))}"
    if plan.cluster.modules:
        yield "module load " + " ".join(shlex.quote(m) for m in plan.cluster.modules)
    if plan.cluster.venv:
        yield f". {shlex.quote(plan.cluster.venv + '/bin/activate')}"
    yield from plan.cluster.setup
    if plan.snapshot:
        path = shlex.quote(str(files.code))
        yield f'export PYTHONPATH={path}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    yield f"exec {command}"


def sbatch_argv(folder: Path, script: str, *, array: bool = False) -> list[str]:
    """Builds the command line that submits ``script``; output goes where submitit looks for it."""
    stem = filename_pattern(str(folder)) + ("/%A_%a_0_log" if array else "/%j_0_log")
    return [
        "sbatch",
        "--parsable",
        f"--output={stem}.out",
        f"--error={stem}.err",
        f"--chdir={folder}",
        script,
    ]


def supervisor_python(plan: LaunchPlan, here: str) -> str:
    """Returns the batch script's interpreter: the site's virtual environment's, else this one."""
    return f"{plan.cluster.venv}/bin/python" if plan.cluster.venv else here


def submissions(job: JobPlan) -> list[list[int]]:
    """Groups the components by job: one job, or one per component in the job layout split."""
    everything = list(range(len(job.components)))
    return [[i] for i in everything] if job.layout is JobLayout.SPLIT else [everything]


def _option(name: str, value: str | None) -> str:
    """Renders an option for ``#SBATCH --``: sbatch splits such a line as a shell does."""
    return name if value is None else f"{name}={_quoted(value)}"


def _quoted(value: str) -> str:
    plain: Iterable[str] = "@%+=:,./-_[]&|()*!"
    if value and all(c.isalnum() or c in plain for c in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
