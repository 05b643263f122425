"""Every key that realsys writes into name resolution: its writer, reader and lifetime.

The only place where keys are composed. Values are not described here: their writers encode them.
Pure.
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
        """Written by the supervisor, by transaction n -> n+1; read by every worker and the next
        supervisor; until the trial is cleared."""
        return f"{self.root}/attempt"

    @property
    def workers(self) -> str:
        return f"{self.root}/worker"

    def worker(self, worker_type: str, index: int) -> str:
        """Written by the worker's heartbeat process: host, pid, endpoint, attempt; read by master,
        supervisor and status; until the writer's lease ends."""
        return f"{self.workers}/{_worker(worker_type, index)}"

    @property
    def worker_statuses(self) -> str:
        return f"{self.root}/worker_status"

    def worker_status(self, worker_type: str, index: int) -> str:
        """Written by the worker's heartbeat process at each change; read by supervisor and status;
        until the writer's lease ends, a final one until the trial is cleared."""
        return f"{self.worker_statuses}/{_worker(worker_type, index)}"

    @property
    def commands(self) -> str:
        return f"{self.root}/command"

    def command(self, worker_type: str, index: int) -> str:
        """Written by the launcher (tell) and, for stacks, the supervisor; read by the worker's
        heartbeat process; until the worker takes it."""
        return f"{self.commands}/{_worker(worker_type, index)}"

    @property
    def progress(self) -> str:
        """Written by the master after each step; read by status; until the trial is cleared."""
        return f"{self.root}/progress"

    @property
    def stop(self) -> str:
        """Written by the launcher (stop) and, on a signal, the supervisor; read by the master and the
        workers; until the next attempt."""
        return f"{self.root}/stop"

    @property
    def scaling(self) -> str:
        """Written by the launcher (scale) and by the supervisor when it gives up a worker that was
        added; read by supervisor, master and gserver manager; until the next attempt scales."""
        return f"{self.root}/scaling"

    @property
    def done(self) -> str:
        """Written by the master when all steps are done; read by nobody: the transaction is the
        point; until the trial is cleared."""
        return f"{self.root}/done"

    def checkpoint(self, phase: str) -> str:
        """Written by the master before it renames a checkpoint into place; read by nobody: the
        transaction is the point; until the trial is cleared."""
        return f"{self.root}/checkpoint/{segment(phase, what='phase')}"

    def saved_model(self, role: str) -> str:
        """Written by the master before it renames a saved model into place; read by nobody: the
        transaction is the point; until the trial is cleared."""
        return f"{self.root}/saved_model/{segment(role, what='role')}"

    @property
    def components(self) -> str:
        return f"{self.root}/component"

    def component(self, index: int) -> str:
        """Written in layout split by who runs in that Slurm job, 0 is the supervisor; read by the
        supervisor, and 0 by component agents; until the writer's lease ends."""
        return f"{self.components}/{_index(index)}"

    @property
    def component_order(self) -> str:
        """Written by the supervisor: start or end a phase's steps, or leave; read by the component
        agents; until the trial is cleared."""
        return f"{self.root}/component_order"

    @property
    def component_reports(self) -> str:
        return f"{self.root}/component_report"

    def component_report(self, index: int) -> str:
        """Written by the component agent: how its tasks ended; read by the supervisor; until the
        trial is cleared."""
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
