"""The parts of a trial's plan that show how the trial stands, read without the rest.

For `status` and `ls`: the classes of the whole plan (realsys/api/plan.py) take longer to import than all
else that these verbs do, and the plan of thousands of workers takes seconds to read. Names are the plan's;
nothing that every plan has has a default here, so a plan that lacks something is left to the whole one's
reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import msgspec

if TYPE_CHECKING:
    from realsys.api.cluster import EtcdSpec


class TaskCount(msgspec.Struct, frozen=True):
    """A group of equal tasks."""

    count: int


class TaskCounts(msgspec.Struct, frozen=True):
    """The task groups of a phase, in start order."""

    generation_server: TaskCount | None
    gserver_manager: TaskCount | None
    model_worker: TaskCount | None
    master_worker: TaskCount | None
    rollout_worker: TaskCount | None
    evaluator: TaskCount | None
    reward_worker: TaskCount | None = None

    def groups(self) -> dict[str, TaskCount]:
        """Groups that have tasks, in start order."""
        found = {kind: getattr(self, kind) for kind in self.__struct_fields__}
        return {kind: group for kind, group in found.items() if group is not None and group.count}


class PhaseSummary(msgspec.Struct, frozen=True):
    """One phase."""

    name: str
    folder: str
    publish: str | None
    scheduling: TaskCounts


class JobSummary(msgspec.Struct, frozen=True):
    """What was asked of Slurm."""

    requeue: bool
    after: str | None


class SlurmSummary(msgspec.Struct, frozen=True):
    """How the site's Slurm is asked."""

    grace_seconds: int
    accounting: bool | None


class SiteSummary(msgspec.Struct, frozen=True):
    """The site."""

    name: str
    file_root: str
    slurm: SlurmSummary
    name_resolve: str | None
    etcd_fields: Mapping[str, Any] = msgspec.field(name="etcd")

    @property
    def etcd(self) -> EtcdSpec:
        """How the site's etcd is entered."""
        from realsys.api.cluster import EtcdSpec
        from realsys.api.plain import from_plain

        return from_plain(EtcdSpec, self.etcd_fields, where="cluster.etcd")


class PlanSummary(msgspec.Struct, frozen=True):
    """Which trial it is, where its records are, and what it consists of."""

    version: Literal[1, 2]
    experiment_name: str
    trial_name: str
    user: str
    trial_dir: str
    cluster: SiteSummary
    phases: tuple[PhaseSummary, ...]
    job: JobSummary | None
    trusted_rules: tuple[str, ...] = ()

    @property
    def trial(self) -> str:
        """``<experiment>/<trial>``."""
        return f"{self.experiment_name}/{self.trial_name}"

    @property
    def name_resolve_url(self) -> str:
        """URL of the trial's name-resolution store."""
        return self.cluster.name_resolve or f"file://{quote(self.cluster.file_root)}/name_resolve"


def read_plan_summary(path: Path) -> PlanSummary | None:
    """Reads the summary of the plan at ``path``; None for a plan that only the whole one's reader knows
    how to read, or to refuse."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PlanSummary)
    except (OSError, ValueError, RecursionError):
        return None
