"""Sizes one job component: its tasks on its nodes, phase by phase, and the request per node (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.job.groups import PlacedGroup
from launcher.job.task_placement import Misfit, NodeShape, Packing, TaskDemand, place
from realsys.api.cluster import ClusterSpec, PartitionSpec
from realsys.api.errors import ConfigError
from realsys.api.plan import StepPlan
from realsys.slurm.gpus import gpus_for, tasks_per_gpu

StepKey = tuple[str, str]  # phase, worker type
SUPERVISOR_MIB = 512  # of the batch step: the supervisor, its sruns, the final report


@dataclass(frozen=True, kw_only=True)
class NodeLimit:
    """The number of nodes available to a component and where that is set. None: unknown or unlimited."""

    nodes: int | None = None
    where: str = ""
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class ComponentNodes:
    """Nodes of a component, what each of them is asked for, and the steps on them.

    Attributes:
        least_nodes: what a better placement could come down to, as far as is known.
    """

    nodes: int
    least_nodes: int
    cpus: int
    memory_mib: int
    gpus: int
    node: NodeShape
    steps: Mapping[StepKey, StepPlan]

    @property
    def spare(self) -> tuple[int, int, int]:
        """A node's resources beyond the request: CPUs, MiB, GPUs."""
        return (
            self.node.cpus - self.cpus,
            self.node.memory_mib - self.memory_mib,
            self.node.gpus - self.gpus,
        )


def component_nodes(
    index: int,
    groups: Sequence[PlacedGroup],
    partition: PartitionSpec,
    limit: NodeLimit,
    cluster: ClusterSpec,
    problems: list[ConfigError],
) -> ComponentNodes | None:
    """Places all phases of a component on its nodes; None if one does not fit."""
    node = node_shape(partition, groups[0].task.extra)
    before, steps = len(problems), dict[StepKey, StepPlan]()
    nodes = least = cpus = memory = gpus = 0
    for phase in dict.fromkeys(g.phase for g in groups):
        now = [g for g in groups if g.phase == phase]
        packing = place([_demand(g, node) for g in now], node, max_nodes=limit.nodes)
        if isinstance(packing, Misfit):
            problems.append(_misfit(now, packing, limit, node))
            continue
        binding = _bindings(now, packing, node, cluster, problems)
        for group in now:
            steps[phase, group.kind] = _step(index, group, packing, binding[group.kind], node)
        nodes, least = max(nodes, packing.num_nodes), max(least, packing.least_nodes)
        for _, tasks in packing.patterns:
            used = list(zip(now, tasks, strict=True))
            cpus = max(cpus, sum(t * node.whole(g.task.cpu) for g, t in used))
            memory = max(memory, sum(t * g.task.mem for g, t in used))
            gpus = max(gpus, _gpus_asked(now, tasks, packing, binding))
    if len(problems) > before:
        return None
    if (
        index == 0
    ):  # the supervisor runs beside the tasks of the first node, within the job's memory
        memory = min(node.memory_mib, memory + SUPERVISOR_MIB)
    if cluster.slurm.exclusive:
        cpus, memory, gpus = node.cpus, node.memory_mib, node.gpus
    return ComponentNodes(
        nodes=nodes,
        least_nodes=least,
        cpus=cpus,
        memory_mib=memory,
        gpus=gpus,
        node=node,
        steps=steps,
    )


def node_shape(partition: PartitionSpec, extra: Mapping[str, str]) -> NodeShape:
    """Describes a node as Slurm counts it for a job with these options.

    Slurm allocates whole cores to a job and to each of its steps, so steps of one thread each would wait
    for cores that the job does not have. With one thread per core, all counts are of cores.
    """
    threads = partition.threads_per_core or 1
    cores = partition.cpus // threads
    single = uses_one_thread(extra)
    return NodeShape(
        cpus=cores if single else cores * threads,
        memory_mib=partition.memory_mib,
        gpus=partition.gpus,
        core=1 if single else threads,
    )


def uses_one_thread(extra: Mapping[str, str]) -> bool:
    """Whether a job requests only one thread of each core; its steps inherit that (22.05)."""
    return extra.get("hint") == "nomultithread" or extra.get("threads-per-core") == "1"


def threads_are_known(group: PlacedGroup) -> bool:
    """Whether the CPUs of steps can be counted as Slurm will count them."""
    known = group.partition is None or group.partition.threads_per_core is not None
    return known or uses_one_thread(group.task.extra)


def _demand(group: PlacedGroup, node: NodeShape) -> TaskDemand:
    task = group.task
    return TaskDemand(
        name=group.kind.value,
        count=group.count,
        cpus=node.whole(task.cpu),
        memory_mib=task.mem,
        gpus=task.gpu,
    )


def _step(
    index: int, group: PlacedGroup, packing: Packing, binding: str, node: NodeShape
) -> StepPlan:
    task, runs = group.task, packing.runs(group.kind.value)
    return StepPlan(
        worker_type=group.kind,
        component=index,
        nodes=runs if runs[-1][1] else runs[:-1],
        cpus_per_task=node.whole(task.cpu),
        shares_cpus=not task.gpu and not threads_are_known(group),
        memory_mib=task.mem,
        gpus_per_task=task.gpu,
        gpus_per_node=_gpus_per_node(group, packing),
        # The job names the type. With --gpus-per-task=TYPE:1, Slurm 22.05 assigns no GPU at all on nodes
        # with two or more tasks of the step; without the type it assigns them correctly.
        gpu_type=None if binding == "per_task" else task.gpu_type,
        gpu_binding=binding,
        container_image=task.container_image,
        env_vars=dict(task.env_vars),
    )


def _gpus_per_node(group: PlacedGroup, packing: Packing) -> int:
    """GPUs that `--gres` gives the step on every node: as many as its fullest node uses."""
    return gpus_for(max(tasks for _, tasks in packing.runs(group.kind.value)), group.task.gpu)


def _gpus_asked(
    groups: Sequence[PlacedGroup],
    tasks: Sequence[int],
    packing: Packing,
    binding: Mapping[str, str],
) -> int:
    """Counts the GPUs that the steps take on a node with the given tasks of each group."""
    return sum(
        _gpus_per_node(g, packing) if binding[g.kind] == "visible" else gpus_for(t, g.task.gpu)
        for g, t in zip(groups, tasks, strict=True)
        if t
    )


def _bindings(
    groups: Sequence[PlacedGroup],
    packing: Packing,
    node: NodeShape,
    cluster: ClusterSpec,
    problems: list[ConfigError],
) -> dict[str, str]:
    """Chooses how each group's tasks are bound to GPUs.

    With ``visible``, a step has as many GPUs on each of its nodes as on its fullest one. If the steps of
    a node would then need more than it has, whole GPUs are bound per task, which is exact. Shared GPUs
    can't be bound: then every node of the group must be as full as its fullest.
    """
    wanted = cluster.slurm.gpu_binding
    for whole in dict.fromkeys((wanted, "per_task")):
        found = {
            g.kind.value: "none" if not g.task.gpu else "visible" if g.task.gpu < 1 else whole
            for g in groups
        }
        if all(_gpus_asked(groups, t, packing, found) <= node.gpus for _, t in packing.patterns):
            return found
    problems += [
        _uneven(g, packing, node) for g in groups if 0 < g.task.gpu < 1 and _is_uneven(g, packing)
    ]
    return found


def _is_uneven(group: PlacedGroup, packing: Packing) -> bool:
    """Whether some node of the group uses fewer GPUs than its fullest one."""
    used = {gpus_for(t, group.task.gpu) for _, t in packing.runs(group.kind.value) if t}
    return len(used) > 1


def _uneven(group: PlacedGroup, packing: Packing, node: NodeShape) -> ConfigError:
    name, count, gpus = group.kind.value, group.count, _gpus_per_node(group, packing)
    full = gpus * tasks_per_gpu(group.task.gpu)
    multiples = sorted({count // full * full, -(-count // full) * full} - {0})
    return ConfigError(
        f"a step gets the same number of GPUs on each of its nodes: {gpus} for {name}, as on its fullest "
        f"one; with the other groups that exceeds the {node.gpus} of a node",
        where=group.where("count"),
        fix=f"make the count a multiple of {full}, which fills a node "
        f"({' or '.join(map(str, multiples))}), or give each task a whole GPU",
    )


def _misfit(
    groups: Sequence[PlacedGroup], misfit: Misfit, limit: NodeLimit, node: NodeShape
) -> ConfigError:
    about = f" ({limit.words})" if misfit.needed is not None else ""
    if node.core > 1:
        about += f"; each task gets whole cores, of {node.core} CPUs each"
    own = groups[0].where("") if len(groups) == 1 else f"scheduling, phase {groups[0].phase}"
    where = own.replace(". ", " ").rstrip(".")
    if misfit.needed is not None:
        where += f", and {limit.where}"
    return ConfigError(misfit.why + about, where=where, fix=misfit.fix)
