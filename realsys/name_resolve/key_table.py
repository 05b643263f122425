"""Every key that realsys writes into name resolution. Pure.

The only place where keys are composed. docs/workers.md lists the writer, reader and lifetime of
each. Values are not described here: their writers encode them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

from realsys.api.errors import ConfigError, StoreError
from realsys.name_resolve.store import canonical

if TYPE_CHECKING:  # a heartbeat process has no use for it
    from realsys.api.plan import LaunchPlan
    from realsys.trial.plan_summary import PlanSummary

PREFIX = "realsys/v1"  # a change of any value's meaning takes a new number


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialKeys:
    """The keys of one trial. ``clear_subtree(keys.root)`` removes exactly these.

    ``user`` is the submitting user from the plan, never from the operating system: in a container that
    would be root, and processes of one run would look under different keys.
    """

    cluster: str
    user: str
    experiment: str
    trial: str

    @classmethod
    def of(cls, plan: LaunchPlan | PlanSummary) -> Self:
        """The keys of the plan's trial."""
        return cls(
            cluster=plan.cluster.name,
            user=plan.user,
            experiment=plan.experiment_name,
            trial=plan.trial_name,
        )

    def __post_init__(self) -> None:
        for field in fields(self):
            segment(getattr(self, field.name), what=field.name)

    @property
    def root(self) -> str:
        return f"{PREFIX}/{self.cluster}/{self.user}/{self.experiment}/{self.trial}"

    @property
    def attempt(self) -> str:
        return f"{self.root}/attempt"

    @property
    def workers(self) -> str:
        return f"{self.root}/worker"

    def worker(self, worker_type: str, index: int) -> str:
        return f"{self.workers}/{_worker(worker_type, index)}"

    @property
    def worker_statuses(self) -> str:
        return f"{self.root}/worker_status"

    def worker_status(self, worker_type: str, index: int) -> str:
        return f"{self.worker_statuses}/{_worker(worker_type, index)}"

    @property
    def commands(self) -> str:
        return f"{self.root}/command"

    def command(self, worker_type: str, index: int) -> str:
        return f"{self.commands}/{_worker(worker_type, index)}"

    @property
    def progress(self) -> str:
        return f"{self.root}/progress"

    @property
    def stop(self) -> str:
        return f"{self.root}/stop"

    @property
    def scaling(self) -> str:
        return f"{self.root}/scaling"

    @property
    def done(self) -> str:
        return f"{self.root}/done"

    def checkpoint(self, phase: str) -> str:
        return f"{self.root}/checkpoint/{segment(phase, what='phase')}"

    def saved_model(self, role: str) -> str:
        return f"{self.root}/saved_model/{segment(role, what='role')}"

    @property
    def components(self) -> str:
        return f"{self.root}/component"

    def component(self, index: int) -> str:
        return f"{self.components}/{_index(index)}"

    @property
    def component_order(self) -> str:
        return f"{self.root}/component_order"

    @property
    def component_reports(self) -> str:
        return f"{self.root}/component_report"

    def component_report(self, index: int) -> str:
        return f"{self.component_reports}/{_index(index)}"


def segment(name: str, *, what: str) -> str:
    """Returns ``name`` if it is valid as one segment of a key."""
    try:
        canonical(name)
    except StoreError as error:
        raise ConfigError(
            f"{what} {name!r} can't be part of a key: {error.what}",
            where=what,
            fix="use a name without '/', not empty, not '.' or '..'",
        ) from error
    if "/" in name:
        raise ConfigError(f"{what} {name!r} has a '/'", where=what, fix="use '-' or '_' instead")
    return name


def _worker(worker_type: str, index: int) -> str:
    return f"{segment(worker_type, what='worker type')}/{_index(index)}"


def _index(index: int) -> int:
    if index < 0:
        raise ConfigError(f"index {index} is below 0", where="worker index", fix="count from 0")
    return index
