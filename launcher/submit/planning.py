"""Turns the command line into a LaunchPlan, for `plan` and `launch`.

Imports the user's files, finds experiment and cluster, reads settings, puts local files in place of those
on a hub (launcher/hub), chooses the trial's name, and lets launcher/plan/resolve.py decide. Writes no
trial.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

from launcher.hub.hub_data import DataHub
from launcher.hub.hub_settings import LocatedData, with_local_data
from launcher.plan.idle_settings import idle_gpu_warnings, idle_warnings
from launcher.plan.resolve import resolve
from launcher.sites import places
from launcher.sites.clusters import check_store, check_writable, find_cluster
from launcher.sites.site_problems import missing_secrets
from launcher.slurm.discovery.core_threads import with_threads
from launcher.submit import setting_table
from launcher.submit.job_options import JobOptions
from launcher.trials.find_trials import next_free_name
from realsys.api import registry
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError, RealsysError, raise_all
from realsys.api.experiment import ChosenSetting, Experiment
from realsys.api.plan import LaunchPlan
from realsys.config.option_tree import paths, with_value
from realsys.config.overrides import apply_overrides, apply_settings, defaults_of, read_settings
from realsys.trial.records import trial_dir
from realsys.trial.snapshot import resolved_imports, revision_meanwhile
from realsys.worker.machine_gpus import machine_gpus


class LaunchOptions(TypedDict, total=False):
    """What a launch takes besides experiment, settings and name.

    ``config`` is a YAML file of settings; ``cluster`` a site's name or file; ``imports`` files and modules
    that register plug-ins; ``job`` the command line's options for the Slurm job. With ``snapshot``, a copy
    of the code runs on Slurm; locally the code itself runs at once. With ``fetch``, data on a hub are
    fetched, and it gets lines about that; without, a plan only says what would be.
    """

    config: Path | None
    cluster: str | None
    imports: Sequence[str]
    job: JobOptions | None
    snapshot: bool
    fetch: Callable[[str], None] | None


def make_plan(
    experiment: str,
    words: Sequence[str] = (),
    *,
    trial: str | None = None,
    fits_memory: bool = True,
    **options: Unpack[LaunchOptions],
) -> LaunchPlan:
    """Makes the plan of a launch.

    Args:
        fits_memory: refuse models that are too large for their GPUs.
    Raises:
        ConfigErrors: every mistake in settings, experiment and job.
        ClusterError: trials can't be written under the file root.
    """
    planner = Planner(experiment, **options)
    name = next_free_name(planner.folder) if trial is None else trial
    return planner.plan(words, trial=name, fits_memory=fits_memory)


class Planner:
    """Makes plans of one experiment at one site; reads what a sweep's trials share only once.

    Options as of ``LaunchOptions``; relative times of all plans count from construction.

    Raises:
        ConfigError: no such experiment or cluster, or a failed import.
        ClusterError: trials can't be written under the file root.
    """

    def __init__(
        self,
        experiment: str,
        *,
        config: Path | None = None,
        cluster: str | None = None,
        imports: Sequence[str] = (),
        job: JobOptions | None = None,
        snapshot: bool = True,
        fetch: Callable[[str], None] | None = None,
    ) -> None:
        self._revision = revision_meanwhile()
        self.experiment, self._config, self._job = experiment, config, job or JobOptions()
        self._imports = import_all(imports)
        self._defaults = default_experiment(experiment)
        setting_table.remember(experiment, self._defaults)
        self.cluster = with_threads(find_cluster(cluster))
        check_writable(self.cluster.file_root)
        check_store(self.cluster)
        self.on_slurm = self.cluster.scheduler == "slurm"
        self._user = places.user_name()
        self._hub = hub_of(self.cluster, fetch)
        self.folder = trial_dir(self.cluster.file_root, self._user, experiment, "_").parent
        self._snapshot, self._now = snapshot and self.on_slurm, datetime.now()
        self._request = self._job.request(self._dependency()) if self.on_slurm else None

    def _dependency(self) -> str | None:
        if not self._job.after:
            return None
        from launcher.submit.dependencies import dependency_on  # loads all that reads trials

        return dependency_on(self._job.after)

    def plan(self, words: Sequence[str], *, trial: str, fits_memory: bool = True) -> LaunchPlan:
        """Makes the plan of a trial with these settings.

        Raises:
            ConfigErrors: every mistake in settings, experiment and job.
        """
        problems: list[ConfigError] = []
        settings = [*read_settings(words, self._config, problems), *self._job.settings()]
        applied = apply_overrides(self._defaults, settings)
        problems += [*applied.problems, *self._job.problems(self.cluster)]
        if self.on_slurm:
            problems += missing_secrets(self.cluster, os.environ)
        make = partial(self._resolved, problems, applied.origins, trial, fits_memory)
        located = with_local_data(applied.options, self._hub)
        if self._hub.report is not None and not located.is_complete:
            make(located)  # raises what is wrong before anything is fetched
            located = with_local_data(applied.options, self._hub, fetch=True)
        plan = make(located)
        idle = idle_warnings(self._defaults, settings)
        tasks = idle_gpu_warnings(plan.phases, self.cluster) if self.on_slurm else ()
        return dataclasses.replace(plan, warnings=(*plan.warnings, *idle, *tasks))

    def _resolved(
        self,
        problems: Sequence[ConfigError],
        given: Collection[str],
        trial: str,
        fits_memory: bool,
        located: LocatedData[Experiment],
    ) -> LaunchPlan:
        """Makes the plan of an experiment with settings that are chosen for it.

        Args:
            problems: found in the settings.
            given: paths of the settings that the user set.
        Raises:
            ConfigErrors: these problems, and all others.
        """
        options, chosen = with_chosen(located.experiment, given)
        plan = resolve(
            self.experiment,
            options,
            cluster=self.cluster,
            trial_name=trial,
            user=self._user,
            imports=self._imports,
            machine_cpus=len(os.sched_getaffinity(0)),
            machine_gpus=None
            if self.on_slurm
            else partial(machine_gpus, {**os.environ, **self.cluster.env_vars}),
            given=frozenset(given),
            chosen=chosen,
            earlier=[*problems, *located.problems],
            request=self._request,
            now=self._now,
            snapshot=self._snapshot,
            revision=self._revision(),
            fits_memory=fits_memory,
        )
        return dataclasses.replace(
            plan,
            chosen=(*located.chosen, *plan.chosen),
            warnings=(*located.warnings, *plan.warnings),
        )


def hub_of(cluster: ClusterSpec, fetch: Callable[[str], None] | None) -> DataHub:
    """Returns the hub whose data sets are kept under a site's file root."""
    return DataHub(Path(cluster.file_root, "cache", "hf"), fetch)


def import_all(names: Sequence[str]) -> list[str]:
    """Imports plug-in files and modules; returns their names as workers can import them."""
    found = resolved_imports(names)
    registry.load_plugins(found, if_changed=True)
    return found


def default_experiment(name: str) -> Experiment:
    """Makes the experiment registered under ``name``, a class or a function, with its own defaults.

    Raises:
        UnknownName: with the nearest names. ConfigError: it is not an experiment.
    """
    made_by = registry.find("experiment", name, where="command line")
    try:
        found = defaults_of(made_by) if callable(made_by) else made_by
    except RealsysError:
        raise
    except Exception as error:  # a user's recipe may raise anything
        import traceback

        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(getattr(made_by, "__code__", None), "co_filename", "")
        last = ([frame for frame in frames if frame.filename == file] or frames)[-1]
        raise ConfigError(
            f"the recipe {name} raised {type(error).__name__}: {error}",
            where=f"{last.filename}:{last.lineno}",
            fix="repair the function that was registered for it",
        ) from error
    if not isinstance(found, Experiment):
        raise ConfigError(
            f"{name} is registered as {made_by!r}, which makes no Experiment",
            where=f"register_experiment({name!r}, …)",
            fix="register a subclass of realsys.api.experiment.Experiment, or a function that returns one",
        )
    kind = type(found)
    if next(c for c in kind.__mro__ if "__dataclass_fields__" in vars(c)) is Experiment:
        raise ConfigError(
            f"experiment {name} is not a dataclass",
            where=f"{kind.__module__}:{kind.__qualname__}",
            fix="decorate it: @dataclass(frozen=True, kw_only=True)",
        )
    return found


def with_chosen(
    options: Experiment, given: Collection[str]
) -> tuple[Experiment, tuple[ChosenSetting, ...]]:
    """Returns the experiment with the settings that are chosen for its model, and these.

    Args:
        given: paths of the settings that the user set.
    """
    chosen = options.chosen(given)
    for one in chosen:
        options = with_value(options, one.path, one.value)
    return options, chosen


def chosen_experiment(
    name: str, words: Sequence[str], config: Path | None = None, *, hub: DataHub | None = None
) -> tuple[Experiment, tuple[ChosenSetting, ...]]:
    """Returns a registered experiment with the settings given and chosen, and the chosen ones.

    Args:
        hub: from which data are fetched that settings name; None: the names stay as they are.
    Raises:
        ConfigErrors: every mistake in the settings.
    """
    applied = apply_settings(default_experiment(name), words=words, config=config)
    raise_all(applied.problems)
    if hub is None:
        return with_chosen(applied.options, applied.origins)
    located = with_local_data(applied.options, hub, fetch=True)
    raise_all(located.problems)
    return with_chosen(located.experiment, applied.origins)


def setting_names(words: Iterable[str]) -> list[str]:
    """Lists the dotted names of all settings of the first experiment in ``words``.

    The experiment may be given alone or as ``experiment/trial``; empty if there is none.
    """
    known = registry.names("experiment")
    for word in words:
        if (name := word.partition("/")[0]) in known:
            with suppress(ConfigError):
                return paths(default_experiment(name))
    return []


def experiments() -> list[tuple[str, str]]:
    """Lists every registered experiment with the first line of its documentation."""
    found = []
    for name in registry.names("experiment"):
        try:
            doc = registry.find("experiment", name).__doc__ or ""
        except ImportError as error:
            doc = f"can't be imported: {error}"
        found.append((name, doc.strip().partition("\n")[0]))
    return found
