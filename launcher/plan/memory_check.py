"""Checks that a plan's models fit their GPUs and hosts, by estimates (pure).

A model too large for its GPU is refused: such a run would end in "CUDA out of memory" minutes after it
left the queue. If the size of a GPU is unknown nothing is compared. Exceeding a task's host memory is a
warning. Formulas: realsys/planner/memory/copy_memory.py and host_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.plan.box_memory import box_warnings
from realsys.api.cluster import ClusterSpec, PartitionSpec
from realsys.api.errors import ConfigError, ConfigErrors
from realsys.api.plan import LaunchPlan, PhasePlan
from realsys.api.scheduling import Scheduling, WorkerType
from realsys.planner.allocation import workers_text
from realsys.planner.gpu_models import device_of
from realsys.planner.memory.copy_memory import Terms
from realsys.planner.memory.episode_length import EpisodeLength
from realsys.planner.memory.host_memory import (
    host_memory_of_experiment,
    host_mib,
    memory_on_cpus,
)
from realsys.planner.memory.memory_messages import GiB, MiB, advice, largest, size
from realsys.planner.memory.memory_of_workers import (
    WorkerMemory,
    episode_length,
    held_models,
    memory_of_experiment,
    memory_unknown,
    model_shapes,
)
from realsys.planner.memory.server_memory import ServerMemory, memory_of_evaluator, memory_of_server

RESERVE = 0.04  # share of a GPU that the allocator can't use
# Assumed, not measured: a process's CUDA context with its kernels, and one NCCL communicator's buffers
# (4 MiB per channel and direction by NCCL's defaults, some tens of channels).
CUDA_CONTEXT_BYTES = 512 * MiB
COMMUNICATOR_BYTES = 300 * MiB


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """Model workers with equal needs, and the bytes that each has; None: unknown."""

    workers: tuple[int, ...]
    memory: WorkerMemory
    limit: float | None
    host: Terms = field(default_factory=dict)  # host memory, where the models are too without a GPU
    host_limit: float = 0.0


def memory_of_plan(plan: LaunchPlan) -> dict[str, list[WorkerGroup]]:
    """Estimates memory by phase: groups of model workers, in the order of their first workers."""
    found: dict[str, list[WorkerGroup]] = {}
    for phase, made in _with_prepared_shapes(plan):
        scheduling = scheduling_of(phase)
        limit = gpu_bytes(plan.cluster, scheduling)
        groups: dict[str, list[int]] = {}
        memory = memory_of_experiment(phase.config, made)
        of_host = host_memory_of_experiment if scheduling.gpu else memory_on_cpus
        host = of_host(phase.config, made)
        for worker, needs in memory.items():
            groups.setdefault(repr((needs, host.get(worker))), []).append(worker)
        found[phase.name] = [
            WorkerGroup(
                workers=tuple(workers),
                memory=memory[workers[0]],
                limit=limit,
                host=host.get(workers[0], {}),
                host_limit=scheduling.mem * MiB,
            )
            for workers in groups.values()
        ]
    return found


def memory_gaps(plan: LaunchPlan) -> dict[str, str]:
    """Says by phase whose memory is not estimated, and why; phases without such a model are left out."""
    found: dict[str, str] = {}
    for phase, made in _with_prepared_shapes(plan):
        roles: dict[str, list[str]] = {}
        for role, why in memory_unknown(phase.config, made).items():
            roles.setdefault(why, []).append(role)
        if roles:
            whose = "; ".join(f"{', '.join(names)}: {why}" for why, names in roles.items())
            found[phase.name] = f"memory not estimated, so whether it fits was not checked: {whose}"
    return found


def _with_prepared_shapes(plan: LaunchPlan) -> Iterator[tuple[PhasePlan, Any]]:
    """Yields each phase with the shape of the model that an earlier phase produces."""
    made = None
    for phase in plan.phases:
        yield phase, made
        if phase.publish is not None:
            made = next(iter(model_shapes(phase.config, made).values()), None)


@dataclass(frozen=True, kw_only=True)
class ServerGroup:
    """Generation servers or evaluators with GPUs, and the bytes that each has; None: unknown."""

    kind: WorkerType
    count: int
    memory: ServerMemory
    limit: float | None
    host_limit: float

    @property
    def usable(self) -> float | None:
        """Usable bytes of a GPU; an engine of ours has no communicators."""
        return None if self.limit is None else usable_bytes(self.limit, workers=1, copies=0)


def servers_of_plan(plan: LaunchPlan) -> dict[str, list[ServerGroup]]:
    """Lists servers and evaluators with GPUs by phase, as far as their models' sizes are known."""
    found: dict[str, list[ServerGroup]] = {}
    for phase, made in _with_prepared_shapes(plan):
        here = found.setdefault(phase.name, [])
        for kind in (WorkerType.GENERATION_SERVER, WorkerType.EVALUATOR):
            group = phase.scheduling.groups().get(kind)
            if group is None or not group.scheduling.gpu:
                continue
            limit = gpu_bytes(plan.cluster, group.scheduling)
            usable = None if limit is None else usable_bytes(limit, workers=1, copies=0)
            if kind is WorkerType.EVALUATOR:
                memory = memory_of_evaluator(phase.config, made)
            else:
                memory = memory_of_server(phase.config, usable, made)
            if memory is not None:
                here.append(
                    ServerGroup(
                        kind=kind,
                        count=group.count,
                        memory=memory,
                        limit=limit,
                        host_limit=group.scheduling.mem * MiB,
                    )
                )
    return found


def server_problems(servers: Mapping[str, list[ServerGroup]]) -> Iterator[ConfigError]:
    """Yields servers and evaluators whose model does not fit."""
    for phase, groups in servers.items():
        for group in groups:
            memory, usable = group.memory, group.usable
            if usable is None or memory.bytes <= usable:
                continue
            terms = sorted(memory.terms.items(), key=lambda part: -part[1])
            if group.kind is WorkerType.EVALUATOR:
                fix = "leave auto_eval out, or evaluate on larger GPUs"
            elif memory.cache_token:
                fix = (
                    "use schedule.server_backend=sglang or vllm with more "
                    "scheduling.generation_server.gpu, which split the model over several GPUs, or larger "
                    "GPUs"
                )
            else:
                fix = "raise scheduling.generation_server.gpu: the model is split over the GPUs of a server"
            yield ConfigError(
                f"each {group.kind.value} ({memory.what}) needs {size(memory.bytes)} of GPU memory, "
                f"{size(usable)} of {size(group.limit or 0)} are usable: "
                + "; ".join(f"{what} {size(n)}" for what, n in terms),
                where=f"phase {phase}, {group.kind.value}",
                fix=fix,
            )


def gpu_bytes(cluster: ClusterSpec, scheduling: Scheduling) -> float | None:
    """Returns one task's GPU memory: a whole GPU, or its share; None without GPU or known size."""
    name = scheduling.partition or cluster.slurm.partition
    if not scheduling.gpu or name is None or name not in cluster.partitions:
        return None
    size = _gpu_size(cluster.partitions[name], scheduling.gpu_type)
    return None if size is None else size * min(1.0, scheduling.gpu)


def usable_bytes(limit: float, *, workers: int, copies: int) -> float:
    """Computes the bytes of a GPU usable for models and calls, without the process's own.

    Args:
        workers: number that communicate; a single one needs no communicators.
        copies: of models on a worker, each with a process group besides the global one.
    """
    groups = 1 + copies if workers > 1 else 0
    return limit * (1 - RESERVE) - CUDA_CONTEXT_BYTES - groups * COMMUNICATOR_BYTES


def _gpu_size(partition: PartitionSpec, gpu_type: str | None) -> float | None:
    if partition.gpu_memory_gib is not None:
        return partition.gpu_memory_gib * GiB
    try:
        return device_of(gpu_type or partition.gpu_type or "").memory_bytes or None
    except ConfigError:
        return None


def scheduling_of(phase: PhasePlan) -> Scheduling:
    """Returns the resources of a phase's model workers."""
    group = phase.scheduling.groups().get(WorkerType.MODEL_WORKER)
    return group.scheduling if group else Scheduling()


def usable_by_worker(group: WorkerGroup, groups: Iterable[WorkerGroup]) -> float | None:
    """Returns the GPU bytes usable by a worker of ``group``, one of a phase's ``groups``; None: unknown."""
    if group.limit is None:
        return None
    workers = sum(len(each.workers) for each in groups)
    return usable_bytes(group.limit, workers=workers, copies=len(group.memory.copies))


def excess_bytes(memory: Mapping[str, list[WorkerGroup]]) -> float:
    """Returns the bytes by which the fullest GPU is exceeded; 0 or less: all fits as far as is known."""
    found = [0.0]
    for groups in memory.values():
        for group in groups:
            if (usable := usable_by_worker(group, groups)) is not None:
                found.append(group.memory.bytes - usable)
    return max(found)


class ModelsTooLarge(ConfigErrors):
    """Models do not fit their GPUs; ``plan`` is the refused plan, for display."""

    def __init__(self, problems: Sequence[ConfigError], plan: LaunchPlan) -> None:
        super().__init__(problems)
        self.plan = plan

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems, self.plan)


def memory_problems(
    memory: Mapping[str, list[WorkerGroup]], way_out: str = ""
) -> Iterator[ConfigError]:
    """Yields workers whose models do not fit.

    Args:
        way_out: the fix; if empty, advice on the largest terms.
    """
    for phase, groups in memory.items():
        for group in groups:
            usable = usable_by_worker(group, groups)
            if usable is not None and group.memory.bytes > usable:
                terms = largest(group.memory, group.memory.peak_call)
                yield ConfigError(
                    f"model workers {workers_text(group.workers)} need {size(group.memory.bytes)} "
                    f"of GPU memory each, {size(max(0.0, usable))} of {size(group.limit or 0)} are "
                    "usable: " + "; ".join(f"{name} {size(n)}" for name, n in terms),
                    where=f"phase {phase}, layouts of its roles",
                    fix=way_out or advice(terms[:2]),
                )


def _episode_warnings(plan: LaunchPlan) -> Iterator[str]:
    """Warns of roles on GPUs that compute a whole batch of an agent's episodes at once."""
    for phase, made in _with_prepared_shapes(plan):
        shapes = model_shapes(phase.config, made)
        episode = episode_length(phase.config, shapes)
        if episode is None or not scheduling_of(phase).gpu:
            continue
        if not episode.is_bounded:
            yield from _context_warnings(plan, phase, made, episode)
        held = held_models(phase.config, shapes)
        if unbounded := [role for role, model in held.items() if model.max_tokens_per_mb is None]:
            agent = phase.config.rollout_worker[0].agent
            settings = " ".join(f"{role}.max_tokens_per_mb={episode.tokens}" for role in unbounded)
            yield (
                f"phase {phase.name}: an episode of agent {agent!r} may have {episode.tokens:,} tokens, "
                f"and {', '.join(unbounded)} would compute all episodes of a step at once; {settings} "
                "computes one at a time, or several short ones"
            )


def _context_warnings(
    plan: LaunchPlan, phase: PhasePlan, made: Any, episode: EpisodeLength
) -> Iterator[str]:
    """Warns if episodes that fill the model's context would not fit; no setting says how long they get."""
    scheduling = scheduling_of(phase)
    limit = gpu_bytes(plan.cluster, scheduling)
    memory = memory_of_experiment(phase.config, made, whole_context=True)
    needs = [
        WorkerGroup(workers=(worker,), memory=one, limit=limit) for worker, one in memory.items()
    ]
    fullest = max(needs, key=lambda group: group.memory.bytes, default=None)
    if fullest is None or (usable := usable_by_worker(fullest, needs)) is None:
        return
    if fullest.memory.bytes > usable:
        agent = phase.config.rollout_worker[0].agent
        declare = f"{episode.setting}=N" if episode.setting else "a limit of the servers"
        yield (
            f"phase {phase.name}: no setting says how long an episode of agent {agent!r} gets; one of "
            f"{episode.tokens:,} tokens, all that the model has positions for, would need "
            f"{size(fullest.memory.bytes)} of GPU memory ({size(max(0.0, usable))} are usable); "
            f"{declare} declares that they are shorter"
        )


def memory_warnings(plan: LaunchPlan, memory: Mapping[str, list[WorkerGroup]]) -> Iterator[str]:
    """Warns of GPUs whose memory is not estimated, of workers that need more host memory than their
    tasks request, and of idle workers.
    """
    for name, gap in memory_gaps(plan).items():
        if scheduling_of(plan.phase(name)).gpu:
            yield f"phase {name}: {gap}"
    for name, servers in servers_of_plan(plan).items():
        for server in servers:
            host, has = server.memory.host, server.host_limit
            if sum(host.values()) > has:
                yield (
                    f"phase {name}: each {server.kind.value} needs about {size(sum(host.values()))} of its "
                    f"host's memory, but its task has {size(has)}: "
                    f"{', '.join(f'{what} {size(n)}' for what, n in host.items())}; raise "
                    f"scheduling.{server.kind.value}.mem to {host_mib(host)}, or leave it out"
                )
    yield from _episode_warnings(plan)
    yield from box_warnings(plan)
    for phase in plan.phases:
        for group in memory[phase.name]:
            if sum(group.host.values()) > group.host_limit:
                terms = sorted(group.host.items(), key=lambda part: -part[1])
                yield (
                    f"phase {phase.name}: model workers {workers_text(group.workers)} need about "
                    f"{size(sum(group.host.values()))} of their host's memory, but their tasks have "
                    f"{size(group.host_limit)}: {', '.join(f'{what} {size(n)}' for what, n in terms)}; "
                    f"raise scheduling.model_worker.mem to {host_mib(group.host)}, or leave it out"
                )
        idle = [i for i, worker in enumerate(phase.config.model_worker) if not worker.shards]
        if idle:
            yield f"phase {phase.name}: model workers {workers_text(idle)} hold no model"
