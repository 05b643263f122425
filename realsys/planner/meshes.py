"""Enumerates possible places of a call: runs of model workers, and topologies over them (pure).

A mesh is a run of consecutive workers that repeated halving of the whole can give, or a run of a power
of two at a multiple of its length: never across a node's edge without covering whole nodes, as long as
nodes have a power of two of GPUs (ReaL, arXiv:2406.14088, section 4, has the same rule).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from realsys.api.model import ProcessTopology
from realsys.planner.allocation import CallAllocation

Mesh = tuple[int, int]  # first worker, how many


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Largest parallel degrees to try; 1 switches an axis off."""

    data: int = 1 << 20
    tensor: int = 8
    pipeline: int = 8


def meshes(num_workers: int) -> list[Mesh]:
    """Lists all meshes, largest first."""
    found: set[Mesh] = set(_halves(0, num_workers))
    length = 1
    while length <= num_workers:
        found |= {(first, length) for first in range(0, num_workers - length + 1, length)}
        length *= 2
    return sorted(found, key=lambda mesh: (-mesh[1], mesh[0]))


def _halves(first: int, length: int) -> Iterator[Mesh]:
    yield first, length
    if length > 1:
        left = (length + 1) // 2
        yield from _halves(first, left)
        yield from _halves(first + left, length - left)


def layouts(length: int, degrees: Degrees) -> list[ProcessTopology]:
    """Lists topologies of exactly ``length`` processes, more data parallelism first."""
    found = [
        ProcessTopology(data=length // (t * p), tensor=t, pipeline=p)
        for p in range(1, min(length, degrees.pipeline) + 1)
        for t in range(1, min(length // p, degrees.tensor) + 1)
        if length % (t * p) == 0 and length // (t * p) <= degrees.data
    ]
    return sorted(found, key=lambda topo: (-topo.data, topo.pipeline))


def places(num_workers: int, degrees: Degrees) -> list[CallAllocation]:
    """Lists every mesh in every topology."""
    return [
        CallAllocation(workers=tuple(range(first, first + length)), topology=topology)
        for first, length in meshes(num_workers)
        for topology in layouts(length, degrees)
    ]


def is_twin(mesh: Mesh, used: Iterable[Mesh], num_workers: int) -> bool:
    """True if a mesh further left is equivalent to this one, given the meshes already used.

    Two halves that are entirely unused are interchangeable, so a mesh in the right one need not be tried.
    Only for a power of two of workers.
    """
    if num_workers & (num_workers - 1):
        return False
    taken = list(used)
    first, length = 0, num_workers
    while length > mesh[1]:
        length //= 2
        within = any(n <= length and first <= a < first + 2 * length for a, n in taken)
        if mesh[0] >= first + length:
            if not within:
                return True
            first += length
    return False


def leftmost(
    allocation: Mapping[str, CallAllocation], num_workers: int
) -> dict[str, CallAllocation]:
    """Returns an equivalent plan that uses the left of two interchangeable halves.

    Only for a power of two of workers and meshes of ``meshes``; other plans are returned unchanged.
    """
    if num_workers & (num_workers - 1):
        return dict(allocation)
    used = {(p.workers[0], len(p.workers)) for p in allocation.values()}
    order = _left_first(0, num_workers, used)
    number = {worker: place for place, worker in enumerate(order)}
    return {
        call: CallAllocation(
            workers=tuple(sorted(number[w] for w in place.workers)), topology=place.topology
        )
        for call, place in allocation.items()
    }


def _left_first(first: int, length: int, used: set[Mesh]) -> list[int]:
    if length == 1:
        return [first]
    half = length // 2
    left, right = (_left_first(first + at, half, used) for at in (0, half))
    counts = [
        sum(n <= half and a in range(first + at, first + at + half) for a, n in used)
        for at in (0, half)
    ]
    return left + right if counts[0] >= counts[1] else right + left
