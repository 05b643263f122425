"""Which datapoint has which keys, and who may take it next (pure: no loop, no clock, no tensor).

Cost grows with the datapoints that are alive, never with a capacity: for each call there is a heap of
the datapoints that have all its input keys and that it has not had yet, ordered by birth. A datapoint
leaves when every call has had it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from realsys.api.data import SequenceMeta
from realsys.api.errors import DataError, InternalError


@dataclass
class _Slot:
    birth: int
    meta: SequenceMeta  # of this one datapoint
    missing: dict[str, int]  # call → input keys it still waits for
    left: set[str]  # calls that have not had it


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
        """New datapoints, in the order of ``meta``.

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
        for i, name in enumerate(meta.ids):
            missing = {call: len(keys) for call, keys in self._input_keys.items()}
            nothing = SequenceMeta(ids=(name,))
            self._slots[name] = _Slot(self._births, nothing, missing, set(self._input_keys))
            self._births += 1
            self._add_keys(name, meta.take([i]))

    def amend(self, meta: SequenceMeta) -> None:
        """New keys for datapoints that are here.

        Raises:
            DataError: a datapoint is not here, or has one of the keys already.
        """
        for i, name in enumerate(meta.ids):
            slot = self._slots.get(name)
            if slot is None or slot.meta.keys & meta.keys:
                problem = "is not in the buffer" if slot is None else "has that key already"
                raise DataError(
                    f"keys {sorted(meta.keys)} for datapoint {name!r}, which {problem}",
                    where="sequence buffer",
                    fix="report this as a bug: two calls made one key, or one ran too late",
                )
            self._add_keys(name, meta.take([i]))

    def _add_keys(self, name: str, meta: SequenceMeta) -> None:
        slot = self._slots[name]
        slot.meta = slot.meta.update(meta)
        for key in meta.keys:
            for call in self._readers.get(key, ()):
                slot.missing[call] -= 1
                if slot.missing[call] == 0 and call in slot.left:
                    heapq.heappush(self._ready[call], (slot.birth, name))

    def num_ready(self, call: str) -> int:
        """Datapoints that ``call`` could take now."""
        return len(self._ready[call])

    def take(self, call: str) -> SequenceMeta | None:
        """The oldest batch for ``call``, with its input keys; None while there are too few."""
        ready = self._ready[call]
        if len(ready) < self._n_seqs[call]:
            return None
        names = [heapq.heappop(ready)[1] for _ in range(self._n_seqs[call])]
        for name in names:
            self._slots[name].left.discard(call)
        keys = self._input_keys[call]
        return SequenceMeta.gather([self._slots[n].meta.select(keys) for n in names])

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

    # ---- for a checkpoint -------------------------------------------------------------------

    def snapshot(self) -> list[tuple[SequenceMeta, tuple[str, ...]]]:
        """Datapoints in order of birth, those alike together, with the calls that have had them."""
        parts: list[tuple[list[SequenceMeta], tuple[str, ...]]] = []
        for slot in sorted(self._slots.values(), key=lambda slot: slot.birth):
            had = tuple(sorted(self._input_keys.keys() - slot.left))
            alike = parts and parts[-1][1] == had and parts[-1][0][0].keys == slot.meta.keys
            if alike:
                parts[-1][0].append(slot.meta)
            else:
                parts.append(([slot.meta], had))
        return [(SequenceMeta.gather(metas), had) for metas, had in parts]

    def restore(self, meta: SequenceMeta, had: Sequence[str]) -> None:
        """Datapoints as ``snapshot`` gave them."""
        for i, name in enumerate(meta.ids):
            missing = {call: len(keys) for call, keys in self._input_keys.items()}
            left = self._input_keys.keys() - set(had)
            self._slots[name] = _Slot(self._births, SequenceMeta(ids=(name,)), missing, set(left))
            self._births += 1
            self._add_keys(name, meta.take([i]))

    def describe(self) -> dict[str, str]:
        """Call → ready of wanted datapoints: what a waiting call waits for."""
        return {call: f"{len(r)}/{self._n_seqs[call]}" for call, r in self._ready.items()}
