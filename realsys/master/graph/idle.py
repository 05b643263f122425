"""Measures the idle share of each pool of workers in a step (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from realsys.api.model import ModelShardID

Span = tuple[int, float, float]  # worker, start, end in seconds


def pools_of(shards: Iterable[tuple[ModelShardID, int]]) -> dict[str, tuple[int, ...]]:
    """Groups workers that hold the same roles: ``{"actor+ref": (0,), "critic+reward": (1,)}``."""
    roles: dict[int, list[str]] = {}
    for shard, worker in shards:
        held = roles.setdefault(worker, [])
        if shard.model_name.role not in held:
            held.append(shard.model_name.role)
    pools: dict[str, list[int]] = {}
    for worker, held in sorted(roles.items()):
        pools.setdefault("+".join(held), []).append(worker)
    return {name: tuple(workers) for name, workers in pools.items()}


def idle_shares(
    spans: Sequence[Span], pools: Mapping[str, Sequence[int]], *, start: float, end: float
) -> dict[str, float]:
    """Returns pool → share of ``start … end`` in which its workers ran no request, mean over workers.

    A worker runs one request after the other, so its spans do not overlap; they may reach over the edges.
    """
    whole = max(end - start, 1e-9)
    busy: dict[int, float] = {}
    for worker, began, ended in spans:
        inside = min(ended, end) - max(began, start)
        busy[worker] = busy.get(worker, 0.0) + max(inside, 0.0)
    return {
        name: 1.0 - sum(min(busy.get(w, 0.0) / whole, 1.0) for w in workers) / len(workers)
        for name, workers in pools.items()
    }
