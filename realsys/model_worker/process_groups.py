"""Torch process groups: one over all model workers, one for each model that has several processes.

Made once per attempt, in the same order on every worker. The rendezvous is a file in the attempt's
folder: no port is opened for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from realsys.api.model import ModelName, ModelShardID


def make_process_groups(
    shards: Iterable[tuple[ModelShardID, int]],
    *,
    worker: int,
    num_workers: int,
    rendezvous: Path,
    device: str,
    timeout_s: float,
) -> dict[ModelName, Any]:
    """Model → its group, for the models of which this worker holds a shard; no group for one process.

    Args:
        shards: (shard, worker index) of all models.
        rendezvous: file that all workers of this attempt share; must not exist before the first.
    """
    holders: dict[ModelName, list[tuple[int, int]]] = {}
    for shard, index in shards:
        holders.setdefault(shard.model_name, []).append((shard.parallelism_rank, index))
    spread = {name: [w for _, w in sorted(h)] for name, h in holders.items() if len(h) > 1}
    if not spread:
        return {}
    import torch.distributed as dist

    rendezvous.parent.mkdir(parents=True, exist_ok=True)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=dist.FileStore(str(rendezvous), num_workers),  # type: ignore[attr-defined]
        rank=worker,
        world_size=num_workers,
        timeout=timedelta(seconds=timeout_s),
    )
    groups = {}
    for name, workers in spread.items():  # every worker makes every group: torch requires it
        group = dist.new_group(workers)
        if worker in workers:
            groups[name] = group
    return groups
