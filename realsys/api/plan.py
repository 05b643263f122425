"""The launch plan: everything decided before anything starts.

Made by launcher/plan/resolve.py, printed by ``realsys plan``, written to the trial folder with its hash,
read by the supervisor and by every worker, which refuse a plan whose hash does not match.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote

from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError
from realsys.api.experiment import ExperimentConfig
from realsys.api.plain import from_plain, to_plain
from realsys.api.scheduling import ExperimentScheduling, WorkerType

PLAN_VERSION = 1
LARGE_PLAN_CHARS = (
    1 << 20
)  # above it, of hundreds of workers, indenting costs seconds and megabytes


class JobLayout(StrEnum):
    """How a trial's groups become Slurm jobs."""

    SINGLE = "single"  # one allocation of equal nodes
    HET = "het"  # one heterogeneous job, a component for each kind of node
    SPLIT = "split"  # a job a component, started apart


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One srun step: all tasks of one worker type.

    Attributes:
        component: index into ``JobPlan.components``.
        nodes: (number of nodes, tasks on each of them) in order of the component's nodes, from its
            first; nodes after the last run have none. Task i of the group is the i-th in that order.
        cpus_per_task: what Slurm gives it, which is whole cores.
        shares_cpus: it takes no CPUs for itself: how many Slurm would give it is not known.
        gpus_per_task: a fraction below 1 when several tasks share one GPU.
        gpus_per_node: GPUs that the step has on each of its nodes; 0 without GPUs. Meant for
            ``gpu_binding`` visible: task l of a node (SLURM_LOCALID) uses entries
            ``realsys.slurm.gpus.gpu_positions`` of them.
        gpu_binding: ``visible``, ``per_task`` (srun's --gpus-per-task) or ``none``.
        time_limit: of this step alone, where it is shorter than the job's.
    """

    worker_type: WorkerType
    component: int = 0
    nodes: tuple[tuple[int, int], ...]
    cpus_per_task: int
    memory_mib: int
    shares_cpus: bool = False
    gpus_per_task: float = 0.0
    gpus_per_node: int = 0
    gpu_type: str | None = None
    gpu_binding: str = "none"
    container_image: str | None = None
    env_vars: Mapping[str, str] = field(default_factory=dict)
    time_limit: str | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes on which the step has a task."""
        return sum(count for count, tasks in self.nodes if tasks)

    @property
    def num_tasks(self) -> int:
        """Tasks of the step."""
        return sum(count * tasks for count, tasks in self.nodes)


@dataclass(frozen=True, kw_only=True)
class JobComponent:
    """Equal nodes asked for together: the whole job, a component of a het job, or one of several jobs.

    Attributes:
        worker_types: whose steps run here, for people.
        cpus_per_node, memory_mib_per_node, gpus_per_node: asked for on every node.
        threads_per_core: of the CPUs, so many are one core; 1 where Slurm counts cores.
        nodelist, exclude: Slurm hostlists, normalised.
        time_limit: as --time, normalised.
        extra: further sbatch options.
    """

    name: str
    worker_types: tuple[WorkerType, ...]
    nodes: int
    cpus_per_node: int
    memory_mib_per_node: int
    gpus_per_node: int = 0
    threads_per_core: int = 1
    gpu_type: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    time_limit: str | None = None
    exclusive: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A trial's Slurm job or jobs.

    Attributes:
        begin, deadline: absolute, ``YYYY-MM-DDTHH:MM:SS`` in the launching host's time zone.
        dependency: as --dependency, with job ids.
        after: the trial or sweep that it waits for, as --after: ``ppo-math/run1:ok``.
        preflight: ``off``, ``warn`` or ``stop``, see SlurmSpec.
        spare: per component, what its nodes have beyond the request of this job: (CPUs, MiB, GPUs)
            of one node; empty where the cluster spec does not describe the partition.
    """

    layout: JobLayout
    components: tuple[JobComponent, ...]
    begin: str | None = None
    deadline: str | None = None
    requeue: bool = False
    dependency: str | None = None
    after: str | None = None
    preflight: str = "off"
    spare: tuple[tuple[int, int, int], ...] = ()


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
