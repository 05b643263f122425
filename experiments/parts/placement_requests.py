"""Placement requests of calls, from the allocation and the roles' settings, and the workers they get
(pure).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from realsys.api.errors import ConfigError, raise_all
from realsys.api.model import ProcessTopology
from realsys.planner.allocation import (
    ALL,
    AllocationEntry,
    CallAllocation,
    unknown_pool,
)


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """A call's requested placement, before the workers are known.

    Attributes:
        topology: None: the whole pool along the data axis.
        max_ranks: limit on the ranks if the topology is None; None: no limit.
        pool: None: all model workers.
        where: the setting that requests it, for messages.
    """

    topology: ProcessTopology | None = None
    max_ranks: int | None = None
    pool: str | None = None
    where: str = ""

    @property
    def min_workers(self) -> int:
        """Minimum number of workers."""
        return 1 if self.topology is None else self.topology.world_size


def placement_requests(
    calls: Mapping[str, str],
    entries: Iterable[AllocationEntry],
    *,
    settings: Mapping[str, PlacementRequest],
    defaults: Mapping[str, PlacementRequest],
    trained: Mapping[str, str],
    rules: Collection[str] = (),
    where: str = "placement.allocation",
) -> dict[str, PlacementRequest]:
    """Determines each call's request by precedence.

    In this order: the call's own entry, its role's, that of ``*``, the role's settings, the request of
    the role's train step, the role's default.

    An entry without a pool takes the pool of the role's settings or default.

    Args:
        calls: name of a call → its role.
        settings: role → request from its settings, for roles that have any.
        defaults: role → default request.
        trained: role → its train step.
        rules: roles without weights, to which ``*`` does not apply.
    """
    by_name = {entry.name: entry for entry in entries}

    def named(call: str, role: str) -> PlacementRequest | None:
        for name in (call, role) if role in rules else (call, role, ALL):
            if entry := by_name.get(name):
                pool = entry.pool or home[role].pool
                return PlacementRequest(
                    topology=entry.topology, pool=pool, where=f"{where}, {entry}"
                )
        return settings.get(role)

    home = {role: settings.get(role) or defaults[role] for role in calls.values()}
    found: dict[str, PlacementRequest] = {}
    for call, role in calls.items():
        request = named(call, role) or (named(trained[role], role) if role in trained else None)
        found[call] = request or defaults[role]
    return found


def allocate_calls(
    requests: Mapping[str, PlacementRequest],
    pools: Mapping[str, tuple[int, ...]],
    *,
    n_workers: int,
) -> dict[str, CallAllocation]:
    """Allocates every call to the first workers of its pool.

    Raises:
        ConfigErrors: unknown pools, and layouts larger than their pool.
    """
    found: dict[str, CallAllocation] = {}
    problems: list[ConfigError] = []
    too_large: dict[tuple[PlacementRequest, ProcessTopology, int], list[str]] = {}
    for call, request in requests.items():
        if request.pool is not None and request.pool not in pools:
            problems.append(unknown_pool(request.pool, pools, request.where))
            continue
        workers = tuple(range(n_workers)) if request.pool is None else pools[request.pool]
        ranks = min(len(workers), request.max_ranks or len(workers))
        topology = request.topology or ProcessTopology(data=ranks)
        if topology.world_size > len(workers):
            too_large.setdefault((request, topology, len(workers)), []).append(call)
            continue
        found[call] = CallAllocation(workers=workers[: topology.world_size], topology=topology)
    problems += [_too_large(calls, *key) for key, calls in too_large.items()]
    raise_all(problems)
    return found


def _too_large(
    calls: list[str], request: PlacementRequest, topology: ProcessTopology, num_workers: int
) -> ConfigError:
    available = "there are" if request.pool is None else f"pool {request.pool!r} has"
    return ConfigError(
        f"{' and '.join(calls)} in layout {topology} needs {topology.world_size} model workers, "
        f"{available} {num_workers}",
        where=request.where,
        fix="use smaller degrees, "
        + ("or more model workers" if request.pool is None else "or a larger pool"),
    )
