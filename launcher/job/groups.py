"""The groups of all phases with the site's defaults filled in, and which of them share nodes (pure).

Slurm gives a job, or a component of a heterogeneous one, nodes of one kind: groups can share them if they
agree on every option that selects nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.job.sbatch_options import option_name
from realsys.api.cluster import ClusterSpec, PartitionSpec
from realsys.api.errors import ConfigError, UnknownName, did_you_mean
from realsys.api.plan import JobLayout
from realsys.api.scheduling import ExperimentScheduling, Scheduling, WorkerType
from realsys.slurm.hostlist import compress, expand

MAX_COMPONENTS = 128  # MAX_HET_JOB_COMPONENTS of slurm.h
MAIN_PHASE = "main"
SITE_DEFAULTS = ("partition", "account", "qos", "reservation", "constraint")
_NODE_FIELDS = (*SITE_DEFAULTS, "gpu_type", "nodelist", "exclude", "extra")


@dataclass(frozen=True, kw_only=True)
class PlacedGroup:
    """The tasks of one worker type in one phase.

    Attributes:
        task: with the site's defaults; node lists normalised; ``time_limit`` is the group's own.
        partition: resources of its nodes; None if the cluster spec does not describe it (a problem).
    """

    phase: str
    kind: WorkerType
    count: int
    task: Scheduling
    partition: PartitionSpec | None

    def where(self, field: str) -> str:
        """Returns the setting's name, as spelled on the command line."""
        phase = "" if self.phase == MAIN_PHASE else f" (phase {self.phase})"
        return f"scheduling.{self.kind.value}.{field}{phase}"


def groups_of(
    phases: Mapping[str, ExperimentScheduling], cluster: ClusterSpec, problems: list[ConfigError]
) -> list[PlacedGroup]:
    """Lists all groups, phase by phase, in start order; appends what is wrong to ``problems``."""
    found = []
    for phase, scheduling in phases.items():
        for kind, tasks in scheduling.groups().items():
            task = _with_defaults(kind, tasks.scheduling, cluster)
            group = PlacedGroup(
                phase=phase, kind=kind, count=tasks.count, task=task, partition=None
            )
            try:
                name, partition = partition_of(task.partition, cluster, group.where("partition"))
            except ConfigError as error:
                problems.append(error)
            else:
                gpu_type = (task.gpu_type or partition.gpu_type) if task.gpu else None
                task = replace(task, partition=name, gpu_type=gpu_type)
                group = replace(group, task=task, partition=partition)
                problems += _gpu_type_problem(group)
            found.append(group)
    return found


def partition_of(name: str | None, cluster: ClusterSpec, where: str) -> tuple[str, PartitionSpec]:
    """Resolves the partition's name and nodes; for ``a,b``, the resources common to both.

    Raises ConfigError.
    """
    known = cluster.partitions
    if not known or (name is None and len(known) > 1):
        described = f"{len(known)} partitions" if known else "no partition"
        requested = f"{name!r} was requested" if name else "none was requested"
        raise ConfigError(
            f"cluster spec {cluster.name!r} describes {described}, {requested}: the size of its nodes "
            "is unknown",
            where="partitions in the cluster spec" if name or not known else where,
            fix=f"name one with --partition: {', '.join(sorted(known))}"
            if known
            else "add `partitions:` (realsys clusters init writes it)",
        )
    names = [n.strip() for n in name.split(",")] if name else list(known)
    for one in names:
        if one not in known:
            raise UnknownName(
                f"cluster spec {cluster.name!r} describes no partition {one!r}",
                where=where,
                fix=did_you_mean(one, known),
            )
    specs = [known[one] for one in names]
    return ",".join(names), specs[0] if len(specs) == 1 else _common_resources(specs)


def components_of(
    groups: Sequence[PlacedGroup], layout: JobLayout | None
) -> list[list[PlacedGroup]]:
    """Partitions the groups into those that share nodes, the master's component first.

    Args:
        layout: the job layout; None for auto.
    """
    found: list[list[PlacedGroup]] = []
    for group in groups:
        for component in found:
            together = component[0].kind is group.kind
            if layout is not JobLayout.SPLIT:
                together = not any(True for _ in differences(component, group))
            if layout is JobLayout.SINGLE or together:
                component.append(group)
                break
        else:
            found.append([group])
    masters = [g for g in groups if g.kind is WorkerType.MASTER_WORKER]
    if masters:
        found.sort(key=lambda component: masters[-1] not in component)
    return found


def differences(
    component: Sequence[PlacedGroup], group: PlacedGroup
) -> Iterator[tuple[PlacedGroup, str]]:
    """Yields (group of the component, field) for each field on which ``group`` needs other nodes."""
    for name in _NODE_FIELDS:
        for other in component:
            ours, theirs = getattr(group.task, name), getattr(other.task, name)
            no_gpus = name == "gpu_type" and not (group.task.gpu and other.task.gpu)
            if ours != theirs and not no_gpus:
                yield other, name
                break


def disagreements(component: Sequence[PlacedGroup], layout: JobLayout) -> Iterator[ConfigError]:
    """Yields the conflicts between groups that must share nodes."""
    for at, group in enumerate(component):
        if found := list(differences(component[:at], group)):
            conflicts = [
                f"{name} is {_shown(getattr(other.task, name))} for {_called(other)} and "
                f"{_shown(getattr(group.task, name))} for {_called(group)}"
                for other, name in found
            ]
            yield ConfigError(
                f"layout {layout.value} needs equal nodes, but {'; '.join(conflicts)}",
                where=", ".join(group.where(name) for _, name in found),
                fix="use layout het, or make them equal",
            )
            return  # later groups would repeat the same conflict


def too_many_components(components: Sequence[Sequence[PlacedGroup]]) -> Iterator[ConfigError]:
    """Checks that a heterogeneous job has at most 128 components."""
    if len(components) > MAX_COMPONENTS:
        yield ConfigError(
            f"the groups need {len(components)} kinds of nodes, a heterogeneous job has at most "
            f"{MAX_COMPONENTS} components",
            where="scheduling",
            fix="give groups equal partition, constraint, nodelist and similar options",
        )


def normal_nodelist(text: str | None) -> str | None:
    """Normalises a node list to Slurm's form; a malformed one is returned unchanged (the checks report
    it).
    """
    if text is None:
        return None
    try:
        return compress(expand(text))
    except ConfigError:
        return text


def _with_defaults(kind: WorkerType, task: Scheduling, cluster: ClusterSpec) -> Scheduling:
    site = {name: getattr(task, name) or getattr(cluster.slurm, name) for name in SITE_DEFAULTS}
    image = cluster.gpu_image if task.gpu else cluster.cpu_image
    if kind is WorkerType.GENERATION_SERVER:
        image = cluster.gpu_infer_image
    extra = {option_name(k): str(v) for k, v in {**cluster.slurm.extra_sbatch}.items()}
    extra |= {option_name(k): str(v) for k, v in task.extra.items()}
    return replace(
        task,
        **site,
        container_image=task.container_image or image,
        nodelist=normal_nodelist(task.nodelist),
        exclude=normal_nodelist(task.exclude),
        extra=extra,
    )


def _common_resources(specs: Sequence[PartitionSpec]) -> PartitionSpec:
    """Computes what a node has for certain if it may come from any of the partitions."""
    types = {s.gpu_type for s in specs}
    names = [expand(s.nodelist) for s in specs if s.nodelist]
    threads = [s.threads_per_core for s in specs if s.threads_per_core]
    return PartitionSpec(
        nodes=min((s.nodes for s in specs if s.nodes), default=None),
        cpus=min(s.cpus for s in specs),
        # Whole cores of nodes with more threads are also whole cores of the others.
        threads_per_core=max(threads) if len(threads) == len(specs) else None,
        memory_mib=min(s.memory_mib for s in specs),
        gpus=min(s.gpus for s in specs),
        gpu_type=types.pop() if len(types) == 1 else None,
        nodelist=compress(n for ns in names for n in ns) if len(names) == len(specs) else None,
        features=tuple(dict.fromkeys(f for s in specs for f in s.features)),
        max_time=specs[0].max_time if len({s.max_time for s in specs}) == 1 else None,
        max_nodes=min((s.max_nodes for s in specs if s.max_nodes), default=None),
    )


def _gpu_type_problem(group: PlacedGroup) -> Iterator[ConfigError]:
    has = group.partition.gpu_type if group.partition else None
    if has is not None and group.task.gpu_type not in (None, has):
        yield ConfigError(
            f"{group.kind.value} requests GPUs of type {group.task.gpu_type!r}, partition "
            f"{group.task.partition!r} has {has!r}",
            where=group.where("gpu_type"),
            fix=f"request {has}, or choose another partition",
        )


def _called(group: PlacedGroup) -> str:
    return group.kind.value + ("" if group.phase == MAIN_PHASE else f" of phase {group.phase}")


def _shown(value: object) -> str:
    return "not set" if value in (None, {}) else repr(value)
