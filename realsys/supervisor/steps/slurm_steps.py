"""Workers as Slurm steps: one srun per worker type with all its tasks, and one for each restarted or
added worker.

srun runs on this node, the job's first, and represents its tasks (slurm_step.py). A SIGTERM to srun ends
all its tasks within moments (measured: SIGKILL to the tasks in 0.1 s).
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from realsys.api.errors import ClusterError
from realsys.api.plan import JobLayout, JobPlan, LaunchPlan, PhasePlan, StepPlan
from realsys.name_resolve.file.folder_changes import FileWrites
from realsys.runtime import worker_exit_codes
from realsys.slurm.hostlist import expand
from realsys.slurm.step_command import Again, hosts, srun_argv, srun_log, step_environment
from realsys.supervisor.steps.slurm_step import SlurmTask, Step
from realsys.supervisor.steps.step_numbers import note_steps, skip_former_numbers
from realsys.supervisor.steps.steps import StepTask
from realsys.trial.records import AttemptFiles, read_record, write_record
from realsys.worker.environment import worker_environment
from realsys.worker.live_scaling import index_of
from realsys.worker.task_place import TaskPlace

logger = logging.getLogger(__name__)

END_S = 90.0  # KillWait is 30 s by default; after that srun gives up waiting for its step


def component_nodes(job: JobPlan, environ: dict[str, str]) -> list[list[str]]:
    """Returns the nodes of each component, in Slurm's order, from the batch step's environment."""
    if job.layout is JobLayout.HET and len(job.components) > 1:
        names = [f"SLURM_JOB_NODELIST_HET_GROUP_{i}" for i in range(len(job.components))]
    else:
        names = ["SLURM_JOB_NODELIST"]
    if missing := [name for name in names if not environ.get(name)]:
        raise ClusterError(
            f"{missing[0]} is not set",
            where="environment of the batch step",
            fix="the supervisor must run as the batch script of the trial's job",
        )
    return [list(expand(environ[name])) for name in names]


def known_environment(plan: LaunchPlan) -> dict[str, str]:
    """Returns our environment without secrets: tasks read them from their file, so they need not be in
    Slurm's messages."""
    secrets = plan.cluster.secrets
    return {name: value for name, value in os.environ.items() if name not in secrets}


def srun_environment(plan: LaunchPlan, step: StepPlan) -> dict[str, str]:
    """Returns the environment of the srun that starts the step."""
    known = known_environment(plan)
    return {**step_environment(known), **worker_environment(plan, known, step.worker_type)}


def least_used(nodes: Sequence[str], used: Sequence[str]) -> str:
    """Returns the node that occurs least often in ``used``; of several the first (pure)."""
    return min(nodes, key=used.count)


def _is_up(task: SlurmTask) -> bool:
    code = task.poll()
    return code is None or (
        code == worker_exit_codes.NOT_STARTED and task.step.process.poll() is None
    )


def _node_of(task: StepTask) -> str:
    assert isinstance(task, SlurmTask)
    return task.node


@dataclass
class SlurmSteps:
    """Starts the steps of this job's components.

    Args:
        components: the plan's components in this job, with the nodes of each.
    """

    plan: LaunchPlan
    plan_hash: str
    attempt_files: AttemptFiles
    components: dict[int, Sequence[str]]
    _has_begun: bool = False
    _replaced: list[SlurmTask] = field(default_factory=list)  # their sruns may run for other tasks
    _places_taken: set[str] = field(default_factory=set)  # of workers that left
    _written: FileWrites | None = None  # what is written to the logs

    def start(self, phase: PhasePlan) -> list[StepTask]:
        """Starts one srun for each worker type of this job."""
        if not self._has_begun:
            self._has_begun = True
            skip_former_numbers(self.attempt_files, known_environment(self.plan))
        self._replaced.clear()
        found: list[StepTask] = []
        try:
            for step in phase.steps:
                if step.component in self.components:
                    found += self._start(phase, step).tasks
        except BaseException:
            self.end(found, grace_s=0.0)  # the caller does not know the started ones
            raise
        return found

    def kill(self, task: StepTask) -> None:
        """Makes the task's wrapper kill the worker, by a file: a signal to srun would end all tasks of
        the step."""
        assert isinstance(task, SlurmTask)
        task.was_killed = True
        restart = task.step.again.restart if task.step.again else 0
        self.attempt_files.end_of(task.worker, task.step.phase.name, restart).touch()

    def restart(self, task: StepTask) -> StepTask:
        """Starts a step for the worker on the same node, beside all others."""
        assert isinstance(task, SlurmTask)
        former = task.step
        index = int(task.worker.partition("/")[2])
        again = former.again or Again(index=index, restart=0)
        again = replace(again, restart=again.restart + 1)
        self.attempt_files.exit_of(task.worker).unlink(missing_ok=True)
        started = self._start_step(former.phase, former.plan, [task.node], again)
        self._replaced.append(task)
        return started.tasks[0]

    def add(
        self, worker: str, *, like: StepTask, running: Sequence[StepTask], left: Sequence[StepTask]
    ) -> StepTask:
        """Starts a step for the worker beside all others: with GPUs in the place of one that left,
        without on the node with the fewest of its type."""
        assert isinstance(like, SlurmTask)
        former, step = like.step, like.step.plan
        again = Again(index=index_of(worker), restart=0, like=index_of(like.worker))
        if step.gpus_per_task:
            node = self._take_place(worker, left)
            again = replace(again, restart=1)
        else:
            node = least_used(self.components[step.component], [_node_of(t) for t in running])
        self.attempt_files.exit_of(worker).unlink(missing_ok=True)
        return self._start_step(former.phase, step, [node], again).tasks[0]

    def _take_place(self, worker: str, left: Sequence[StepTask]) -> str:
        """Gives ``worker`` the CPUs and GPUs of one that left; returns its node."""
        for task in left:
            place = read_record(TaskPlace, self.attempt_files.place_of(task.worker))
            if task.worker not in self._places_taken and place is not None:
                self._places_taken.add(task.worker)
                write_record(self.attempt_files.place_of(worker), place)
                logger.info("place taken over worker=%s of=%s", worker, task.worker)
                return _node_of(task)
        raise ClusterError(
            f"no GPU of the job is free for {worker}",
            where=f"step {worker.partition('/')[0]}",
            fix="drain a worker of its type first (realsys scale --drain), or launch with more",
        )

    def end(self, tasks: Iterable[StepTask], *, grace_s: float) -> None:
        """Sends SIGTERM to the sruns of running tasks, which end their tasks by SIGKILL, and to those
        that still try to start their step."""
        steps = {id(t.step): t.step for t in tasks if isinstance(t, SlurmTask) and _is_up(t)}
        steps |= {id(t.step): t.step for t in self._replaced if t.step.process.poll() is None}
        for step in steps.values():
            step.process.terminate()
        deadline = time.monotonic() + max(grace_s, END_S)
        for step in steps.values():
            try:
                step.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("srun killed step=%s after_s=%g", step.plan.worker_type, END_S)
                step.process.kill()
                step.process.wait()
            step._next_refresh = 0.0
            step.refresh()

    def _start(self, phase: PhasePlan, step: StepPlan) -> Step:
        kind = step.worker_type.value
        for index in range(step.num_tasks):  # of an earlier phase of this attempt
            self.attempt_files.exit_of(f"{kind}/{index}").unlink(missing_ok=True)
        return self._start_step(phase, step, hosts(step, self.components[step.component]))

    def _start_step(
        self, phase: PhasePlan, step: StepPlan, lines: Sequence[str], again: Again | None = None
    ) -> Step:
        """Starts an srun with a task on each of the hosts ``lines``."""
        kind = step.worker_type.value
        first = again.index if again else 0
        suffix = f"-{first}" if again else ""
        host_file = self.attempt_files.hosts / f"{phase.name}-{kind}{suffix}"
        host_file.parent.mkdir(parents=True, exist_ok=True)
        host_file.write_text("".join(f"{host}\n" for host in lines))
        for folder in (self.attempt_files.logs, self.attempt_files.exits):
            folder.mkdir(parents=True, exist_ok=True)
        self._written = self._written or FileWrites(self.attempt_files.logs)
        argv = srun_argv(
            self.plan,
            phase,
            step,
            plan_hash=self.plan_hash,
            attempt=self.attempt_files.number,
            python=sys.executable,
            again=again,
        )
        note_steps(self.attempt_files, [{"phase": phase.name, "step": kind, "argv": argv}])
        process, start = self._srun(argv, step, str(host_file), again)
        logger.info("step started step=%s tasks=%d pid=%d", kind, len(lines), process.pid)
        started = Step(phase, step, process, self.attempt_files, start, self._written, again)
        started.tasks = [
            SlurmTask(f"{kind}/{index}", started, host) for index, host in enumerate(lines, first)
        ]
        return started

    def _srun(
        self, argv: list[str], step: StepPlan, host_file: str, again: Again | None
    ) -> tuple[subprocess.Popen[bytes], int]:
        environment = {**srun_environment(self.plan, step), "SLURM_HOSTFILE": host_file}
        with srun_log(self.attempt_files, step, again).open("ab") as log:
            start = log.tell()  # before srun runs: it shares the file's position
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            except OSError as error:
                raise ClusterError(
                    f"srun can't be started: {error}",
                    where=f"step {step.worker_type.value}",
                    fix="srun must be on PATH on compute nodes: check with `realsys doctor`, or set "
                    "it by `setup:` or `modules:` in the cluster spec",
                ) from error
            return process, start
