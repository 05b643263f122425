"""Torch process groups: one over all model workers, and one per axis of every model's topology.

Created once per attempt, in the same order on every worker; equal groups of several models are
created once. Workers rendezvous at a store, realsys/model_worker/rendezvous.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from realsys.api.model import ModelName, ModelShardID, ParallelGroups, ProcessTopology
from realsys.model_worker.rendezvous import wait_for_all

Axis = str  # a field of ParallelGroups


def make_process_groups(
    shards: Iterable[tuple[ModelShardID, int]],
    *,
    worker: int,
    num_workers: int,
    open_store: Callable[[], Any],
    device: str,
    timeout_s: float,
) -> dict[ModelName, ParallelGroups]:
    """Creates all process groups; returns model → its groups for models with a shard on this worker.

    Args:
        shards: (shard, worker index) of all models.
        open_store: opens the store that all workers of this attempt share; initially empty.
    Raises:
        WaitTimeout: names workers that did not reach the store.
    """
    placements: dict[ModelName, dict[int, int]] = {}
    topologies: dict[ModelName, ProcessTopology] = {}
    for shard, index in shards:
        placements.setdefault(shard.model_name, {})[shard.parallelism_rank] = index
        topologies[shard.model_name] = shard.topo
    if num_workers > 1:
        _join(worker, num_workers, open_store(), device, timeout_s)
    made: dict[tuple[int, ...], Any] = {}
    found: dict[ModelName, dict[Axis, Any]] = {}
    for name, placement in placements.items():  # torch requires every process to create every group
        for axis, ranks in rank_groups(topologies[name]):
            members = tuple(placement[rank] for rank in ranks)
            if len(members) == 1:
                continue
            if members not in made:
                made[members] = _new_group(members)
            if worker in members:
                found.setdefault(name, {})[axis] = made[members]
    return {name: ParallelGroups(**found.get(name, {})) for name in placements}


def rank_groups(topo: ProcessTopology) -> list[tuple[Axis, tuple[int, ...]]]:
    """Lists every group of a topology: (axis, parallelism ranks in group order). Pure."""
    stages, datas, tensors = range(topo.pipeline), range(topo.data), range(topo.tensor)

    def rank(p: int, d: int, t: int) -> int:
        return topo.rank(pipeline=p, data=d, tensor=t)

    groups = [("copy", tuple(range(topo.world_size)))]
    groups += [("data", tuple(rank(p, d, t) for d in datas)) for p in stages for t in tensors]
    groups += [("tensor", tuple(rank(p, d, t) for t in tensors)) for p in stages for d in datas]
    groups += [("pipeline", tuple(rank(p, d, t) for p in stages)) for d in datas for t in tensors]
    groups += [("slot", tuple(topo.slot(d))) for d in datas]
    last = topo.pipeline - 1
    if last:
        groups += [("ends", (rank(0, d, t), rank(last, d, t))) for d in datas for t in tensors]
    return groups


def _join(worker: int, num_workers: int, store: Any, device: str, timeout_s: float) -> None:
    import torch.distributed as dist

    wait_for_all(store, worker=worker, num_workers=num_workers, timeout_s=timeout_s)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=worker,
        world_size=num_workers,
        timeout=timedelta(seconds=timeout_s),
    )
    if device != "cpu":  # NCCL connects at a group's first use, when all members must be present
        import torch

        dist.all_reduce(torch.zeros(1, device=device))


def _new_group(workers: tuple[int, ...]) -> Any:
    """Creates a group in the topology's order: a placement need not list workers in ascending order."""
    import torch.distributed as dist

    if list(workers) == sorted(workers):
        return dist.new_group(list(workers))
    return dist.new_group(list(workers), sort_ranks=False)
