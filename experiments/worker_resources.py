"""Cores and host memory of a model worker where the user leaves them out (pure)."""

from __future__ import annotations

from collections.abc import Callable

from realsys.api.experiment import ExperimentConfig
from realsys.models.shape import ModelShape
from realsys.planner.host_memory import host_memory_of_experiment, host_mib

CPUS, CPUS_WITH_GPU = (
    2,
    8,
)  # with a GPU: compute, backward pass, NCCL, tensor server, control thread
MEM_MIB = (
    8192  # the built-in model needs far less, and a worker without GPU is given what its user says
)


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
