"""The command line's job options, which have sbatch's own names (pure).

Node options become settings of all groups (``scheduling.all.…``), so that they are read, checked and
reported like any other setting; the rest becomes a JobRequest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError
from realsys.config.settings import UserSetting
from realsys.config.typed_values import Text

if TYPE_CHECKING:
    from launcher.job.job_allocation import JobRequest


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Job options of one command. None: not given."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    time: str | None = None
    begin: str | None = None
    deadline: str | None = None
    layout: str | None = None
    requeue: bool | None = None
    after: str | None = None
    preflight: str | None = None

    def settings(self) -> Iterator[UserSetting]:
        """Yields the node options as settings."""
        names = "partition account qos reservation constraint nodelist exclude".split()
        for name, option in [*((n, n) for n in names), ("time_limit", "time")]:
            value = getattr(self, option)
            if value is not None:
                text = Text(value, quoted=True)
                yield UserSetting(f"scheduling.all.{name}", text, f"command line --{option}")

    def request(self, dependency: str | None = None) -> JobRequest:
        """Returns the other options as a JobRequest."""
        from launcher.job.job_allocation import JobRequest  # a local plan starts sooner without

        return JobRequest(
            layout=self.layout,
            begin=self.begin,
            deadline=self.deadline,
            dependency=dependency,
            after=self.after,
            requeue=self.requeue,
            preflight=self.preflight,
        )

    def problems(self, cluster: ClusterSpec) -> Iterator[ConfigError]:
        """Yields options that have no meaning on the local machine."""
        if cluster.scheduler != "local":
            return
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if given:
            yield ConfigError(
                f"cluster {cluster.name!r} does not use Slurm and can't apply "
                + ", ".join(f"--{name}" for name in given),
                where="command line",
                fix="name a Slurm cluster with --cluster (realsys clusters), or leave them out",
            )
