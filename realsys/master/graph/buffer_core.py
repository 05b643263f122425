"""Tracks which datapoint has which keys, and which call may take it next (pure: no loop, clock or
tensor).

Cost grows with the datapoints that are alive, never with a capacity: each call has a heap of the
datapoints that have all its input keys and that it has not had yet, ordered by birth. A datapoint leaves
when every call has had it.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from realsys.api.data import SequenceMeta
from realsys.api.errors import DataError, InternalError

_T = TypeVar("_T", bound=Hashable)
_Place = tuple[SequenceMeta, int]  # a batch that was brought, and a position in it


@dataclass
class _Slot:
    birth: int
    missing: dict[str, int]  # call → input keys it still waits for
    left: set[str]  # calls that have not had it
    keys: dict[str, _Place] = field(default_factory=dict)
    metadata: dict[str, _Place] = field(default_factory=dict)


class SequenceBufferCore:
    """Datapoints waiting for the calls that read them.

    Args:
        input_keys: call → keys that it reads.
        n_seqs: call → datapoints per batch.
    """

    def __init__(
        self, *, input_keys: Mapping[str, Sequence[str]], n_seqs: Mapping[str, int]
    ) -> None:
        self._input_keys = {call: tuple(keys) for call, keys in input_keys.items()}
        self._n_seqs = dict(n_seqs)
        self._readers: dict[str, list[str]] = {}
        for call, keys in self._input_keys.items():
            for key in keys:
                self._readers.setdefault(key, []).append(call)
        self._slots: dict[str, _Slot] = {}
        self._ready: dict[str, list[tuple[int, str]]] = {call: [] for call in self._input_keys}
        self._births = 0

    def __len__(self) -> int:
        return len(self._slots)

    def put(self, meta: SequenceMeta) -> None:
        """Adds new datapoints, in the order of ``meta``.

        Raises:
            DataError: an id is in the buffer already.
        """
        twice = [i for i in meta.ids if i in self._slots]
        if twice:
            raise DataError(
                f"datapoints {twice[:3]} are in the buffer already",
                where="sequence buffer",
                fix="give each pass over the data set ids of its own",
            )
        self._give_birth(meta, had=())

    def _give_birth(self, meta: SequenceMeta, had: Iterable[str]) -> None:
        for i, name in enumerate(meta.ids):
            missing = {call: len(keys) for call, keys in self._input_keys.items()}
            self._slots[name] = _Slot(self._births, missing, set(self._input_keys).difference(had))
            self._births += 1
            self._add_keys(name, meta, i)

    def amend(self, meta: SequenceMeta) -> None:
        """Adds new keys to datapoints in the buffer.

        Raises:
            DataError: a datapoint is not here, or has one of the keys already.
        """
        for i, name in enumerate(meta.ids):
            slot = self._slots.get(name)
            if slot is None or not slot.keys.keys().isdisjoint(meta.seqlens):
                problem = "is not in the buffer" if slot is None else "has that key already"
                raise DataError(
                    f"keys {sorted(meta.keys)} for datapoint {name!r}, which {problem}",
                    where="sequence buffer",
                    fix="report this as a bug: two calls made one key, or one ran too late",
                )
            self._add_keys(name, meta, i)

    def _add_keys(self, name: str, meta: SequenceMeta, i: int) -> None:
        slot, place = self._slots[name], (meta, i)
        slot.metadata.update(dict.fromkeys(meta.metadata, place))
        for key in meta.seqlens:
            slot.keys[key] = place
            for call in self._readers.get(key, ()):
                slot.missing[call] -= 1
                if slot.missing[call] == 0 and call in slot.left:
                    heapq.heappush(self._ready[call], (slot.birth, name))

    def take(self, call: str, n_seqs: int | None = None) -> SequenceMeta | None:
        """Takes the oldest batch for ``call``, with its input keys; returns None if there are too few.

        Args:
            n_seqs: datapoints to take; None: the call's own number.
        """
        ready, wanted = self._ready[call], n_seqs or self._n_seqs[call]
        if len(ready) < wanted:
            return None
        names = [heapq.heappop(ready)[1] for _ in range(wanted)]
        for name in names:
            self._slots[name].left.discard(call)
        return self._gather(names, self._input_keys[call])

    def _gather(self, names: Sequence[str], keys: Iterable[str]) -> SequenceMeta:
        slots = [self._slots[name] for name in names]
        places = {key: [slot.keys[key] for slot in slots] for key in keys}
        told = {
            name: [slot.metadata[name] for slot in slots]
            for name in sorted(set(slots[0].metadata).intersection(*(s.metadata for s in slots)))
        }
        return SequenceMeta(
            ids=tuple(names),
            seqlens={k: tuple(m.seqlens[k][i] for m, i in at) for k, at in places.items()},
            dtypes={k: _only(m.dtypes[k] for m, _ in at) for k, at in places.items()},
            trailing_shapes={
                k: _only(m.trailing_shapes[k] for m, _ in at) for k, at in places.items()
            },
            metadata={n: tuple(m.metadata[n][i] for m, i in at) for n, at in told.items()},
        )

    def pop_used(self, names: Sequence[str]) -> list[str]:
        """Drops those of ``names`` that every call has had; returns them."""
        used = []
        for name in names:
            slot = self._slots.get(name)
            if slot is None:
                raise InternalError(f"datapoint {name!r} is not in the buffer", where="pop_used")
            if not slot.left:
                del self._slots[name]
                used.append(name)
        return used

    def drop(self, names: Iterable[str]) -> None:
        """Drops datapoints, whichever calls have had them."""
        gone = set(names)
        for name in gone:
            del self._slots[name]
        for ready in self._ready.values():
            ready[:] = [entry for entry in ready if entry[1] not in gone]
            heapq.heapify(ready)

    # ---- for a checkpoint -------------------------------------------------------------------

    def snapshot(self) -> list[tuple[SequenceMeta, tuple[str, ...]]]:
        """Returns the datapoints in order of birth, grouped by equal state, with the calls that have had
        them."""
        parts: list[tuple[list[str], tuple[str, ...], tuple[str, ...]]] = []
        for name, slot in sorted(self._slots.items(), key=lambda item: item[1].birth):
            had = tuple(sorted(self._input_keys.keys() - slot.left))
            keys = tuple(sorted(slot.keys))
            if parts and parts[-1][1:] == (keys, had):
                parts[-1][0].append(name)
            else:
                parts.append(([name], keys, had))
        return [(self._gather(names, keys), had) for names, keys, had in parts]

    def restore(self, meta: SequenceMeta, had: Sequence[str]) -> None:
        """Restores datapoints as returned by ``snapshot``."""
        self._give_birth(meta, had)

    def describe(self) -> dict[str, str]:
        """Returns call → ready of wanted datapoints, for the error of a waiting call."""
        return {call: f"{len(r)}/{self._n_seqs[call]}" for call, r in self._ready.items()}


def _only(values: Iterable[_T]) -> _T:
    """Returns the common value.

    Raises:
        DataError: they differ.
    """
    distinct = set(values)
    if len(distinct) > 1:
        raise DataError(
            f"datapoints of one batch differ: {sorted(map(str, distinct))}",
            where="sequence buffer",
            fix="let every worker make the same keys, of one dtype and shape",
        )
    return distinct.pop()
