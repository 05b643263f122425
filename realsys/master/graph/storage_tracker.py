"""Tracks which model worker holds which tensor, to plan a call's transfers. Master only."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from realsys.api.data import SequenceMeta

_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bool": 1, "uint8": 1, "int8": 1}
_FLOAT8 = "float8"  # of several kinds


class StorageTracker:
    """Maps (key, datapoint) to owners and size."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, set[int]]] = {}
        self._num_bytes: dict[tuple[str, str], int] = {}

    def add(self, meta: SequenceMeta, worker: int) -> None:
        """Records that ``worker`` now holds every key of ``meta``."""
        for key in meta.keys:
            dtype = meta.dtypes[key]
            item = 1 if dtype.startswith(_FLOAT8) else _ITEM_BYTES.get(dtype, 2)
            item *= prod(meta.trailing_shapes[key])
            for name, rows in zip(meta.ids, meta.rows_per_id(key), strict=True):
                self._owners.setdefault(name, {}).setdefault(key, set()).add(worker)
                self._num_bytes[name, key] = rows * item

    def owners(self, key: str, name: str) -> frozenset[int]:
        """Returns the workers that hold ``key`` of datapoint ``name``."""
        return frozenset(self._owners.get(name, {}).get(key, ()))

    def num_bytes(self, key: str, name: str) -> int:
        """Returns the size of ``key`` of datapoint ``name``."""
        return self._num_bytes[name, key]

    def forget(self, names: Iterable[str]) -> set[int]:
        """Drops finished datapoints; returns the workers that hold some of their tensors."""
        holders: set[int] = set()
        for name in names:
            for key, owners in self._owners.pop(name, {}).items():
                holders |= owners
                del self._num_bytes[name, key]
        return holders

    # ---- for a checkpoint -------------------------------------------------------------------

    def snapshot(self) -> list[tuple[str, str, list[int], int]]:
        """Returns (datapoint, key, owners, bytes) of all stored tensors."""
        return [
            (name, key, sorted(owners), self._num_bytes[name, key])
            for name, keys in self._owners.items()
            for key, owners in keys.items()
        ]

    def restore(self, rows: Iterable[tuple[str, str, list[int], int]]) -> None:
        """Restores what ``snapshot`` returned."""
        for name, key, owners, num_bytes in rows:
            self._owners.setdefault(name, {})[key] = set(owners)
            self._num_bytes[name, key] = num_bytes
