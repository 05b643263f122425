"""Bytes of a weight movement between two topologies, computed without boxes (pure)."""

from __future__ import annotations

import math

from realsys.api.model import ProcessTopology
from realsys.planner.allocation import CallAllocation


def bytes_to_receive(
    weight_bytes: float, source: CallAllocation, target: CallAllocation, *, sharded: bool
) -> dict[int, float]:
    """Bytes that each worker of the target receives from others, assuming evenly split weights.

    On the same workers the parts that a worker holds before and after are compared; elsewhere a worker
    of both copies is taken to hold of its new part what it holds of any other. realloc_plan.py counts
    exactly; this is for comparing many layouts.

    Args:
        sharded: the source cuts weights along its data axis too (backend fsdp).
    """
    found = {}
    for rank, worker in enumerate(target.workers):
        new = _part(target.topology, rank, sharded=False)
        here = 0.0
        if worker in source.workers:
            old = _part(source.topology, source.workers.index(worker), sharded=sharded)
            alike = source.workers == target.workers
            here = _overlap(new, old) if alike else _size(new) * _size(old)
        found[worker] = weight_bytes * (_size(new) - here)
    return found


_Part = tuple[tuple[float, float], ...]  # of the layers, of a layer, of that: begin and end


def _part(topo: ProcessTopology, rank: int, *, sharded: bool) -> _Part:
    """Part of the weights that a process holds, as a box in the unit cube."""
    pipeline, data, tensor = topo.coordinate(rank)
    degrees = ((pipeline, topo.pipeline), (tensor, topo.tensor), (data, topo.data * sharded or 1))
    return tuple((i / n, (i + 1) / n) if n > 1 else (0.0, 1.0) for i, n in degrees)


def _size(part: _Part) -> float:
    return math.prod(end - begin for begin, end in part)


def _overlap(one: _Part, other: _Part) -> float:
    return math.prod(
        max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(one, other, strict=True)
    )
