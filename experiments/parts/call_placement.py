"""Places an experiment's models: calls and their allocation → copies, hooks, shards on workers (pure).

A role's trained call (or its first) runs on the role's copy 0. A call in another parallel layout, or on
other workers, runs on a copy of its own (``actor@1``), which is filled from copy 0 before the call; calls
in the same layout on the same workers share a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.placement import Placement
from realsys.api.dataflow import Hook, MFCDef, OffloadHook, ParamReallocHook
from realsys.api.errors import ConfigError, collected, raise_all
from realsys.api.model import (
    DatasetAbstraction,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelName,
    ModelShardID,
    ProcessTopology,
)
from realsys.api.worker_configs import ModelShard, ModelWorker
from realsys.planner.allocation import (
    ALL,
    AllocationEntry,
    CallAllocation,
    parse_allocation,
    parse_pools,
    unknown_pool,
)

LEFT, RIGHT = "left", "right"


@dataclass(frozen=True, kw_only=True)
class RolePlacement:
    """One role's model and how it is held.

    Attributes:
        backend: of copy 0.
        replica_backend: of further copies, which are filled from copy 0 and never trained.
        offload: the role's copies leave the GPU after each of their calls.
    """

    model: ModelAbstraction
    backend: ModelBackendAbstraction
    replica_backend: ModelBackendAbstraction = ModelBackendAbstraction("inference")
    eval_dataset: DatasetAbstraction | None = None
    offload: bool = False


@dataclass(frozen=True, kw_only=True)
class CallPlacements:
    """Every call's workers and topology, the pools, and the number of workers."""

    n_workers: int
    pools: Mapping[str, tuple[int, ...]]
    calls: Mapping[str, CallAllocation]


def allocate(
    calls: Sequence[tuple[str, str]],
    settings: Placement,
    *,
    roles: Mapping[str, tuple[str | None, str | None]],
    right_roles: Collection[str] = (),
    trained: Mapping[str, str],
    rules: Collection[str] = (),
    n_seqs: int,
) -> CallPlacements:
    """Decides where every call runs.

    Args:
        calls: (name, role) of every call.
        roles: role → its ``parallel`` and ``pool``, as set.
        right_roles: roles that placement ``split`` puts on the second half.
        trained: role → its train step.
        rules: roles without weights. By default on all workers if ``n_model_workers`` is set and all
            roles share them; else one process.
        n_seqs: datapoints per call.
    Raises:
        ConfigErrors: mistakes in ``parallel``, pools and allocation.
    """
    problems: list[ConfigError] = []
    defaults: dict[str, PlacementRequest] = {}
    given: dict[str, PlacementRequest] = {}
    for role, (parallel, pool) in roles.items():
        half = RIGHT if role in right_roles else LEFT
        home = pool or (half if settings.is_split else None)
        rule_ranks = n_seqs if role in rules else None
        request = defaults[role] = _default(settings, role, pool=home, rule_ranks=rule_ranks)
        with collected(problems):
            if parallel is not None:
                topology = ProcessTopology.parse(parallel, where=f"{role}.parallel")
                given[role] = replace(request, topology=topology, where=f"{role}.parallel")
            elif pool is not None:
                given[role] = replace(request, where=f"{role}.pool")
    pools: dict[str, tuple[int, ...]] = {}
    entries: tuple[AllocationEntry, ...] = ()
    with collected(problems):
        pools = parse_pools(settings.pools, n_workers=settings.n_model_workers)
    with collected(problems):
        halves = (LEFT, RIGHT) if settings.is_split and not settings.pools else ()
        names = (*settings.pools, *halves)
        entries = parse_allocation(settings.allocation or "", calls=dict(calls), pools=names)
    raise_all(problems)
    requests = placement_requests(
        dict(calls),
        entries,
        settings=given,
        defaults=defaults,
        trained=trained,
        rules=tuple(rules),
    )
    if settings.is_split and not pools:
        pools = _halves(requests.values(), settings.n_model_workers)
    n_workers = settings.n_model_workers or max(
        1,
        *(max(workers) + 1 for workers in pools.values()),
        *(request.min_workers for request in requests.values() if request.pool is None),
    )
    found = allocate_calls(requests, pools, n_workers=n_workers)
    return CallPlacements(n_workers=n_workers, pools=pools, calls=found)


def _default(
    settings: Placement, role: str, *, pool: str | None, rule_ranks: int | None
) -> PlacementRequest:
    """Builds the request of a role without settings; ``rule_ranks`` is the useful number of ranks of a
    rule.
    """
    is_given = settings.n_model_workers is not None
    is_apart = settings.is_split or bool(settings.pools)
    # If roles have separate workers, a rule on all of them would wait for each.
    is_spread = is_given or is_apart if rule_ranks is None else is_given and not is_apart
    return PlacementRequest(
        topology=None if is_spread else ProcessTopology(),
        max_ranks=rule_ranks,
        pool=pool,
        where=f"{role}.pool and placement",
    )


def _halves(
    requests: Iterable[PlacementRequest], n_workers: int | None
) -> dict[str, tuple[int, ...]]:
    """Builds the pools of placement ``split``: two halves of the workers, or as large as requested.

    Workers fill nodes in order, so this halves the GPUs of one node, or the nodes of several; an odd node
    is divided rather than wasted. With an odd number of workers the first half gets one more.
    """
    requests = tuple(requests)
    if n_workers is not None:
        if n_workers < 2:
            raise ConfigError(
                f"{n_workers} model worker can't be split",
                where="placement.n_model_workers and placement",
                fix="use 2 or more, or placement=shared",
            )
        left = (n_workers + 1) // 2
        return {LEFT: tuple(range(left)), RIGHT: tuple(range(left, n_workers))}
    left, right = (
        max([request.min_workers for request in requests if request.pool == half], default=1)
        for half in (LEFT, RIGHT)
    )
    return {LEFT: tuple(range(left)), RIGHT: tuple(range(left, left + right))}


# ---- requests of calls, and the workers they get --------------------------------------------------------


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


# ---- copies and hooks ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Calls on their copies with their hooks, and the placement of each copy."""

    calls: tuple[MFCDef, ...]
    places: Mapping[ModelName, CallAllocation]


def with_copies(
    calls: Sequence[MFCDef],
    allocated: Mapping[str, CallAllocation],
    *,
    offload: Iterable[str] = (),
) -> Copies:
    """Assigns each call to a copy of its role with the call's parallel layout and workers.

    Args:
        calls: all on copy 0 of their roles.
        allocated: name of a call → its placement.
        offload: roles whose copies leave the GPU after each call.
    """
    places: dict[ModelName, CallAllocation] = {}
    for call in sorted(calls, key=lambda c: not c.is_train):  # trained calls first: copy 0
        places.setdefault(ModelName(call.role), allocated[call.name])
    copies = dict(places)
    done = []
    for call in calls:
        place, home = allocated[call.name], ModelName(call.role)
        same = (n for n, p in copies.items() if n.role == call.role and p == place)
        name = next(same, None) or ModelName(call.role, _next_id(copies, call.role))
        copies[name] = place
        before: tuple[Hook, ...] = call.pre_hooks
        if name != home:
            before = (*before, ParamReallocHook(source=home))
        after = call.post_hooks + ((OffloadHook(),) if call.role in offload else ())
        done.append(replace(call, model_name=name, pre_hooks=before, post_hooks=after))
    return Copies(calls=tuple(done), places=copies)


def _next_id(copies: Iterable[ModelName], role: str) -> int:
    return 1 + max(name.replica_id for name in copies if name.role == role)


def place_models(
    places: Mapping[ModelName, CallAllocation],
    models: Mapping[str, RolePlacement],
    *,
    n_workers: int,
    base_seed: int,
    evaluated: Collection[ModelName] | None = None,
    **of_all: Any,
) -> tuple[ModelWorker, ...]:
    """Builds the model workers with their shards.

    Args:
        places: copy → its workers and topology.
        models: role → its model, in the order in which a worker lists them.
        evaluated: copies that get their role's held-out data; None: copies 0.
        of_all: further fields of ``ModelWorker``, equal for all.
    """
    shards: list[list[ModelShard]] = [[] for _ in range(n_workers)]
    order = list(models)
    for name, place in sorted(places.items(), key=lambda p: (order.index(p[0].role), p[0])):
        role = models[name.role]
        evaluates = not name.replica_id if evaluated is None else name in evaluated
        for rank, worker in enumerate(place.workers):
            shards[worker].append(
                ModelShard(
                    id=ModelShardID(model_name=name, topo=place.topology, parallelism_rank=rank),
                    model=role.model,
                    backend=role.replica_backend if name.replica_id else role.backend,
                    eval_dataset=role.eval_dataset if evaluates else None,
                )
            )
    return tuple(ModelWorker(base_seed=base_seed, shards=tuple(mine), **of_all) for mine in shards)
