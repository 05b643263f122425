"""From what stands on the command line to a LaunchPlan: the steps of `plan` and `launch`.

Imports the user's files, finds experiment and cluster, reads settings, chooses the trial's name, and
lets launcher/resolve.py decide. Writes nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from launcher import places
from launcher.clusters import check_writable, find_cluster
from launcher.overrides import apply_settings
from launcher.resolve import resolve
from launcher.trials import next_free_name
from realsys.api import registry
from realsys.api.errors import ConfigError
from realsys.api.experiment import Experiment
from realsys.api.plan import LaunchPlan
from realsys.api.trial import trial_dir


def make_plan(
    experiment: str,
    words: Sequence[str] = (),
    *,
    config: Path | None = None,
    trial: str | None = None,
    cluster: str | None = None,
    imports: Sequence[str] = (),
) -> LaunchPlan:
    """The plan of a launch that was asked for.

    Raises:
        ConfigErrors: every mistake in settings and experiment.
        ClusterError: trials can't be written under the file root.
    """
    imports = import_all(imports)
    kind = experiment_type(experiment)
    spec = find_cluster(cluster)
    check_writable(spec.file_root)
    applied = apply_settings(kind, words=words, config=config)
    user = places.user_name()
    folder = trial_dir(spec.file_root, user, experiment, "_").parent
    return resolve(
        experiment,
        applied.options,
        cluster=spec,
        trial_name=trial or next_free_name(folder),
        user=user,
        imports=imports,
        machine_cpus=len(os.sched_getaffinity(0)),
        earlier=applied.problems,
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
