"""Who comes and who goes when a live run is scaled (pure): names, numbers, and what must stay.

A run of detached makers is scaled by makers: maker i is generation_server/i and rollout_worker/i. Any other
asynchronous run is scaled by servers and by rollout workers, each for themselves. What is decided here is
written to name resolution by scale.py.
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
    """What the user says. Numbers: how many there shall be; None: as many as there are.

    Attributes:
        drain: names of those that shall go.
        like: whose configuration and routes added ones have; none: the last one's.
        grace_s: time that each has to finish what it is at.
    """

    makers: int | None = None
    servers: int | None = None
    workers: int | None = None
    drain: tuple[str, ...] = ()
    like: str | None = None
    grace_s: float = 60.0

    @property
    def counts(self) -> dict[str, int]:
        """Kind → how many, of those that the user names."""
        named = {MAKERS: self.makers, SERVERS: self.servers, WORKERS: self.workers}
        return {kind: count for kind, count in named.items() if count is not None}


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What comes and goes as one: a maker, or a single worker.

    Attributes:
        kind: ``makers``, ``servers`` or ``workers``.
        workers: its processes.
        like: index in the plan of the one whose configuration it has.
        holders: model workers that it sends experience to; of makers only.
        is_going: it was told to go already.
    """

    name: str
    kind: str
    workers: tuple[str, ...]
    like: int
    holders: frozenset[int] = frozenset()
    is_going: bool = False


@dataclass(frozen=True)
class ScaleChange:
    """What is to happen: the next value, and the units by what becomes of them."""

    scaling: Scaling
    coming: tuple[Unit, ...] = ()
    going: tuple[Unit, ...] = field(default=())


def units(config: ExperimentConfig, scaling: Scaling) -> list[Unit]:
    """All that there are, or were in this attempt: those of the plan, then those that were added.

    Raises:
        TrialError: no rollout workers make the run's experience, or its makers are put together otherwise.
    """
    if config.rollout is None:
        raise TrialError(
            "its model workers make the answers themselves: there is nothing to scale",
            where="scale",
            fix="only asynchronous and detached runs have makers that come and go",
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


def rescaled(config: ExperimentConfig, scaling: Scaling, wish: ScaleRequest) -> ScaleChange:
    """What follows from a wish, given what was wished before.

    Raises:
        ConfigError, UnknownName: it can't be understood, or would leave the run without somebody it needs.
        TrialError: as ``units``.
    """
    known = units(config, scaling)
    kinds = dict.fromkeys(unit.kind for unit in known)
    for kind in wish.counts:
        if kind not in kinds:
            raise ConfigError(
                f"this run has no {kind} of their own",
                where=f"--{kind}",
                fix="use " + " or ".join(f"--{own}" for own in kinds),
            )
    going = [_named(name, known) for name in dict.fromkeys(wish.drain)]
    coming: list[Unit] = []
    for kind, count in wish.counts.items():
        there = [u for u in known if u.kind == kind and not u.is_going and u not in going]
        if count < len(there):
            going += there[count:]
        elif count > len(there):
            like = _like(wish, [u for u in known if u.kind == kind], there)
            coming += _new(kind, count - len(there), like, known, config, scaling)
    if wish.like is not None and not coming:
        raise ConfigError(
            "nothing is added that could be like it",
            where=f"--like {wish.like}",
            fix="say how many there shall be, e.g. --makers 3",
        )
    _check_what_stays([u for u in [*known, *coming] if not u.is_going and u not in going], known)
    added = {w: f"{w.partition('/')[0]}/{unit.like}" for unit in coming for w in unit.workers}
    drained = {worker: wish.grace_s for unit in going for worker in unit.workers}
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
    """(index, the one in the plan that it is like) of all of a kind, in order."""
    prefix = f"{kind.value}/"
    added = [
        (index_of(w), index_of(like)) for w, like in scaling.added.items() if w.startswith(prefix)
    ]
    return [(i, i) for i in range(planned)] + sorted(added)


# ---- the parts of a wish --------------------------------------------------------------------


def _named(name: str, known: Sequence[Unit]) -> Unit:
    for unit in known:
        if name == unit.name:
            return unit
        if name in unit.workers:
            raise ConfigError(
                f"{name} is a part of {unit.name}",
                where=f"--drain {name}",
                fix=f"use --drain {unit.name}",
            )
    names = [unit.name for unit in known if not unit.is_going]
    raise UnknownName(
        f"nothing called {name!r} can go", where="--drain", fix=did_you_mean(name, names)
    )


def _like(wish: ScaleRequest, among: Sequence[Unit], there: Sequence[Unit]) -> Unit:
    """Also one that goes, or has gone: another may take its place."""
    if wish.like is None:
        return (there or among)[-1]
    for unit in among:
        if unit.name == wish.like:
            return unit
    names = [unit.name for unit in among]
    raise UnknownName(
        f"none of the {among[0].kind} is called {wish.like!r}",
        where="--like",
        fix=did_you_mean(wish.like, names),
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


def _check_what_stays(staying: Sequence[Unit], known: Sequence[Unit]) -> None:
    for kind in dict.fromkeys(unit.kind for unit in known):
        if not any(unit.kind == kind for unit in staying):
            raise ConfigError(
                f"none of the {kind} would stay",
                where="scale",
                fix="keep one of them, or end the run: realsys stop",
            )
    fed = frozenset[int]().union(*(unit.holders for unit in staying))
    if hungry := sorted(frozenset[int]().union(*(unit.holders for unit in known)) - fed):
        raise ConfigError(
            "nobody would send experience to "
            + ", ".join(f"model_worker/{i}" for i in hungry)
            + ", and all trainers step together",
            where="scale",
            fix="keep a maker that sends to them, or add one like it (--makers N --like NAME)",
        )
