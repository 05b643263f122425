"""Where an experiment's models sit: role → shards on model workers (pure).

The first ``world size`` workers hold a role's shards, so roles share workers and smaller ones leave
the last workers to others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from realsys.api.experiment import ModelShard, ModelWorker
from realsys.api.model import (
    DatasetAbstraction,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelName,
    ModelShardID,
    ProcessTopology,
)


@dataclass(frozen=True, kw_only=True)
class RolePlacement:
    """One role's model and how it is held."""

    topo: ProcessTopology
    model: ModelAbstraction
    backend: ModelBackendAbstraction
    eval_dataset: DatasetAbstraction | None = None


def place_roles(
    roles: Mapping[str, RolePlacement],
    *,
    base_seed: int,
    datasets: tuple[DatasetAbstraction, ...],
    tokenizer: str | None,
    shuffle_dataset: bool,
    num_threads: int | None,
) -> tuple[ModelWorker, ...]:
    """As many workers as the largest role needs, each with its shards, smallest rank first."""
    num_workers = max(role.topo.world_size for role in roles.values())
    return tuple(
        ModelWorker(
            base_seed=base_seed,
            shards=tuple(
                ModelShard(
                    id=ModelShardID(
                        model_name=ModelName(name), topo=role.topo, parallelism_rank=worker
                    ),
                    model=role.model,
                    backend=role.backend,
                    eval_dataset=role.eval_dataset,
                )
                for name, role in roles.items()
                if worker < role.topo.world_size
            ),
            tokenizer_name_or_path=tokenizer,
            datasets=datasets,
            shuffle_dataset=shuffle_dataset,
            num_threads=num_threads,
        )
        for worker in range(num_workers)
    )
