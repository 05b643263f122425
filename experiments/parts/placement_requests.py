"""What every call wants, by the allocation and its role's settings, and the workers it gets (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from realsys.api.errors import ConfigError
from realsys.api.model import ProcessTopology
from realsys.planner.allocation import (
    ALL,
    AllocationEntry,
    CallAllocation,
    raise_problems,
    unknown_pool,
)


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """What is wanted for a call, before it is known which workers there are.

    Attributes:
        topology: None is the whole pool along the data axis.
        most_ranks: of a topology that is None, where there is a bound.
        pool: None is all model workers.
        where: the setting that says so, for messages.
    """

    topology: ProcessTopology | None = None
    most_ranks: int | None = None
    pool: str | None = None
    where: str = ""

    @property
    def least_workers(self) -> int:
        """Workers that it can't do without."""
        return 1 if self.topology is None else self.topology.world_size


def placement_requests(
    calls: Mapping[str, str],
    entries: Iterable[AllocationEntry],
    *,
    settings: Mapping[str, PlacementRequest],
    defaults: Mapping[str, PlacementRequest],
    trained: Mapping[str, str],
    rules: Collection[str] = (),
    where: str = "allocation",
) -> dict[str, PlacementRequest]:
    """Call → what it wants: its own entry, its role's, ``*``'s, the role's settings if it has any,
    what the role's train step wants, the role's default.

    An entry without a pool takes the pool of the role's settings or default.

    Args:
        calls: name of a call → its role.
        settings: role → what its settings say, for roles where they say anything.
        defaults: role → what holds otherwise.
        trained: role → its train step.
        rules: roles without weights; ``*`` is not about them.
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
        wish = named(call, role) or (named(trained[role], role) if role in trained else None)
        found[call] = wish or defaults[role]
    return found


def allocate_calls(
    wishes: Mapping[str, PlacementRequest], pools: Mapping[str, tuple[int, ...]], *, n_workers: int
) -> dict[str, CallAllocation]:
    """Every call on the first workers of its pool.

    Raises:
        ConfigErrors: unknown pools, and layouts that are larger than their pool.
    """
    found: dict[str, CallAllocation] = {}
    problems: list[ConfigError] = []
    too_large: dict[tuple[PlacementRequest, ProcessTopology, int], list[str]] = {}
    for call, wish in wishes.items():
        if wish.pool is not None and wish.pool not in pools:
            problems.append(unknown_pool(wish.pool, pools, wish.where))
            continue
        workers = tuple(range(n_workers)) if wish.pool is None else pools[wish.pool]
        ranks = min(len(workers), wish.most_ranks or len(workers))
        topology = wish.topology or ProcessTopology(data=ranks)
        if topology.world_size > len(workers):
            too_large.setdefault((wish, topology, len(workers)), []).append(call)
            continue
        found[call] = CallAllocation(workers=workers[: topology.world_size], topology=topology)
    problems += [_too_large(calls, *asked) for asked, calls in too_large.items()]
    raise_problems(problems)
    return found


def _too_large(
    calls: list[str], wish: PlacementRequest, topology: ProcessTopology, num_workers: int
) -> ConfigError:
    there = "there are" if wish.pool is None else f"pool {wish.pool!r} has"
    return ConfigError(
        f"{' and '.join(calls)} in layout {topology} needs {topology.world_size} model workers, "
        f"{there} {num_workers}",
        where=wish.where,
        fix="use smaller degrees, "
        + ("or more model workers" if wish.pool is None else "or a larger pool"),
    )
