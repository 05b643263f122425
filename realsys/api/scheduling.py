"""Resources of one task, groups of equal tasks, and all groups of an experiment; what a user wants of them.

Field names and formats are sbatch's own (man sbatch). No checks against a site happen in this file:
launcher/plan/resolve.py has both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

from realsys.api.basics.option_fields import option
from realsys.api.errors import ConfigError

_Task = TypeVar("_Task", "Scheduling", "GroupOptions")


class WorkerType(StrEnum):
    """Kinds of worker processes."""

    MASTER_WORKER = "master_worker"
    MODEL_WORKER = "model_worker"
    GENERATION_SERVER = "generation_server"
    GSERVER_MANAGER = "gserver_manager"
    ROLLOUT_WORKER = "rollout_worker"
    EVALUATOR = "evaluator"
    REWARD_WORKER = "reward_worker"


# The supervisor restarts such a worker when it exits or hangs; any other worker's exit ends the trial.
INDEPENDENTLY_RESTARTABLE = frozenset(
    {
        WorkerType.GENERATION_SERVER,
        WorkerType.GSERVER_MANAGER,
        WorkerType.ROLLOUT_WORKER,
        WorkerType.EVALUATOR,
        WorkerType.REWARD_WORKER,
    }
)
# The trial continues without such a worker if it can't be restarted, and waits for it at the end.
OPTIONAL = frozenset({WorkerType.EVALUATOR})
# Workers of these types can be added to or removed from a live run.
SCALED = frozenset({WorkerType.GENERATION_SERVER, WorkerType.ROLLOUT_WORKER})


MOST_GPUS_OF_A_TASK = 64  # more than any node has


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """Resources and placement of one task.

    Attributes:
        cpu: CPUs, as Slurm counts them; a task gets whole cores.
        gpu: GPUs; a fraction below 1 means that several tasks share one.
        mem: memory in MiB.
        nodelist, exclude: Slurm hostlists on which the task may, or must not, run.
        container_image: image for the site's container runtime; None takes the cluster spec's.
        env_vars: environment of the task; never for secrets (cluster spec ``secrets``).
        time_limit, begin, deadline: sbatch's own formats for --time, --begin, --deadline.
        partition, account, qos, reservation, constraint, gpu_type: as sbatch's options.
        extra: further sbatch options, name → value, passed through unchanged.
    """

    cpu: int = 1
    gpu: float = 0.0
    mem: int = 1024
    nodelist: str | None = None
    exclude: str | None = None
    container_image: str | None = None
    env_vars: Mapping[str, str] = field(default_factory=dict)
    time_limit: str | None = None
    begin: str | None = None
    deadline: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    gpu_type: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.cpu < 1:
            raise ConfigError(
                f"cpu is {self.cpu}", where="scheduling.cpu", fix="use 1 or more cores"
            )
        if self.mem < 1:
            raise ConfigError(f"mem is {self.mem}", where="scheduling.mem", fix="MiB, 1 or more")
        whole = math.isfinite(self.gpu) and float(self.gpu).is_integer()
        if not 0 <= self.gpu <= MOST_GPUS_OF_A_TASK or (self.gpu > 1 and not whole):
            raise ConfigError(
                f"a task asks for {self.gpu:g} GPUs",
                where="scheduling.gpu",
                fix="use 0, 1, or a fraction below 1 (tasks share one GPU); more workers for more GPUs. "
                "Only servers that split a model over several GPUs use a larger whole number",
            )


@dataclass(frozen=True, kw_only=True)
class TasksGroup:
    """``count`` tasks with equal resources."""

    count: int
    scheduling: Scheduling

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigError(
                f"count is {self.count}", where="tasks group", fix="use 0 or more tasks"
            )


@dataclass(frozen=True, kw_only=True)
class ExperimentScheduling:
    """The task groups of an experiment, one per worker type; None if there is none."""

    model_worker: TasksGroup
    master_worker: TasksGroup
    generation_server: TasksGroup | None = None
    gserver_manager: TasksGroup | None = None
    rollout_worker: TasksGroup | None = None
    evaluator: TasksGroup | None = None
    reward_worker: TasksGroup | None = None
    controller_image: str | None = None

    def groups(self) -> dict[WorkerType, TasksGroup]:
        """Groups that have tasks, in start order (workers that others wait for come first)."""
        order = (
            WorkerType.GENERATION_SERVER,
            WorkerType.GSERVER_MANAGER,
            WorkerType.REWARD_WORKER,
            WorkerType.MODEL_WORKER,
            WorkerType.MASTER_WORKER,
            WorkerType.ROLLOUT_WORKER,
            WorkerType.EVALUATOR,
        )
        found = {kind: getattr(self, kind.value) for kind in order}
        return {kind: group for kind, group in found.items() if group is not None and group.count}


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """A user's settings of the tasks of one worker type. None: as the experiment and the site set it."""

    sparse: ClassVar[bool] = True

    cpu: int | None = option(
        None,
        "CPUs of a task, as Slurm counts them, and its compute threads; it gets whole cores. None: 1, for "
        "model workers 2, with GPUs 6",
        ge=1,
    )
    gpu: float | None = option(
        None, "GPUs of a task; below 1: several share one; none: it computes on CPUs", ge=0
    )
    mem: int | None = option(
        None,
        "memory of a task; none: what suits the built-in model, and with GPUs what its models need beside "
        "them",
        ge=1,
        unit="MiB",
    )
    nodelist: str | None = option(None, "hostlist: run on these nodes only")
    exclude: str | None = option(None, "hostlist: not on these nodes")
    container_image: str | None = option(None, "image, instead of the cluster spec's")
    env_vars: Mapping[str, str] = option({}, "environment of the tasks; no secrets")
    time_limit: str | None = option(None, "as sbatch --time")
    begin: str | None = option(None, "as sbatch --begin")
    deadline: str | None = option(None, "as sbatch --deadline")
    partition: str | None = option(None, "as sbatch --partition")
    account: str | None = option(None, "as sbatch --account")
    qos: str | None = option(None, "as sbatch --qos")
    reservation: str | None = option(None, "as sbatch --reservation")
    constraint: str | None = option(None, "as sbatch --constraint")
    gpu_type: str | None = option(None, "type of GPU in GRES")
    extra: Mapping[str, str] = option({}, "further sbatch options")

    def on(self, task: _Task) -> _Task:
        """Returns ``task`` with what is set here."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        wanted: dict[str, Any] = {k: v for k, v in found.items() if v not in (None, {})}
        for table in wanted.keys() & {"env_vars", "extra"}:
            wanted[table] = {**getattr(task, table), **wanted[table]}
        return replace(task, **wanted) if wanted else task


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """A user's settings of the tasks of all worker types, and of each; the latter take precedence."""

    sparse: ClassVar[bool] = True

    all: GroupOptions = option(GroupOptions(), "of every task")
    model_worker: GroupOptions = option(GroupOptions(), "of model workers")
    master_worker: GroupOptions = option(GroupOptions(), "of the master")
    generation_server: GroupOptions = option(GroupOptions(), "of generation servers")
    gserver_manager: GroupOptions = option(GroupOptions(), "of the generation servers' manager")
    rollout_worker: GroupOptions = option(GroupOptions(), "of rollout workers")
    evaluator: GroupOptions = option(GroupOptions(), "of the evaluator")
    reward_worker: GroupOptions = option(GroupOptions(), "of reward workers")

    def of(self, kind: WorkerType) -> GroupOptions:
        """Returns what is set of a worker type, by its own name or for all."""
        own: GroupOptions = getattr(self, kind.value)
        return own.on(self.all)

    def on(self, other: SchedulingOptions) -> SchedulingOptions:
        """Returns ``other`` with what is set here."""
        names = [f.name for f in fields(self)]
        return SchedulingOptions(**{n: getattr(self, n).on(getattr(other, n)) for n in names})

    def apply_to(self, scheduling: ExperimentScheduling) -> ExperimentScheduling:
        """Returns an experiment's groups with these settings. Raises ConfigError."""
        changed: dict[str, Any] = {
            kind.value: replace(group, scheduling=self.of(kind).on(group.scheduling))
            for kind, group in scheduling.groups().items()
        }
        return replace(scheduling, **changed)
