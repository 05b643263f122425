"""The launch plan: every decision made before anything starts.

Made by launcher/plan/resolve.py, printed by ``realsys plan``, written to the trial folder with its hash,
read by the supervisor and by every worker, which refuse a plan whose hash does not match.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote

from realsys.api.basics.like_before import fold, unfold
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError, MadeByOtherCode
from realsys.api.experiment import ChosenSetting, ExperimentConfig
from realsys.api.plain import from_plain, to_plain
from realsys.api.scheduling import ExperimentScheduling, WorkerType

PLAN_VERSION = 1
FOLDED_VERSION = 2  # the same, with workers as changes from one to the next
MANY_WORKERS = 256  # of a kind: with more the plan is folded, and not indented
# What workers' descriptions held before, and nobody read: it stands in ``resolved``.
_RETIRED = ("model_topos", "data_transfer_pairs", "sync_param_pairs")


class JobLayout(StrEnum):
    """Mapping of a trial's task groups to Slurm jobs."""

    SINGLE = "single"  # one allocation of equal nodes
    HET = "het"  # one heterogeneous job, one component per kind of node
    SPLIT = "split"  # one job per component, submitted separately


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One srun step: all tasks of one worker type.

    Attributes:
        component: index into ``JobPlan.components``.
        nodes: (number of nodes, tasks on each of them) in order of the component's nodes, from its
            first; nodes after the last run have none. Task i of the group is the i-th in that order.
        cpus_per_task: CPUs that Slurm allocates to it, always whole cores.
        shares_cpus: it reserves no CPUs, since how many Slurm would allocate is unknown.
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
    """Equal nodes requested together: the whole job, a component of a het job, or one of several jobs.

    Attributes:
        worker_types: worker types with steps here, for display.
        cpus_per_node, memory_mib_per_node, gpus_per_node: requested on every node.
        threads_per_core: CPUs per core; 1 if Slurm counts cores.
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
        after: the trial or sweep that it depends on, as --after: ``ppo-math/run1:ok``.
        preflight: ``off``, ``warn`` or ``stop``, see SlurmSpec.
        spare: per component, resources of one node beyond this job's request: (CPUs, MiB, GPUs);
            empty if the cluster spec does not describe the partition.
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
    """One experiment of a trial: the last phase is the main one, earlier ones prepare it.

    Attributes:
        name: ``main``, or the preparation's name.
        folder: absolute folder of the phase's files; the trial's folder for ``main``.
        publish: absolute folder that receives the phase's product (a Hugging Face directory); the phase
            is skipped if it already exists. None for ``main``.
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
        chosen: those of the options that were chosen for the model, and why; and where data are of a hub,
            which commit's.
        imports: ``--import`` files and modules, absolute, imported by every worker.
        trusted_rules: reward rules that run in the workers' own process, without walls or limits.
        job: the Slurm request; None on this machine.
        snapshot: the trial runs the copy of the code in its own folder (``TrialFiles.code``).
        revision: git revision of the code, with ``+`` if it had uncommitted changes; empty outside git.
    """

    version: int = PLAN_VERSION
    experiment_name: str
    trial_name: str
    user: str
    trial_dir: str
    cluster: ClusterSpec
    phases: tuple[PhasePlan, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    chosen: tuple[ChosenSetting, ...] = ()
    imports: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    trusted_rules: tuple[str, ...] = ()
    job: JobPlan | None = None
    snapshot: bool = False
    revision: str = ""

    @property
    def trial(self) -> str:
        """``<experiment>/<trial>``."""
        return f"{self.experiment_name}/{self.trial_name}"

    @property
    def name_resolve_url(self) -> str:
        """URL of the trial's name-resolution store."""
        return self.cluster.name_resolve or f"file://{quote(self.cluster.file_root)}/name_resolve"

    def phase(self, name: str) -> PhasePlan:
        """Returns the phase called ``name``. Raises ConfigError."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise ConfigError(
            f"the plan has no phase {name!r}",
            where=self.trial,
            fix=f"use one of {[p.name for p in self.phases]}",
        )


def plan_text(plan: LaunchPlan) -> str:
    """Serialises the plan to JSON, a deterministic function of its value; small plans are indented."""
    plain = to_plain(plan, seen={})
    if all(len(p.config.workers(k)) <= MANY_WORKERS for p in plan.phases for k in WorkerType):
        return json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    folded = _each_list(plain, fold) | {"version": FOLDED_VERSION}
    return json.dumps(folded, separators=(",", ":"), sort_keys=True, ensure_ascii=False) + "\n"


def plan_hash(text: str) -> str:
    """Returns the SHA-256 of the plan's text, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_plan(path: Path, *, expected_hash: str | None = None) -> LaunchPlan:
    """Reads a plan and checks its hash.

    Raises:
        ConfigError: no such file, or other content than expected.
        MadeByOtherCode: another version of the plan, or fields that this code does not know.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError(f"a {type(data).__name__}, not an object")
        if data.get("version") == FOLDED_VERSION:
            data = _each_list(data, unfold) | {"version": PLAN_VERSION}
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
        known = f"this realsys reads {PLAN_VERSION} and {FOLDED_VERSION}"
        raise _made_by_other_code(f"plan version {data.get('version')}, {known}", data, str(path))
    try:
        return from_plain(LaunchPlan, _without_retired(data), where=path.name, seen={})
    except ConfigError as error:
        raise _made_by_other_code(error.what, data, error.where) from error


def _made_by_other_code(what: str, data: Mapping[str, Any], where: str) -> MadeByOtherCode:
    revision = str(data.get("revision") or "")
    by = f"revision {revision} of realsys, which" if revision else "the revision of realsys that"
    error = MadeByOtherCode(what, where=where, fix=f"use {by} launched the trial")
    error.revision = revision
    return error


def _each_list(plan: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy with each phase's lists of workers changed.

    Raises:
        ValueError: it does not look like a plan.
    """

    def phase_changed(phase: dict[str, Any]) -> dict[str, Any]:
        config = phase["config"]
        lists = {kind.value: change(config[kind]) for kind in WorkerType if config.get(kind)}
        return phase | {"config": config | lists}

    try:
        return plan | {"phases": [phase_changed(phase) for phase in plan["phases"]]}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its phases are not what they should be: {error!r}") from error


def _without_retired(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan without what older ones say and nobody read, follows, or is said elsewhere by now.
    ``from_plain`` judges the rest.
    """

    def kept(items: Any) -> Any:
        if not any(name in w for w in items if isinstance(w, dict) for name in _RETIRED):
            return items
        return [{k: v for k, v in w.items() if k not in _RETIRED} for w in items]

    try:
        plan = _each_list(plan, kept)
        if given := plan.pop("scheduling_options", None):
            plan["options"] = {**plan["options"], "scheduling": given}
        for phase in plan["phases"]:
            if resolved := phase["config"].get("resolved"):
                kept_of = {k: v for k, v in resolved.items() if k != "msid2mwid"}
                phase["config"]["resolved"] = kept_of
    except (AttributeError, ValueError):
        pass
    return plan
