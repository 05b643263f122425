"""Bytes per worker for many plans, fast: the results of memory_of_workers.py, cached by role (pure).

Roles on one worker are independent: permanent bytes add up, and of the calls' bytes the largest
counts, since calls run one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from realsys.api.experiment import ExperimentConfig
from realsys.models.shape import ModelShape
from realsys.planner.allocation import CallAllocation
from realsys.planner.memory.memory_of_workers import (
    WorkerMemory,
    held_models,
    memory_of_workers,
    model_shapes,
    step_sizes,
)
from realsys.planner.time.costs import Allocation

_Places = tuple[CallAllocation, ...]


def fullest_worker(
    config: ExperimentConfig, allocation: Allocation, made_before: ModelShape | None = None
) -> WorkerMemory:
    """Returns what the worker with the most bytes holds in an allocation of the experiment's calls."""
    models = held_models(config, model_shapes(config, made_before))
    found = memory_of_workers(config.model_rpcs, allocation, models, step_sizes(config))
    return max(found.values(), key=lambda memory: memory.bytes, default=WorkerMemory())


def memory_of_plans(
    config: ExperimentConfig, made_before: ModelShape | None = None
) -> Callable[[Allocation], Mapping[int, float]]:
    """Makes a function from an allocation of the experiment's calls to bytes of each worker with
    weights.
    """
    models = held_models(config, model_shapes(config, made_before))
    sizes = step_sizes(config)
    calls = {
        role: tuple(c for c in config.model_rpcs if c.role == role)
        for role in dict.fromkeys(c.role for c in config.model_rpcs)
        if role in models
    }

    @cache
    def of_role(role: str, places: _Places) -> dict[int, tuple[float, float]]:
        """Returns worker → (permanent bytes, the largest call's bytes)."""
        own = {c.name: p for c, p in zip(calls[role], places, strict=True)}
        found = memory_of_workers(calls[role], own, models, sizes)
        return {w: (m.staying_bytes, m.bytes - m.staying_bytes) for w, m in found.items()}

    def of_plan(allocation: Allocation) -> dict[int, float]:
        stays: dict[int, float] = {}
        most: dict[int, float] = {}
        for role, mine in calls.items():
            places = tuple(allocation[c.name] for c in mine)
            for worker, (stay, add) in of_role(role, places).items():
                stays[worker] = stays.get(worker, 0.0) + stay
                most[worker] = max(most.get(worker, 0.0), add)
        return {worker: stay + most[worker] for worker, stay in stays.items()}

    return of_plan
