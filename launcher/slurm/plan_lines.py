"""Renders a Slurm job for `realsys plan`: placement, script, and each step's command line.

Script and command lines are byte for byte what `launch` submits and the supervisor starts, because the
same functions produce them. Pure, except check_plan, which asks Slurm whether it would accept the job.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher.job.entry_command import job_command
from launcher.job.times import EffectiveLimit, effective_limit
from launcher.slurm.sbatch_refusals import refusal
from launcher.slurm.script import (
    render_script,
    sbatch_argv,
    submissions,
    supervisor_python,
)
from launcher.slurm.slurm_commands import run_slurm
from launcher.terminal.text import duration
from realsys.api.errors import ConfigError
from realsys.api.plan import JobComponent, LaunchPlan, StepPlan, plan_hash, plan_text
from realsys.slurm.step_command import srun_argv
from realsys.trial.records import TrialFiles

FIRST_ATTEMPT = 1


def plan_lines(plan: LaunchPlan, hash_of_plan: str) -> Iterator[str]:
    """Yields everything about the job, in the order in which it happens."""
    assert plan.job is not None
    yield f"Slurm job, layout {plan.job.layout.value}"
    if plan.job.begin:
        yield f"  begins no earlier than {plan.job.begin}"
    if plan.job.deadline:
        yield f"  is removed if it can't end before {plan.job.deadline}"
    if plan.job.dependency:
        predecessor = (
            f"{plan.job.after} (job {plan.job.dependency})"
            if plan.job.after
            else plan.job.dependency
        )
        yield f"  waits for {predecessor}"
    if plan.job.requeue:
        yield "  is requeued automatically after preemption, a lost node or the time limit"
    if plan.job.preflight != "off":
        yield f"  checks nodes and GPUs before workers start (preflight {plan.job.preflight})"
    for index, component in enumerate(plan.job.components):
        yield from _component_lines(plan, index, component)
    yield ""
    for held in submissions(plan.job):
        yield from _script_lines(plan, hash_of_plan, held)
    for phase in plan.phases:
        for step in phase.steps:
            yield f"# step {step.worker_type.value} of phase {phase.name}"
            argv = srun_argv(
                plan,
                phase,
                step,
                plan_hash=hash_of_plan,
                attempt=FIRST_ATTEMPT,
                python=supervisor_python(plan, sys.executable),
            )
            yield shlex.join(argv)
            yield ""


def scripts(plan: LaunchPlan) -> list[str]:
    """Renders the batch script of each job."""
    assert plan.job is not None
    hash_of_plan = plan_hash(plan_text(plan))
    return [_script(plan, hash_of_plan, held) for held in submissions(plan.job)]


def _script(plan: LaunchPlan, hash_of_plan: str, held: list[int]) -> str:
    python = supervisor_python(plan, sys.executable)
    command = job_command(python, Path(plan.trial_dir), hash_of_plan, held, FIRST_ATTEMPT)
    return render_script(plan, attempt=FIRST_ATTEMPT, command=command, components=held)


def _component_lines(plan: LaunchPlan, index: int, component: JobComponent) -> Iterator[str]:
    assert plan.job is not None
    gpus = ""
    if component.gpus_per_node:
        gpus = f", {component.gpus_per_node} {component.gpu_type or 'GPU'}"
    threads = component.threads_per_core
    cores = f" ({component.cpus_per_node // threads} cores)" if threads > 1 else ""
    where = f" of partition {component.partition}" if component.partition else ""
    yield (
        f"  {component.name}: {component.nodes} node{'s' * (component.nodes > 1)}{where}, each "
        f"{component.cpus_per_node} CPUs{cores}, {component.memory_mib_per_node} MiB{gpus}"
    )
    if index < len(plan.job.spare):
        cpus, memory, spare_gpus = plan.job.spare[index]
        yield f"    spare per node: {cpus} CPUs, {memory} MiB, {spare_gpus} GPUs"
    yield f"    time limit {limit_of(plan, component).words}"
    for phase in plan.phases:
        for step in phase.steps:
            if step.component == index:
                yield f"    {phase.name}: {step_words(step)}"


def limit_of(plan: LaunchPlan, component: JobComponent) -> EffectiveLimit:
    """Returns the component's effective time limit, including the partition's default."""
    return effective_limit(
        component.time_limit, plan.cluster.partitions.get(component.partition or "")
    )


def limit_lines(plan: LaunchPlan) -> list[str]:
    """Lists the distinct time limits of the job's components for `launch`; empty for a local plan."""
    if plan.job is None:
        return []
    words = [limit_of(plan, component).words for component in plan.job.components]
    return [f"time limit {limit}" for limit in dict.fromkeys(words)]


def time_limit_warning(plan: LaunchPlan, step_s: float) -> str:
    """Warns if the predicted run exceeds its shortest time limit; empty if it fits or nothing is
    predicted.

    Only the main phase's steps are counted, hence "at least".
    """
    limits = [limit_of(plan, c).limit for c in plan.job.components] if plan.job else []
    minutes = [limit.minutes for limit in limits if limit and limit.minutes is not None]
    steps = plan.phases[-1].config.exp_ctrl.benchmark_steps
    if plan.job is None or plan.job.requeue or not minutes or steps is None:
        return ""
    given_s = 60 * min(minutes) - plan.cluster.slurm.grace_seconds
    if steps * step_s <= given_s:
        return ""
    return (
        f"{steps} steps are predicted to take at least {duration(steps * step_s)}, but the "
        f"time limit leaves {duration(given_s)}: the run will save and "
        "stop before its end; use a longer --time, or --requeue"
    )


def step_words(step: StepPlan) -> str:
    """Describes a step: ``8 × model_worker: 4 on each of nodes 1-2; 2 CPUs, 4096 MiB, 1 GPU each``."""
    at, runs = 0, []
    for count, tasks in step.nodes:
        if tasks:
            nodes = f"node {at + 1}" if count == 1 else f"nodes {at + 1}-{at + count}"
            runs.append(f"{tasks} on {nodes}" if count == 1 else f"{tasks} on each of {nodes}")
        at += count
    words = f"{step.num_tasks} × {step.worker_type.value}: {', '.join(runs)}"
    cpus = "the job's CPUs, shared" if step.shares_cpus else f"{step.cpus_per_task} CPUs"
    words += f"; {cpus}, {step.memory_mib} MiB"
    if step.gpus_per_task:
        words += f", {step.gpus_per_task:g} GPU each ({step.gpu_binding})"
    return words + (f"; image {step.container_image}" if step.container_image else "")


def _script_lines(plan: LaunchPlan, hash_of_plan: str, held: list[int]) -> Iterator[str]:
    folder = TrialFiles(Path(plan.trial_dir)).submitit
    yield "# " + shlex.join(sbatch_argv(folder, "SCRIPT")) + ", where SCRIPT is:"
    yield from _script(plan, hash_of_plan, held).splitlines()
    yield ""


def check_plan(plan: LaunchPlan) -> Iterator[str]:
    """Yields Slurm's answer for each job of the plan; nothing is submitted.

    Raises:
        ConfigError: the plan is for the local machine.
        ClusterError: Slurm would refuse the job, or does not answer.
    """
    if plan.job is None:
        raise ConfigError(
            f"cluster {plan.cluster.name!r} does not use Slurm",
            where="--check",
            fix="name a Slurm cluster with --cluster",
        )
    with tempfile.TemporaryDirectory() as folder:
        for number, text in enumerate(scripts(plan)):
            script = Path(folder, f"{number}.sh")
            script.write_text(text, encoding="utf-8")
            done = run_slurm(["sbatch", "--test-only", str(script)], timeout_s=60)
            if done.returncode != 0:
                raise refusal(done.stderr, where="sbatch --test-only")
            yield (done.stderr or done.stdout).strip().removeprefix("sbatch: ")
