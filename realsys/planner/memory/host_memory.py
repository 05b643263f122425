"""Bytes of host memory that a model worker with a GPU needs, term by term (pure).

Its models compute on the GPU; host memory holds copies: of checkpoints while they are written, of versions
that generation servers fetch, of offloaded models. Cached file pages are not counted: the kernel reclaims
them. On a worker without GPU the whole model is in host memory (memory_of_workers.py).

``PROCESS_BYTES`` is an assumption, since no worker has been measured on a GPU: torch with CUDA, cuDNN
and cuBLAS took 2 GiB of host memory where people measured it (pytorch issues 12873, 19397, 113326); one
more for NCCL and for what a step keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from realsys.api.experiment import ExperimentConfig
from realsys.api.model import ProcessTopology
from realsys.api.worker_configs import RolloutControl
from realsys.models.shape import DTYPE_BYTES, ModelShape
from realsys.planner.memory.copy_memory import HeldModel, Terms, permanent_terms
from realsys.planner.memory.memory_of_workers import (
    copies_of,
    held_models,
    memory_of_experiment,
    model_shapes,
)
from realsys.planner.placed import allocation_of

GiB = 1 << 30
PROCESS_BYTES = 3 * GiB
CPU_PROCESS_BYTES = 600 * 2**20  # a worker's libraries, without any model
VERSIONS = 2  # that a trainer keeps for servers to fetch (sync/publisher.py)
_NOT_SAVED = ("gradients", "whole copy")  # of what stays: neither saved nor parked


def host_memory_of_experiment(
    config: ExperimentConfig, made_before: ModelShape | None = None
) -> dict[int, Terms]:
    """Computes each model worker's bytes of host memory, as far as its models' sizes are known.

    Args:
        made_before: sizes of the model that an earlier phase makes.
    """
    models = held_models(config, model_shapes(config, made_before))
    found: dict[int, dict[str, float]] = {
        index: {"process": float(PROCESS_BYTES)} for index in range(len(config.model_worker))
    }
    rollout = config.rollout or RolloutControl(trains=False)
    streams = rollout.trains and rollout.weights_through == "stream"
    streamed = rollout.model_name if streams else None
    copies = copies_of(config.model_rpcs, allocation_of(config), models)
    for name, (place, model, _) in copies.items():
        stages = [of_copy(model, place.topology, p) for p in range(place.topology.pipeline)]
        for rank, worker in enumerate(place.workers):
            mine = dict(stages[place.topology.coordinate(rank)[0]])
            if name == streamed:
                wire = DTYPE_BYTES[rollout.wire_dtype or model.dtype]
                part = model.shape.num_params * wire / place.topology.world_size
                mine["published"] = VERSIONS * part
            terms = found[worker]
            for what, size in mine.items():
                larger = max(size, terms.get(what, 0.0))  # one weight is read at a time
                terms[what] = larger if what == "loading" else terms.get(what, 0.0) + size
    return {worker: {w: n for w, n in terms.items() if n} for worker, terms in found.items()}


def memory_on_cpus(
    config: ExperimentConfig, made_before: ModelShape | None = None
) -> dict[int, Terms]:
    """Computes the memory of each model worker without GPU: its libraries, copies, most demanding call."""
    found = memory_of_experiment(config, made_before).items()
    return {w: {"process": CPU_PROCESS_BYTES, "models": m.bytes} for w, m in found}


def of_copy(model: HeldModel, topo: ProcessTopology, stage: int) -> dict[str, float]:
    """Computes the terms of one process of a copy.

    ``loading``: its largest weight, as it is read and as it is held. ``checkpoint``: copies of all that
    it writes. ``parked``: what ``offload`` takes from the GPU. ``offloaded``: what ``cpu_offload`` keeps
    from it.
    """
    here = replace(model, cpu_offload=False)  # what would stay on the GPU
    stays: Mapping[str, float] = permanent_terms(here, topo, stage, generates=False)
    largest = max(weight.numel for weight in model.shape.weights())
    saved = {what: n for what, n in stays.items() if what not in _NOT_SAVED}
    return {
        "loading": 2.0 * largest * model.learning_bytes,
        "checkpoint": sum(saved.values()) if model.trained or model.averaged else 0.0,
        "parked": sum(saved.values()) if model.offload else 0.0,
        "offloaded": sum(stays.values()) if model.cpu_offload else 0.0,
    }


def host_mib(terms: Terms) -> int:
    """Converts ``terms`` to MiB for a task, with a tenth more and rounded up to GiB."""
    return 1024 * -(-int(1.1 * sum(terms.values())) // GiB)
