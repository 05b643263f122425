"""The launch plan: everything decided before anything starts.

Made by launcher/resolve.py, printed by ``realsys plan``, written to the trial folder with its hash,
read by the supervisor and by every worker, which refuse a plan whose hash does not match.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError
from realsys.api.experiment import ExperimentConfig
from realsys.api.job import JobPlan, StepPlan
from realsys.api.plain import from_plain, to_plain
from realsys.api.scheduling import ExperimentScheduling

PLAN_VERSION = 1
LARGE_PLAN_CHARS = (
    1 << 20
)  # above it, of hundreds of workers, indenting costs seconds and megabytes


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """One experiment of a trial: the last phase is the trial's own, earlier ones prepare it.

    Attributes:
        name: ``main``, or the preparation's name.
        folder: absolute folder of the phase's files; the trial's folder for ``main``.
        publish: absolute folder that receives the phase's product (a Hugging Face directory); when it
            is there already the phase is skipped. None for ``main``.
        steps: on Slurm, how each group of tasks is placed, in start order; empty on this machine.
    """

    name: str
    experiment_name: str
    folder: str
    publish: str | None
    scheduling: ExperimentScheduling
    config: ExperimentConfig
    steps: tuple[StepPlan, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A resolved trial.

    Attributes:
        trial_dir: absolute folder of the trial.
        options: the experiment's options as plain values, for ``show``, the report and a resume with
            others.
        scheduling_options: what the user set of ``scheduling.…``, by worker type.
        imports: ``--import`` files and modules, absolute, imported by every worker.
        job: what is asked of Slurm; None on this machine.
        snapshot: the trial runs the copy of the code in its own folder (``TrialFiles.code``).
        revision: git revision of the code, with ``+`` when it had changes; empty outside git.
    """

    version: int = PLAN_VERSION
    experiment_name: str
    trial_name: str
    user: str
    trial_dir: str
    cluster: ClusterSpec
    phases: tuple[PhasePlan, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    scheduling_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    job: JobPlan | None = None
    snapshot: bool = False
    revision: str = ""

    @property
    def trial(self) -> str:
        """``<experiment>/<trial>``."""
        return f"{self.experiment_name}/{self.trial_name}"

    @property
    def name_resolve_url(self) -> str:
        """URL of the trial's store."""
        return self.cluster.name_resolve or f"file://{quote(self.cluster.file_root)}/name_resolve"

    def phase(self, name: str) -> PhasePlan:
        """The phase called ``name``. Raises ConfigError."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise ConfigError(
            f"the plan has no phase {name!r}",
            where=self.trial,
            fix=f"use one of {[p.name for p in self.phases]}",
        )


def plan_text(plan: LaunchPlan) -> str:
    """The plan as JSON, byte for byte a function of its value; a small one indented, for people."""
    plain = to_plain(plan, seen={})
    compact = json.dumps(plain, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    if len(compact) > LARGE_PLAN_CHARS:
        return compact + "\n"
    return json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def plan_hash(text: str) -> str:
    """SHA-256 of the plan's text, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_plan(path: Path, *, expected_hash: str | None = None) -> LaunchPlan:
    """Reads a plan and checks its hash.

    Raises:
        ConfigError: no such file, other content than expected, or another plan version.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError(f"a {type(data).__name__}, not an object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the plan can't be read: {error}", where=str(path), fix="launch the trial again"
        ) from error
    if expected_hash is not None and plan_hash(text) != expected_hash:
        raise ConfigError(
            f"the plan changed after launch: hash {plan_hash(text)[:12]}, expected "
            f"{expected_hash[:12]}",
            where=str(path),
            fix="restore the file or launch a new trial; a plan is never edited",
        )
    if data.get("version") != PLAN_VERSION:
        raise ConfigError(
            f"plan version {data.get('version')}, this realsys reads {PLAN_VERSION}",
            where=str(path),
            fix="use the realsys version that launched the trial",
        )
    return from_plain(LaunchPlan, data, where=path.name)
