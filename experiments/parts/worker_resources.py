"""Default cores and host memory of workers (pure)."""

from __future__ import annotations

from collections.abc import Callable

from realsys.api.experiment import ExperimentConfig
from realsys.models.shape import ModelShape
from realsys.planner.memory.copy_memory import Terms
from realsys.planner.memory.host_memory import host_memory_of_experiment, host_mib

CPUS = 2
# Threads for compute, backward pass, NCCL, tensor server and control. Six per GPU on 8 GPUs leave room on a
# node of 64 cores for the master and servers; eight would not.
CPUS_WITH_GPU = 6
MEM_MIB = 8192  # far more than the built-in model needs
MEM_MIB_OF_OTHERS = 4096  # servers and evaluators


def cpus_of_worker(requested: int | None, *, gpu: float) -> int:
    """Returns the requested number of cores; by default by whether there is a GPU."""
    if requested is not None:
        return requested
    return CPUS_WITH_GPU if gpu else CPUS


def mem_of_worker(
    requested: int | None,
    *,
    gpu: float,
    config: Callable[[], ExperimentConfig],
    made_before: ModelShape | None = None,
) -> int:
    """Returns MiB: the requested, else, with a GPU, the largest host memory need of the workers.

    Args:
        made_before: sizes of a model that an earlier phase makes.
    """
    if requested is not None or not gpu:
        return MEM_MIB if requested is None else requested
    needs = host_memory_of_experiment(config(), made_before)
    return max([MEM_MIB, *map(host_mib, needs.values())])


def mem_of_task(requested: int | None, *, gpu: float, needs: Callable[[], Terms | None]) -> int:
    """Returns MiB of a server or evaluator: the requested, else, with a GPU, its host memory need."""
    if requested is not None or not gpu:
        return MEM_MIB_OF_OTHERS if requested is None else requested
    return max(MEM_MIB_OF_OTHERS, host_mib(needs() or {}))
