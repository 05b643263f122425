"""From what stands on the command line to a LaunchPlan: the steps of `plan` and `launch`.

Imports the user's files, finds experiment and cluster, reads settings, chooses the trial's name, and
lets launcher/plan/resolve.py decide. Writes nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from launcher.plan.resolve import resolve
from launcher.plan.scheduling_options import PREFIX, SchedulingOptions
from launcher.sites import places
from launcher.sites.clusters import check_store, check_writable, find_cluster, missing_secrets
from launcher.slurm.discovery.core_threads import with_threads
from launcher.submit.job_options import JobOptions
from launcher.trials.find_trials import next_free_name
from realsys.api import registry
from realsys.api.errors import ConfigError
from realsys.api.experiment import Experiment
from realsys.api.options import option
from realsys.api.plan import LaunchPlan
from realsys.config.option_tree import paths
from realsys.config.overrides import apply_overrides, defaults_of, read_settings
from realsys.trial.records import trial_dir
from realsys.trial.snapshot import revision
from realsys.worker.machine_gpus import machine_gpus


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Settings of any launch, whatever the experiment."""

    scheduling: SchedulingOptions = option(SchedulingOptions(), "resources of the tasks")


def make_plan(
    experiment: str,
    words: Sequence[str] = (),
    *,
    config: Path | None = None,
    trial: str | None = None,
    cluster: str | None = None,
    imports: Sequence[str] = (),
    job: JobOptions | None = None,
    snapshot: bool = True,
    fits_memory: bool = True,
) -> LaunchPlan:
    """The plan of a launch that was asked for.

    Args:
        job: what stands on the command line about the Slurm job.
        snapshot: on Slurm, run a copy of the code; on this machine the code itself runs at once.
        fits_memory: refuse models that are too large for their GPUs.
    Raises:
        ConfigErrors: every mistake in settings, experiment and job.
        ClusterError: trials can't be written under the file root.
    """
    planner = Planner(
        experiment, config=config, cluster=cluster, imports=imports, job=job, snapshot=snapshot
    )
    name = trial or next_free_name(planner.folder)
    return planner.plan(words, trial=name, fits_memory=fits_memory)


class Planner:
    """Makes plans of one experiment at one site; what the trials of a sweep share is read once.

    Arguments as of ``make_plan``; relative times count from now, for all plans.

    Raises:
        ConfigError: no such experiment or cluster, or an import that fails.
        ClusterError: trials can't be written under the file root.
    """

    def __init__(
        self,
        experiment: str,
        *,
        config: Path | None,
        cluster: str | None,
        imports: Sequence[str],
        job: JobOptions | None,
        snapshot: bool,
    ) -> None:
        self.experiment, self._config, self._job = experiment, config, job or JobOptions()
        self._imports = import_all(imports)
        self._kind = experiment_type(experiment)
        self.cluster = with_threads(find_cluster(cluster))
        check_writable(self.cluster.file_root)
        check_store(self.cluster)
        self.on_slurm = self.cluster.scheduler == "slurm"
        self._user = places.user_name()
        self.folder = trial_dir(self.cluster.file_root, self._user, experiment, "_").parent
        self._snapshot, self._now = snapshot and self.on_slurm, datetime.now()
        self._revision = revision() if self.on_slurm else ""
        self._request = self._job.request(self._dependency())

    def _dependency(self) -> str | None:
        if not self.on_slurm or not self._job.after:
            return None
        from launcher.submit.dependencies import dependency_on  # loads all that reads trials

        return dependency_on(self._job.after)

    def plan(self, words: Sequence[str], *, trial: str, fits_memory: bool = True) -> LaunchPlan:
        """The plan of a trial with these settings.

        Raises:
            ConfigErrors: every mistake in settings, experiment and job.
        """
        problems: list[ConfigError] = []
        settings = [*read_settings(words, self._config, problems), *self._job.settings()]
        of_launch = [s for s in settings if s.path.startswith(PREFIX)]
        applied = apply_overrides(
            defaults_of(self._kind), [s for s in settings if s not in of_launch]
        )
        launch = apply_overrides(LaunchSettings(), of_launch)
        problems += [*applied.problems, *launch.problems, *self._job.problems(self.cluster)]
        if self.on_slurm:
            problems += missing_secrets(self.cluster, os.environ)
        return resolve(
            self.experiment,
            applied.options,
            cluster=self.cluster,
            trial_name=trial,
            user=self._user,
            imports=self._imports,
            machine_cpus=len(os.sched_getaffinity(0)),
            machine_gpus=None
            if self.on_slurm
            else partial(machine_gpus, {**os.environ, **self.cluster.env_vars}),
            given=applied.origins,
            earlier=problems,
            scheduling=launch.options.scheduling,
            request=self._request,
            now=self._now,
            snapshot=self._snapshot,
            revision=self._revision,
            fits_memory=fits_memory,
        )


def import_all(names: Sequence[str]) -> list[str]:
    """Imports plug-ins, files and modules; returns them as every worker can import them."""
    found = [
        str(Path(n).expanduser().resolve()) if n.endswith(".py") else n
        for n in dict.fromkeys(names)
    ]
    registry.load_plugins(found)
    return found


def experiment_type(name: str) -> type[Experiment]:
    """The dataclass registered under ``name``.

    Raises:
        UnknownName: with the nearest names. ConfigError: it is no experiment.
    """
    kind = registry.find("experiment", name, where="command line")
    if not (isinstance(kind, type) and issubclass(kind, Experiment)):
        raise ConfigError(
            f"{name} is registered as {kind!r}, which is no subclass of Experiment",
            where=f"register_experiment({name!r}, …)",
            fix="subclass realsys.api.experiment.Experiment",
        )
    if not dataclasses.is_dataclass(kind):
        raise ConfigError(
            f"experiment {name} is no dataclass",
            where=f"{kind.__module__}:{kind.__qualname__}",
            fix="decorate it: @dataclass(frozen=True, kw_only=True)",
        )
    return kind


def setting_names(words: Iterable[str]) -> list[str]:
    """Dotted names of all settings of the first experiment that is named in ``words``, by itself or with
    a trial behind it; empty if none is."""
    known = registry.names("experiment")
    for word in words:
        if (name := word.partition("/")[0]) in known:
            with suppress(ConfigError):
                return list(paths(experiment_type(name)))
    return []


def experiments() -> list[tuple[str, str]]:
    """Every registered experiment with the first line of its documentation."""
    found = []
    for name in registry.names("experiment"):
        try:
            doc = registry.find("experiment", name).__doc__ or ""
        except ImportError as error:
            doc = f"can't be imported: {error}"
        found.append((name, doc.strip().partition("\n")[0]))
    return found
