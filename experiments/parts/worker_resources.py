"""Cores and host memory of workers where the user leaves them out (pure)."""

from __future__ import annotations

from collections.abc import Callable

from realsys.api.experiment import ExperimentConfig
from realsys.models.shape import ModelShape
from realsys.planner.memory.copy_memory import Terms
from realsys.planner.memory.host_memory import host_memory_of_experiment, host_mib

CPUS = 2
# Compute, backward pass, NCCL, tensor server, control thread. Six of them on each of 8 GPUs leave a node of
# 64 cores room for the master and for servers; eight would not.
CPUS_WITH_GPU = 6
MEM_MIB = 8192  # far more than the built-in model needs
MEM_MIB_OF_OTHERS = 4096  # servers and evaluators


def cpus_of_worker(asked: int | None, *, gpu: float) -> int:
    """What was asked for; else by whether there is a GPU."""
    if asked is not None:
        return asked
    return CPUS_WITH_GPU if gpu else CPUS


def mem_of_worker(
    asked: int | None,
    *,
    gpu: float,
    config: Callable[[], ExperimentConfig],
    made_before: ModelShape | None = None,
) -> int:
    """MiB: what was asked for; else, with a GPU, what the largest of the workers needs beside it.

    Args:
        made_before: sizes of a model that is made first.
    """
    if asked is not None or not gpu:
        return MEM_MIB if asked is None else asked
    needs = host_memory_of_experiment(config(), made_before)
    return max([MEM_MIB, *map(host_mib, needs.values())])


def mem_of_task(asked: int | None, *, gpu: float, needs: Callable[[], Terms | None]) -> int:
    """MiB of a server or evaluator: what was asked for; else, with a GPU, what it ``needs`` beside it."""
    if asked is not None or not gpu:
        return MEM_MIB_OF_OTHERS if asked is None else asked
    return max(MEM_MIB_OF_OTHERS, host_mib(needs() or {}))
