"""Plans which worker sends which parts of which weights, from one layout of a model to another (pure).

What a target worker also holds of the source copy is copied locally. Everything else is sent exactly once
to each worker that needs it. Every worker derives the same plan from the same arguments, without
communication.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from realsys.api.errors import ConfigError, InternalError
from realsys.models.shape import DTYPE_BYTES, Weight
from realsys.weights.layouts.boxes import Box, Layout
from realsys.weights.layouts.regions import Region, regions_of
from realsys.weights.realloc.buckets import WeightPiece
from realsys.weights.realloc.senders import RegionDemand, Workers, assign_senders, busiest_bound

MIN_CUT_BYTES = 64 << 10  # below it, another message costs more than an uneven load


@dataclass(frozen=True, kw_only=True)
class ReallocPlan:
    """Plan of a weight transfer between two copies of a model.

    Attributes:
        streams: (sender, receiver) → pieces, in the order in which they are sent.
        copies: worker → pieces that it holds of both copies.
        dtypes: weight → dtype in which it is sent.
        rounded: weight → the source's dtype, for weights that are rounded on purpose when sent.
        bytes_sent: worker → bytes that it sends; workers that send nothing are omitted.
        lower_bound: bytes that must be sent under any choice of senders: everything that target
            workers need and do not hold of the source copy.
        busiest_bound: lower bound on the bytes of the busiest sender under any choice of senders.
    """

    streams: Mapping[tuple[int, int], tuple[WeightPiece, ...]]
    copies: Mapping[int, tuple[WeightPiece, ...]]
    dtypes: Mapping[str, str]
    bytes_sent: Mapping[int, int]
    lower_bound: int
    busiest_bound: int
    rounded: Mapping[str, str] = field(default_factory=dict)

    def sends(self, worker: int) -> dict[int, tuple[WeightPiece, ...]]:
        """Pieces that ``worker`` sends, by receiver."""
        return {r: pieces for (s, r), pieces in self.streams.items() if s == worker}

    def receives(self, worker: int) -> dict[int, tuple[WeightPiece, ...]]:
        """Pieces that ``worker`` receives, by sender."""
        return {s: pieces for (s, r), pieces in self.streams.items() if r == worker}

    def num_bytes(self, pieces: Iterable[WeightPiece]) -> int:
        """Size of the pieces as sent, in bytes."""
        return sum(p.box.numel * DTYPE_BYTES[self.dtypes[p.name]] for p in pieces)

    def fan_out(self, sender: int, receiver: int) -> int:
        """Number of pairs at the busier end of this pair: the sender's receivers or the receiver's
        senders.
        """
        receivers = sum(s == sender for s, _ in self.streams)
        senders = sum(r == receiver for _, r in self.streams)
        return max(receivers, senders)


def plan_realloc(
    weights: Iterable[Weight],
    source: Layout,
    source_workers: Sequence[int],
    target: Layout,
    target_workers: Sequence[int],
    *,
    dtype: str | Mapping[str, str] = "float32",
    rounded: Mapping[str, str] | None = None,
    names: Collection[str] | None = None,
    min_cut_bytes: int = MIN_CUT_BYTES,
) -> ReallocPlan:
    """Plans the transfer that fills the target copy with the weights of the source copy.

    Args:
        weights: order of the transfer. Other weights of the target (adapters) follow.
        source, target: holdings by parallelism rank.
        source_workers, target_workers: model workers by parallelism rank; a worker may be in both.
        dtype: dtype of sent weights, one for all or by name: the source copy's, or a wider one.
        rounded: weight → the source copy's dtype, for weights sent in a narrower one.
        names: transfer only these weights (adapters).
        min_cut_bytes: smaller regions are not split between senders.
    Raises:
        ConfigError: the source lacks weights of the target, ``names`` has unknown ones, or a dtype
            is unknown.
    """
    _check_ranks("source", source, source_workers)
    _check_ranks("target", target, target_workers)
    moved = _moved(weights, target, names)
    dtypes = {name: dtype if isinstance(dtype, str) else dtype.get(name, "") for name in moved}
    _check_dtypes(dtypes)
    cells = _Regions(source, source_workers, target, target_workers)
    made = _PlanBuilder(moved)
    missing = []
    for order, name in enumerate(moved):
        itemsize = DTYPE_BYTES[dtypes[name]]
        for cell in cells.of(name):
            if not cell.holders:
                missing.append(name)
                break
            made.add(order, cell, cell.box.numel * itemsize)
    if missing:
        raise _not_covered(missing)
    return replace(made.plan(dtypes, min_cut_bytes), rounded=rounded or {})


def sent_dtypes(
    source: Mapping[str, str], target: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Computes ``dtype`` and ``rounded`` of a plan between copies that hold weights in different dtypes.

    Weights are sent in the narrower dtype, since the other end can't hold more precision. Moving averages
    are float32 on both ends (``held_dtype``), and are sent as such.
    """
    pairs = {name: (source.get(name, kind), kind) for name, kind in target.items()}
    dtype = {name: min(pair, key=lambda k: DTYPE_BYTES.get(k, 0)) for name, pair in pairs.items()}
    return dtype, {name: pair[0] for name, pair in pairs.items() if dtype[name] != pair[0]}


class _PlanBuilder:
    """A plan under construction, extended weight by weight."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._order = {name: order for order, name in enumerate(names)}
        self._streams: dict[tuple[int, int], list[WeightPiece]] = {}
        self._copies: dict[int, list[WeightPiece]] = {}
        self._choices: dict[Workers, list[RegionDemand]] = {}
        self._totals: dict[Workers, int] = {}

    def add(self, order: int, cell: Region, num_bytes: int) -> None:
        """Adds the transfers that a cell of ``num_bytes`` needs."""
        name, (box, holders, receivers) = self._names[order], cell
        remote = [receiver for receiver in receivers if receiver not in holders]
        for receiver in receivers:
            if receiver in holders:
                self._copies.setdefault(receiver, []).append(WeightPiece(name, box))
        if remote:
            self._totals[holders] = self._totals.get(holders, 0) + num_bytes * len(remote)
            demands = self._choices.setdefault(holders, [])
            demands += [RegionDemand(receiver, order, box, num_bytes) for receiver in remote]

    def plan(self, dtypes: Mapping[str, str], min_cut_bytes: int) -> ReallocPlan:
        """Returns the complete plan, with senders chosen."""
        bytes_sent: dict[int, int] = {}
        for sender, demand in assign_senders(self._choices, min_cut_bytes=min_cut_bytes):
            piece = WeightPiece(self._names[demand.order], demand.box)
            self._streams.setdefault((sender, demand.receiver), []).append(piece)
            bytes_sent[sender] = bytes_sent.get(sender, 0) + demand.num_bytes
        for pieces in self._streams.values():
            pieces.sort(key=lambda p: self._order[p.name])  # they were grouped by holders
        return ReallocPlan(
            streams={pair: tuple(self._streams[pair]) for pair in sorted(self._streams)},
            copies={worker: tuple(pieces) for worker, pieces in self._copies.items()},
            dtypes=dtypes,
            bytes_sent=bytes_sent,
            lower_bound=sum(self._totals.values()),
            busiest_bound=busiest_bound(self._totals),
        )


_Held = tuple[tuple[int, tuple[Box, ...]], ...]  # (worker, its boxes of a weight)


class _Regions:
    """Cells of weights; layers are split alike, so each kind of weight is computed once."""

    def __init__(
        self,
        source: Layout,
        source_workers: Sequence[int],
        target: Layout,
        target_workers: Sequence[int],
    ) -> None:
        self._source = tuple(zip(source_workers, source, strict=True))
        self._target = tuple(zip(target_workers, target, strict=True))
        self._known: dict[tuple[_Held, _Held], list[Region]] = {}

    def of(self, name: str) -> list[Region]:
        source = tuple((w, held[name]) for w, held in self._source if name in held)
        target = tuple((w, held[name]) for w, held in self._target if name in held)
        if (source, target) not in self._known:
            self._known[source, target] = regions_of(source, target)
        return self._known[source, target]


def _moved(
    weights: Iterable[Weight], target: Layout, names: Collection[str] | None
) -> Sequence[str]:
    """Names of the weights to transfer: the model's in order, then others (adapters) by name."""
    held = set().union(*target)
    own = [w.name for w in weights if w.name in held]
    moved = own + sorted(held.difference(own))
    if names is None:
        return moved
    if unknown := sorted(set(names) - held):
        raise ConfigError(
            f"the target copy does not hold {len(unknown)} weights that should move: {_some(unknown)}",
            where="weight reallocation, names",
            fix="name weights as the target's layout does",
        )
    wanted = set(names)
    return [name for name in moved if name in wanted]


def _check_ranks(side: str, layout: Layout, workers: Sequence[int]) -> None:
    if len(layout) != len(workers) or len(set(workers)) != len(workers):
        raise InternalError(
            f"the {side} copy has {len(layout)} ranks on workers {list(workers)}",
            where="weight reallocation",
            fix="give every rank a worker of its own",
        )


def _check_dtypes(dtypes: Mapping[str, str]) -> None:
    unknown = {name: kind for name, kind in dtypes.items() if kind not in DTYPE_BYTES}
    if unknown:
        name, kind = next(iter(unknown.items()))
        raise ConfigError(
            f"{len(unknown)} weights have no known dtype, e.g. {name!r} has {kind!r}",
            where="weight reallocation, dtype",
            fix="use one of " + ", ".join(DTYPE_BYTES),
        )


def _not_covered(names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"the source copy does not hold all of {len(names)} weights that the target needs: "
        + _some(names),
        where="weight reallocation",
        fix="both copies must be of one model; name the weights to move where one has more",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
