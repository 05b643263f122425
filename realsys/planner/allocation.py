"""Allocation of calls to model workers and topologies: pools and the allocation string (pure).

A *pool* is a named run of model workers: ``4`` is the next four in the order in which pools are
listed, ``0-3`` or ``0-1+6`` names them (such pools may overlap). An *allocation* is text, one entry
a call, a role or ``*`` for all others::

    actor_gen:d4t1p1@left,critic_train:d2t2p1@right,*:d2t2p1

A call takes the first workers of its pool. Which entry is a call's:
experiments/parts/call_placement.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from realsys.api.errors import ConfigError, Problems, did_you_mean, raise_all
from realsys.api.model import ProcessTopology

ALL = "*"
_ENTRY = re.compile(r"(\*|[\w-]+):([^:@,\s]+)(?:@([\w-]+))?")
_POOL_NAME = re.compile(r"[A-Za-z][\w-]*")
_SIZE = re.compile(r"[1-9][0-9]{0,4}")  # larger than any job
_PIECE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


@dataclass(frozen=True, kw_only=True)
class CallAllocation:
    """Place of a call: the model worker of each parallelism rank, and the topology over them."""

    workers: tuple[int, ...]
    topology: ProcessTopology

    def __post_init__(self) -> None:
        distinct = len(set(self.workers))
        if not distinct == len(self.workers) == self.topology.world_size:
            raise ConfigError(
                f"layout {self.topology} has {self.topology.world_size} processes, "
                f"the workers are {list(self.workers)}",
                where="CallAllocation",
                fix="give as many workers, each once",
            )


@dataclass(frozen=True, kw_only=True)
class AllocationEntry:
    """One entry of an allocation string; ``name`` is a call, a role or ``*``."""

    name: str
    topology: ProcessTopology
    pool: str | None = None

    def __str__(self) -> str:
        return f"{self.name}:{self.topology}" + (f"@{self.pool}" if self.pool else "")


# ---- pools ------------------------------------------------------------------------------------------


def parse_pools(
    pools: Mapping[str, str], *, n_workers: int | None = None, where: str = "placement.pools"
) -> dict[str, tuple[int, ...]]:
    """Parses pools; returns the model workers of each, in order.

    Args:
        n_workers: number of workers; None: as many as the pools name.
    Raises:
        ConfigErrors: every pool that is invalid or exceeds ``n_workers``.
    """
    found: dict[str, tuple[int, ...]] = {}
    problems = Problems()
    begin = 0
    for name, text in pools.items():
        here = f"{where}.{name}"
        try:
            workers = _pool_workers(name, text, begin, here)
        except ConfigError as problem:
            problems.append(problem)
            continue
        if _SIZE.fullmatch(text):
            begin = workers[-1] + 1
        if n_workers is not None and max(workers) >= n_workers:
            problems.add(
                f"pool {name!r} is model workers {workers_text(workers)}, "
                f"there are {n_workers} (0-{n_workers - 1})",
                where=f"{here} and placement.n_model_workers",
                fix=f"use placement.n_model_workers={max(workers) + 1}, or a smaller pool",
            )
        found[name] = workers
    raise_all(problems)
    return found


def _pool_workers(name: str, text: str, begin: int, where: str) -> tuple[int, ...]:
    if not _POOL_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid pool name",
            where=where,
            fix="use letters, digits, '-' and '_', a letter first",
        )
    workers = tuple(w for run in _runs(text, begin) for w in run)
    if not workers or len(set(workers)) < len(workers):
        raise ConfigError(
            f"{text!r} is not a set of model workers",
            where=where,
            fix="write how many (4), which (0-3), or several of these (0-1+6), each worker once",
        )
    return workers


def _runs(text: str, begin: int) -> list[range]:
    """Returns the runs of workers that a pool's text names; empty if the text is invalid."""
    if size := _SIZE.fullmatch(text):
        return [range(begin, begin + int(size[0]))]
    pieces = [_PIECE.fullmatch(piece) for piece in text.split("+")]
    runs = [range(int(p[1]), int(p[2] or p[1]) + 1) for p in pieces if p]
    whole = len(runs) == len(pieces) and not text.isdecimal()  # 5-5 is worker 5, 5 a size
    return runs if whole and all(runs) else []


def workers_text(workers: Iterable[int]) -> str:
    """Formats workers as ``0-3``, ``0-1+6``, ``5``."""
    runs: list[list[int]] = []
    for worker in workers:
        if runs and runs[-1][-1] + 1 == worker:
            runs[-1].append(worker)
        else:
            runs.append([worker])
    return "+".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


# ---- the allocation string ---------------------------------------------------------------------------


def parse_allocation(
    text: str,
    *,
    calls: Mapping[str, str],
    pools: Collection[str] = (),
    where: str = "placement.allocation",
) -> tuple[AllocationEntry, ...]:
    """Parses the entries of ``text``, in its order; an empty text has none.

    Args:
        calls: name of a call → its role.
        pools: names that may follow ``@``.
    Raises:
        ConfigErrors: every invalid entry, unknown or repeated name, and unknown pool.
    """
    problems = Problems()
    entries: list[AllocationEntry] = []
    for part in (p.strip() for p in text.split(",")) if text.strip() else ():
        match = _ENTRY.fullmatch(part)
        if match is None:
            problems.add(
                f"{part!r} is not an entry of an allocation",
                where=where,
                fix="write name:layout or name:layout@pool with commas between, "
                "e.g. actor_gen:d4t1p1@left,*:d2t2p1",
            )
            continue
        name, layout, pool = match.groups()
        try:
            topology = ProcessTopology.parse(layout, where=f"{where}, {part}")
        except ConfigError as problem:
            problems.append(problem)
            topology = ProcessTopology()
        entry = AllocationEntry(name=name, topology=topology, pool=pool)
        problems += _name_problems(entry, entries, calls, pools, f"{where}, {part}")
        entries.append(entry)
    raise_all(problems)
    return tuple(entries)


def _name_problems(
    entry: AllocationEntry,
    earlier: Iterable[AllocationEntry],
    calls: Mapping[str, str],
    pools: Collection[str],
    where: str,
) -> Iterable[ConfigError]:
    known = {ALL, *calls, *calls.values()}
    if entry.name not in known:
        yield ConfigError(
            f"no call or role called {entry.name!r}",
            where=where,
            fix=did_you_mean(entry.name, known - {ALL}),
        )
    if any(other.name == entry.name for other in earlier):
        yield ConfigError(f"{entry.name} is given twice", where=where, fix="keep one entry")
    if entry.pool is not None and entry.pool not in pools:
        yield unknown_pool(entry.pool, pools, where)


def unknown_pool(name: str, pools: Collection[str], where: str) -> ConfigError:
    """Makes the error for an undefined pool."""
    fix = did_you_mean(name, pools) if pools else f"define it, e.g. placement.pools.{name}=4"
    return ConfigError(f"no pool called {name!r}", where=where, fix=fix)


def format_entries(entries: Iterable[AllocationEntry]) -> str:
    """Formats entries as the text that ``parse_allocation`` parses."""
    return ",".join(str(entry) for entry in entries)


def format_allocation(calls: Mapping[str, CallAllocation]) -> tuple[dict[str, str], str]:
    """Formats ``pools`` and ``allocation`` that place every call exactly as in ``calls``."""
    pools: dict[str, str] = {}
    entries = []
    for name, call in calls.items():
        text = workers_text(call.workers)
        pool = "w" + text.replace("+", "_")
        pools[pool] = f"{text}-{text}" if text.isdecimal() else text  # "5" alone would be a size
        entries.append(AllocationEntry(name=name, topology=call.topology, pool=pool))
    return pools, format_entries(entries)
