"""Decides which units are added and drained when a live run is scaled (pure): names, indices, what must
remain.

A run with detached makers is scaled by makers: maker i is generation_server/i and rollout_worker/i. Any
other asynchronous run is scaled by servers and by rollout workers separately. scale.py publishes the
decision to name resolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from realsys.api.errors import ConfigError, TrialError, UnknownName, did_you_mean
from realsys.api.experiment import ExperimentConfig
from realsys.api.scheduling import WorkerType
from realsys.api.worker_configs import MakerRoute
from realsys.worker.live_scaling import Scaling, index_of, next_index

SERVER, WORKER = WorkerType.GENERATION_SERVER, WorkerType.ROLLOUT_WORKER
MAKERS, SERVERS, WORKERS = "makers", "servers", "workers"


@dataclass(frozen=True, kw_only=True)
class ScaleRequest:
    """The user's scaling request. Counts: how many units shall run; None: unchanged.

    Attributes:
        drain: names of units to drain.
        like: the unit whose configuration and routes added ones copy; None: the last one.
        grace_s: time for each drained unit to finish its work.
    """

    makers: int | None = None
    servers: int | None = None
    workers: int | None = None
    drain: tuple[str, ...] = ()
    like: str | None = None
    grace_s: float = 60.0

    @property
    def counts(self) -> dict[str, int]:
        """The requested counts, by kind."""
        named = {MAKERS: self.makers, SERVERS: self.servers, WORKERS: self.workers}
        return {kind: count for kind, count in named.items() if count is not None}


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is added or drained as one: a maker, or a single worker.

    Attributes:
        kind: ``makers``, ``servers`` or ``workers``.
        workers: its processes.
        like: index in the plan of the unit whose configuration it copies.
        holders: model workers that it sends experience to; makers only.
        is_going: it is already being drained.
    """

    name: str
    kind: str
    workers: tuple[str, ...]
    like: int
    holders: frozenset[int] = frozenset()
    is_going: bool = False


@dataclass(frozen=True)
class ScaleChange:
    """The change to make: the next published value, and the units added and drained."""

    scaling: Scaling
    coming: tuple[Unit, ...] = ()
    going: tuple[Unit, ...] = field(default=())


def units(config: ExperimentConfig, scaling: Scaling) -> list[Unit]:
    """Lists all present and former units of this attempt: those of the plan, then added ones.

    Raises:
        TrialError: the run has no rollout workers, or its makers are composed differently.
    """
    if config.rollout is None:
        raise TrialError(
            "its model workers generate the answers themselves: there is nothing to scale",
            where="scale",
            fix="only asynchronous and detached runs can be scaled",
        )
    if config.rollout.makers:
        found = _makers(config.rollout.makers, scaling)
    else:
        found = [
            Unit(name=f"{kind.value}/{i}", kind=name, workers=(f"{kind.value}/{i}",), like=like)
            for name, kind in ((SERVERS, SERVER), (WORKERS, WORKER))
            for i, like in _indices(kind, len(config.workers(kind)), scaling)
        ]
    going = scaling.drained.keys()
    return [replace(unit, is_going=not going.isdisjoint(unit.workers)) for unit in found]


def rescaled(config: ExperimentConfig, scaling: Scaling, request: ScaleRequest) -> ScaleChange:
    """Computes the change for a request, given the earlier ones.

    Raises:
        ConfigError, UnknownName: it is invalid, or would remove a unit that the run needs.
        TrialError: as ``units``.
    """
    known = units(config, scaling)
    kinds = dict.fromkeys(unit.kind for unit in known)
    for kind in request.counts:
        if kind not in kinds:
            raise ConfigError(
                f"this run has no separate {kind}",
                where=f"--{kind}",
                fix="use " + " or ".join(f"--{own}" for own in kinds),
            )
    going = [_named(name, known) for name in dict.fromkeys(request.drain)]
    coming: list[Unit] = []
    for kind, count in request.counts.items():
        there = [u for u in known if u.kind == kind and not u.is_going and u not in going]
        if count < len(there):
            going += there[count:]
        elif count > len(there):
            like = _like(request, [u for u in known if u.kind == kind], there)
            coming += _new(kind, count - len(there), like, known, config, scaling)
    if request.like is not None and not coming:
        raise ConfigError(
            "no unit is added that could copy it",
            where=f"--like {request.like}",
            fix="give the number that shall run, e.g. --makers 3",
        )
    _check_remaining([u for u in [*known, *coming] if not u.is_going and u not in going], known)
    added = {w: f"{w.partition('/')[0]}/{unit.like}" for unit in coming for w in unit.workers}
    drained = {worker: request.grace_s for unit in going for worker in unit.workers}
    after = scaling.with_added(added).with_drained(drained)
    return ScaleChange(after, tuple(coming), tuple(going))


# ---- makers and single workers --------------------------------------------------------------


def _makers(routes: Sequence[MakerRoute], scaling: Scaling) -> list[Unit]:
    found = []
    for i, route in enumerate(routes):
        if (route.servers, route.rollout_workers) != ((i,), (i,)):
            raise TrialError(
                f"{route.name} is not server {i} with rollout worker {i} alone",
                where="RolloutControl.makers",
                fix="scale runs whose maker i is server i and rollout worker i",
            )
        found.append(_maker(route.name, i, i, routes))
    for i, like in _indices(WORKER, len(routes), scaling)[len(routes) :]:
        found.append(_maker(_free_name(i, [unit.name for unit in found]), i, like, routes))
    return found


def _maker(name: str, index: int, like: int, routes: Sequence[MakerRoute]) -> Unit:
    workers = (f"{SERVER.value}/{index}", f"{WORKER.value}/{index}")
    holders = frozenset(routes[like].holders)
    return Unit(name=name, kind=MAKERS, workers=workers, like=like, holders=holders)


def _free_name(index: int, taken: Sequence[str]) -> str:
    while f"maker_{index}" in taken:  # by the user's own names
        index += 1
    return f"maker_{index}"


def _indices(kind: WorkerType, planned: int, scaling: Scaling) -> list[tuple[int, int]]:
    """Lists (index, index in the plan of the unit it copies) of all workers of a type, in order."""
    prefix = f"{kind.value}/"
    added = [
        (index_of(w), index_of(like)) for w, like in scaling.added.items() if w.startswith(prefix)
    ]
    return [(i, i) for i in range(planned)] + sorted(added)


# ---- parts of a request -----------------------------------------------------------------------


def _named(name: str, known: Sequence[Unit]) -> Unit:
    for unit in known:
        if name == unit.name:
            return unit
        if name in unit.workers:
            raise ConfigError(
                f"{name} is part of {unit.name}",
                where=f"--drain {name}",
                fix=f"use --drain {unit.name}",
            )
    names = [unit.name for unit in known if not unit.is_going]
    raise UnknownName(
        f"nothing called {name!r} can be drained", where="--drain", fix=did_you_mean(name, names)
    )


def _like(request: ScaleRequest, among: Sequence[Unit], there: Sequence[Unit]) -> Unit:
    """Selects the unit to copy; may be drained or gone already, so that another can replace it."""
    if request.like is None:
        return (there or among)[-1]
    for unit in among:
        if unit.name == request.like:
            return unit
    names = [unit.name for unit in among]
    raise UnknownName(
        f"none of the {among[0].kind} is called {request.like!r}",
        where="--like",
        fix=did_you_mean(request.like, names),
    )


def _new(
    kind: str,
    count: int,
    like: Unit,
    known: Sequence[Unit],
    config: ExperimentConfig,
    scaling: Scaling,
) -> list[Unit]:
    first_of = WORKER if kind == WORKERS else SERVER
    first = next_index(first_of, planned=len(config.workers(first_of)), scaling=scaling)
    types = {MAKERS: (SERVER, WORKER), SERVERS: (SERVER,), WORKERS: (WORKER,)}[kind]
    found: list[Unit] = []
    for index in range(first, first + count):
        workers = tuple(f"{own.value}/{index}" for own in types)
        taken = [unit.name for unit in [*known, *found]]
        name = _free_name(index, taken) if kind == MAKERS else workers[0]
        found.append(replace(like, name=name, workers=workers, is_going=False))
    return found


def _check_remaining(staying: Sequence[Unit], known: Sequence[Unit]) -> None:
    for kind in dict.fromkeys(unit.kind for unit in known):
        if not any(unit.kind == kind for unit in staying):
            raise ConfigError(
                f"none of the {kind} would remain",
                where="scale",
                fix="keep one of them, or end the run: realsys stop",
            )
    supplied = frozenset[int]().union(*(unit.holders for unit in staying))
    if starved := sorted(frozenset[int]().union(*(unit.holders for unit in known)) - supplied):
        raise ConfigError(
            "no maker would send experience to "
            + ", ".join(f"model_worker/{i}" for i in starved)
            + ", and all trainers step together",
            where="scale",
            fix="keep a maker that sends to them, or add one like it (--makers N --like NAME)",
        )
