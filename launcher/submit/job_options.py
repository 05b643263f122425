"""What stands on the command line about the job: sbatch's own option names (pure).

Those that are about nodes become settings of all groups (``scheduling.all.…``), so that they are read,
checked and reported like any other; the rest is a JobRequest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from launcher.job.job_allocation import JobRequest
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError
from realsys.config.settings import UserSetting
from realsys.config.typed_values import Text


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """None: not given."""

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
        """Those about nodes, as settings."""
        names = "partition account qos reservation constraint nodelist exclude".split()
        for name, option in [*((n, n) for n in names), ("time_limit", "time")]:
            value = getattr(self, option)
            if value is not None:
                text = Text(value, quoted=True)
                yield UserSetting(f"scheduling.all.{name}", text, f"command line --{option}")

    def request(self, dependency: str | None = None) -> JobRequest:
        """The rest."""
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
        """Options that mean nothing on this machine."""
        if cluster.scheduler != "local":
            return
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if given:
            yield ConfigError(
                f"cluster {cluster.name!r} has no Slurm that could honour "
                + ", ".join(f"--{name}" for name in given),
                where="command line",
                fix="name a Slurm cluster with --cluster (realsys clusters), or leave them out",
            )
