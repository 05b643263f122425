"""Whether the models of a plan fit their GPUs: an estimate against the site file's sizes (pure).

Too large is refused: such a run would end in "CUDA out of memory" minutes after it left the queue. Where
the size of a GPU is not known nothing is compared. Formulas: realsys/planner/memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from realsys.api.allocation import workers_text
from realsys.api.cluster import ClusterSpec, PartitionSpec
from realsys.api.errors import ConfigError
from realsys.api.plan import LaunchPlan, PhasePlan
from realsys.api.scheduling import Scheduling, WorkerType
from realsys.planner.devices import device_of
from realsys.planner.memory_of_workers import WorkerMemory, memory_of_experiment, model_shapes

GiB, MiB = 1 << 30, 1 << 20
PROCESS_MIB = 600  # a worker's libraries, without any model
RESERVE = 0.04  # of a GPU: what the allocator can't use
# Assumed, not measured: a process's CUDA context with its kernels, and one NCCL communicator's buffers
# (4 MiB a channel and direction by NCCL's defaults, some tens of channels).
CONTEXT = 512 * MiB
COMMUNICATOR = 300 * MiB


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """Model workers that need the same, and the bytes that each has; None: not known."""

    workers: tuple[int, ...]
    memory: WorkerMemory
    limit: float | None


def memory_of_plan(plan: LaunchPlan) -> dict[str, list[WorkerGroup]]:
    """Phase → its groups of model workers, in the order of their first workers."""
    found: dict[str, list[WorkerGroup]] = {}
    made = None
    for phase in plan.phases:
        limit = gpu_bytes(plan.cluster, scheduling_of(phase))
        groups: dict[str, list[int]] = {}
        memory = memory_of_experiment(phase.config, made)
        for worker, needs in memory.items():
            groups.setdefault(repr(needs), []).append(worker)
        found[phase.name] = [
            WorkerGroup(workers=tuple(workers), memory=memory[workers[0]], limit=limit)
            for workers in groups.values()
        ]
        if phase.publish is not None:
            made = next(iter(model_shapes(phase.config, made).values()), None)
    return found


def gpu_bytes(cluster: ClusterSpec, scheduling: Scheduling) -> float | None:
    """GPU memory of one task: the whole of one GPU, or its share; None without GPU or size."""
    name = scheduling.partition or cluster.slurm.partition
    if not scheduling.gpu or name is None or name not in cluster.partitions:
        return None
    size = _gpu_size(cluster.partitions[name], scheduling.gpu_type)
    return None if size is None else size * min(1.0, scheduling.gpu)


def usable_bytes(limit: float, *, workers: int, copies: int) -> float:
    """Of a GPU, for models and calls: less what the process takes by itself.

    Args:
        workers: that talk to one another; one alone needs no communicators.
        copies: of models on a worker, each with a group of its own beside everybody's.
    """
    groups = 1 + copies if workers > 1 else 0
    return limit * (1 - RESERVE) - CONTEXT - groups * COMMUNICATOR


def _gpu_size(partition: PartitionSpec, gpu_type: str | None) -> float | None:
    if partition.gpu_memory_gib is not None:
        return partition.gpu_memory_gib * GiB
    try:
        return device_of(gpu_type or partition.gpu_type or "").memory_bytes or None
    except ConfigError:
        return None


def scheduling_of(phase: PhasePlan) -> Scheduling:
    """Resources of a phase's model workers."""
    group = phase.scheduling.groups().get(WorkerType.MODEL_WORKER)
    return group.scheduling if group else Scheduling()


def memory_problems(memory: Mapping[str, list[WorkerGroup]]) -> Iterator[ConfigError]:
    """Workers whose models do not fit."""
    for phase, groups in memory.items():
        workers = sum(len(group.workers) for group in groups)
        for group in groups:
            if group.limit is None:
                continue
            copies = len(group.memory.copies)
            usable = usable_bytes(group.limit, workers=workers, copies=copies)
            if group.memory.bytes > usable:
                yield ConfigError(
                    f"model workers {workers_text(group.workers)} need {size(group.memory.bytes)} "
                    f"of GPU memory each, {size(usable)} of {size(group.limit)} can be used: "
                    + "; ".join(f"{name} {size(n)}" for name, n in _largest(group.memory)),
                    where=f"phase {phase}, layouts of its roles",
                    fix=_fix(group.memory),
                )


def memory_warnings(plan: LaunchPlan, memory: Mapping[str, list[WorkerGroup]]) -> Iterator[str]:
    """CPU workers that need more than their tasks ask for, and workers that hold nothing."""
    for phase in plan.phases:
        scheduling = scheduling_of(phase)
        for group in memory[phase.name]:
            needs = PROCESS_MIB + group.memory.bytes / MiB
            if not scheduling.gpu and needs > scheduling.mem:
                yield (
                    f"phase {phase.name}: model workers {workers_text(group.workers)} need about "
                    f"{needs:,.0f} MiB, their tasks have {scheduling.mem}; raise "
                    f"mem_per_model_worker or lower max_tokens_per_mb"
                )
        idle = [i for i, worker in enumerate(phase.config.model_worker) if not worker.shards]
        if idle:
            yield f"phase {phase.name}: model workers {workers_text(idle)} hold no model"


def _largest(memory: WorkerMemory) -> list[tuple[str, float]]:
    """What the bytes are made of, largest first."""
    parts = {
        f"{what} of {name}": n for name, terms in memory.copies.items() for what, n in terms.items()
    }
    call = memory.peak_call
    parts |= {f"{what} in {call}": n for what, n in memory.calls.get(call, {}).items()}
    return sorted(parts.items(), key=lambda part: -part[1])


def _fix(memory: WorkerMemory) -> str:
    """What would help with the two largest parts."""
    advice = {
        "activations": "lower max_tokens_per_mb, or recompute=true (backend megatron)",
        "logits": "lower max_tokens_per_mb",
        "cache": "lower max_cache_tokens, or max_tokens_per_mb where that is not set",
        "reading prompts": "shorter prompts (dataset.max_prompt_len)",
        "weights": "cut the model over more GPUs, or offload=true on roles that can wait",
        "whole copy": "generate on a copy of its own, in the layout d<n>t1p1 of an allocation",
        "gradients": "cut the model over more GPUs, or train adapters (lora.rank)",
        "whole gradients": "raise max_tokens_per_mb until a minibatch is one piece, or train adapters",
        "optimizer": "cut the model over more GPUs, or cpu_offload=true (backend fsdp)",
    }
    words = [name.partition(" of ")[0].partition(" in ")[0] for name, _ in _largest(memory)[:2]]
    found = dict.fromkeys(advice[word] for word in words if word in advice)
    return "; ".join(found) or "cut the models over more GPUs"


def size(num_bytes: float) -> str:
    """``3.1 GiB``, ``12 MiB``."""
    if num_bytes >= GiB / 10:
        return f"{num_bytes / GiB:.1f} GiB"
    return f"{num_bytes / MiB:.1f} MiB" if num_bytes < 10 * MiB else f"{num_bytes / MiB:.0f} MiB"
