"""User settings for the tasks of any experiment: ``scheduling.model_worker.nodelist=n[1-2]``.

The experiment declares what its groups need; these settings, and the job options of the command line
(``--partition`` …), override that. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realsys.api.options import option
from realsys.api.scheduling import ExperimentScheduling, TasksGroup, WorkerType

PREFIX = "scheduling."


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Settings of one worker type. None: as the experiment and the cluster spec set it."""

    cpu: int | None = option(
        None, "CPUs of a task, as Slurm counts them; it gets whole cores", ge=1
    )
    gpu: float | None = option(None, "GPUs of a task; below 1: several share one", ge=0)
    mem: int | None = option(None, "memory of a task", ge=1, unit="MiB")
    nodelist: str | None = option(None, "hostlist: run on these nodes only")
    exclude: str | None = option(None, "hostlist: not on these nodes")
    container_image: str | None = option(None, "image, instead of the cluster spec's")
    env_vars: Mapping[str, str] = field(
        default_factory=dict, metadata={"meaning": "environment of the tasks; no secrets"}
    )
    time_limit: str | None = option(None, "as sbatch --time")
    begin: str | None = option(None, "as sbatch --begin")
    deadline: str | None = option(None, "as sbatch --deadline")
    partition: str | None = option(None, "as sbatch --partition")
    account: str | None = option(None, "as sbatch --account")
    qos: str | None = option(None, "as sbatch --qos")
    reservation: str | None = option(None, "as sbatch --reservation")
    constraint: str | None = option(None, "as sbatch --constraint")
    gpu_type: str | None = option(None, "type of GPU in GRES")
    extra: Mapping[str, str] = field(
        default_factory=dict, metadata={"meaning": "further sbatch options"}
    )

    def changes(self) -> dict[str, Any]:
        """Returns the options that are set."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if value not in (None, {})}


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """Settings of all worker types, and of each; the latter take precedence."""

    all: GroupOptions = option(GroupOptions(), "of every task")
    model_worker: GroupOptions = option(GroupOptions(), "of model workers")
    master_worker: GroupOptions = option(GroupOptions(), "of the master")
    generation_server: GroupOptions = option(GroupOptions(), "of generation servers")
    gserver_manager: GroupOptions = option(GroupOptions(), "of the generation servers' manager")
    rollout_worker: GroupOptions = option(GroupOptions(), "of rollout workers")
    evaluator: GroupOptions = option(GroupOptions(), "of the evaluator")

    def given(self) -> dict[str, dict[str, Any]]:
        """Returns the options that are set, by worker type; ``from_plain`` reads it."""
        found = {f.name: getattr(self, f.name).changes() for f in dataclasses.fields(self)}
        return {name: dict(changes) for name, changes in found.items() if changes}

    @property
    def gpus_per_model_worker(self) -> float | None:
        """GPUs as set; None: as the experiment sets it."""
        own, every = self.model_worker.gpu, self.all.gpu
        return every if own is None else own

    def apply_to(self, scheduling: ExperimentScheduling) -> ExperimentScheduling:
        """Returns the experiment's groups with these settings applied. Raises ConfigError."""
        changed: dict[str, Any] = {}
        for kind in WorkerType:
            group: TasksGroup | None = getattr(scheduling, kind.value)
            own: GroupOptions = getattr(self, kind.value)
            wanted = {**self.all.changes(), **own.changes()}
            if group is not None and wanted:
                tables: dict[str, dict[str, str]] = {
                    name: dict(getattr(group.scheduling, name)) | wanted[name]
                    for name in ("env_vars", "extra")
                    if name in wanted
                }
                new = dataclasses.replace(group.scheduling, **{**wanted, **tables})
                changed[kind.value] = dataclasses.replace(group, scheduling=new)
        return dataclasses.replace(scheduling, **changed) if changed else scheduling


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Settings of any launch, whatever the experiment."""

    scheduling: SchedulingOptions = option(SchedulingOptions(), "resources of the tasks")
