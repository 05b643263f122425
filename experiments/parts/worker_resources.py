"""Default cores and host memory of workers (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from realsys.api.experiment import ExperimentConfig
from realsys.api.scheduling import GroupOptions, Scheduling, WorkerType
from realsys.models.shape import ModelShape
from realsys.planner.memory.copy_memory import Terms
from realsys.planner.memory.host_memory import host_memory_of_experiment, host_mib
from realsys.planner.memory.server_memory import memory_of_evaluator, memory_of_server

# Cores, host memory in MiB: far more than the built-in model needs.
DEFAULTS = {
    WorkerType.MODEL_WORKER: Scheduling(cpu=2, mem=8192),
    WorkerType.MASTER_WORKER: Scheduling(cpu=1, mem=2048),
    WorkerType.GENERATION_SERVER: Scheduling(cpu=1, mem=4096),
    WorkerType.GSERVER_MANAGER: Scheduling(cpu=1, mem=1024),
    WorkerType.ROLLOUT_WORKER: Scheduling(cpu=1, mem=2048),
    WorkerType.EVALUATOR: Scheduling(cpu=1, mem=4096),
}
# Threads for compute, backward pass, NCCL, tensor server and control. Six per GPU on 8 GPUs leave room on a
# node of 64 cores for the master and servers; eight would not.
CPUS_WITH_GPU = 6


def cores_and_gpus(kind: WorkerType, wanted: GroupOptions) -> Scheduling:
    """Returns the resources of a worker, its memory without that for models on GPUs."""
    default = DEFAULTS[kind]
    if kind is WorkerType.MODEL_WORKER and wanted.gpu:
        default = replace(default, cpu=CPUS_WITH_GPU)
    return GroupOptions(cpu=wanted.cpu, gpu=wanted.gpu, mem=wanted.mem).on(default)


def host_needs(
    kind: WorkerType, config: ExperimentConfig, made_before: ModelShape | None
) -> Iterable[Terms]:
    """Yields what workers with GPUs need of their hosts' memory, as far as their models are known.

    Args:
        made_before: sizes of a model that an earlier phase makes.
    """
    if kind is WorkerType.MODEL_WORKER:
        yield from host_memory_of_experiment(config, made_before).values()
    elif kind in (WorkerType.GENERATION_SERVER, WorkerType.EVALUATOR):
        of = memory_of_evaluator if kind is WorkerType.EVALUATOR else memory_of_server
        if (found := of(config, made_before=made_before)) is not None:
            yield found.host


def largest_mib(needs: Iterable[Terms]) -> int:
    """Returns the MiB of the largest of these needs; 0: none is known."""
    return max(map(host_mib, needs), default=0)
