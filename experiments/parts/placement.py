"""Where an experiment's models sit: calls and their allocation → copies, hooks, shards on workers (pure).

A role's trained call (or its first) runs on the role's copy 0. A call in another layout, or on other
workers, runs on a copy of its own (``actor@1``), which is filled from copy 0 before the call; calls of
one layout share a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from experiments.parts.placement_requests import (
    PlacementRequest,
    allocate_calls,
    placement_requests,
)
from realsys.api.dataflow import Hook, MFCDef, OffloadHook, ParamReallocHook
from realsys.api.errors import ConfigError, ConfigErrors
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
    AllocationEntry,
    CallAllocation,
    parse_allocation,
    parse_pools,
    raise_problems,
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
class PlacementSettings:
    """What a user says about places, as the settings of an experiment have it."""

    placement: str = "shared"
    pools: Mapping[str, str]
    allocation: str | None = None
    n_model_workers: int | None = None

    @property
    def is_split(self) -> bool:
        """Two halves of the workers, each with roles of its own."""
        return self.placement == "split"

    def half(self, *, is_right: bool) -> str | None:
        """A role's pool, unless it has one of its own."""
        return (RIGHT if is_right else LEFT) if self.is_split else None


@dataclass(frozen=True, kw_only=True)
class Allocated:
    """Every call's place, and the workers that there are."""

    n_workers: int
    pools: Mapping[str, tuple[int, ...]]
    calls: Mapping[str, CallAllocation]


def allocate(
    calls: Sequence[tuple[str, str]],
    settings: PlacementSettings,
    *,
    roles: Mapping[str, tuple[str | None, str | None]],
    right_roles: Iterable[str] = (),
    trained: Mapping[str, str],
    rules: Collection[str] = (),
    n_seqs: int,
) -> Allocated:
    """Where every call runs.

    Args:
        calls: (name, role) of every call.
        roles: role → its ``parallel`` and ``pool``, as set.
        right_roles: roles that placement ``split`` puts on the second half.
        trained: role → its train step.
        rules: roles without weights. Unless they are named: on all workers that are given, if all
            share them; else one process.
        n_seqs: datapoints a call.
    Raises:
        ConfigErrors: mistakes in ``parallel``, pools and allocation.
    """
    problems: list[ConfigError] = []
    defaults: dict[str, PlacementRequest] = {}
    given: dict[str, PlacementRequest] = {}
    right = frozenset(right_roles)
    for role, (parallel, pool) in roles.items():
        home = pool or settings.half(is_right=role in right)
        rule_ranks = n_seqs if role in rules else None
        wish = defaults[role] = _default(settings, role, pool=home, rule_ranks=rule_ranks)
        with _collected(problems):
            if parallel is not None:
                topology = ProcessTopology.parse(parallel, where=f"{role}.parallel")
                given[role] = replace(wish, topology=topology, where=f"{role}.parallel")
            elif pool is not None:
                given[role] = replace(wish, where=f"{role}.pool")
    pools: dict[str, tuple[int, ...]] = {}
    entries: tuple[AllocationEntry, ...] = ()
    with _collected(problems):
        pools = parse_pools(settings.pools, n_workers=settings.n_model_workers)
    with _collected(problems):
        halves = (LEFT, RIGHT) if settings.is_split and not settings.pools else ()
        names = (*settings.pools, *halves)
        entries = parse_allocation(settings.allocation or "", calls=dict(calls), pools=names)
    raise_problems(problems)
    wishes = placement_requests(
        dict(calls),
        entries,
        settings=given,
        defaults=defaults,
        trained=trained,
        rules=tuple(rules),
    )
    if settings.is_split and not pools:
        pools = _halves(wishes.values(), settings.n_model_workers)
    n_workers = settings.n_model_workers or max(
        1,
        *(max(workers) + 1 for workers in pools.values()),
        *(wish.least_workers for wish in wishes.values() if wish.pool is None),
    )
    found = allocate_calls(wishes, pools, n_workers=n_workers)
    return Allocated(n_workers=n_workers, pools=pools, calls=found)


def _default(
    settings: PlacementSettings, role: str, *, pool: str | None, rule_ranks: int | None
) -> PlacementRequest:
    """What a role gets that says nothing; ``rule_ranks`` is how many could work, of a rule."""
    is_given = settings.n_model_workers is not None
    is_apart = settings.is_split or bool(settings.pools)
    # Where roles have workers of their own, a rule on all of them would wait for each.
    is_spread = is_given or is_apart if rule_ranks is None else is_given and not is_apart
    return PlacementRequest(
        topology=None if is_spread else ProcessTopology(),
        most_ranks=rule_ranks,
        pool=pool,
        where=f"{role}.pool and placement",
    )


@contextmanager
def _collected(problems: list[ConfigError]) -> Iterator[None]:
    """A ConfigError raised inside joins ``problems``."""
    try:
        yield
    except ConfigErrors as errors:
        problems += errors.problems
    except ConfigError as error:
        problems.append(error)


def _halves(
    wishes: Iterable[PlacementRequest], n_workers: int | None
) -> dict[str, tuple[int, ...]]:
    """The pools of placement ``split``: two halves of the workers, or as large as is asked for.

    Workers fill nodes in order, so this halves the GPUs of one node, the nodes of several, and an odd
    node is cut rather than wasted. Of an odd number of workers the first half gets one more.
    """
    wishes = tuple(wishes)
    if n_workers is not None:
        if n_workers < 2:
            raise ConfigError(
                f"{n_workers} model worker can't be split",
                where="n_model_workers and placement",
                fix="use 2 or more, or placement=shared",
            )
        left = (n_workers + 1) // 2
        return {LEFT: tuple(range(left)), RIGHT: tuple(range(left, n_workers))}
    left, right = (
        max([wish.least_workers for wish in wishes if wish.pool == half], default=1)
        for half in (LEFT, RIGHT)
    )
    return {LEFT: tuple(range(left)), RIGHT: tuple(range(left, left + right))}


# ---- copies and hooks ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Calls on their copies with their hooks, and where each copy sits."""

    calls: tuple[MFCDef, ...]
    places: Mapping[ModelName, CallAllocation]


def with_copies(
    calls: Sequence[MFCDef],
    allocated: Mapping[str, CallAllocation],
    *,
    offload: Iterable[str] = (),
) -> Copies:
    """The calls, each on a copy of its role in its own layout.

    Args:
        calls: all on copy 0 of their roles.
        allocated: name of a call → its place.
        offload: roles whose copies leave the GPU after each call.
    """
    places: dict[ModelName, CallAllocation] = {}
    for call in sorted(calls, key=lambda c: not c.is_train):  # trained first: they are copy 0
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
    """The model workers with their shards.

    Args:
        places: copy → where it sits.
        models: role → its model, in the order in which a worker lists them.
        evaluated: copies that get their role's held-out data; None: copies 0.
        of_all: further fields of ``ModelWorker``, the same for all.
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
