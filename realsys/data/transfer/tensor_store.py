"""Tensors that one model worker holds, by datapoint and key.

Written by the worker's compute thread, read by it and by the transfer server's thread; one lock. GPU
tensors may still be pending when stored: other threads wait for their ``write_events``. Each tensor is the
datapoint's own copy or a view of the batch it was made in; none is changed once stored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from realsys.api.data import SequenceMeta
from realsys.api.errors import DataError
from realsys.data.sequence_sample import SequenceSample
from realsys.devices.streams import written


class TensorStore:
    """Maps (datapoint id, key) to that datapoint's rows."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, torch.Tensor]] = {}
        # Datapoint → events after which the GPU has written all of it.
        self._write_events: dict[str, Any] = {}
        self._lock = threading.Lock()

    def put(self, sample: SequenceSample) -> None:
        """Stores every key of ``sample``, datapoint by datapoint."""
        pieces = {
            key: torch.split(x, list(sample.meta.rows_per_id(key)))
            for key, x in sample.data.items()
        }
        moment = written(sample.data.values())
        with self._lock:
            if moment is not None:
                self._write_events.update(dict.fromkeys(sample.ids, moment))
            for i, name in enumerate(sample.ids):
                row = self._rows.setdefault(name, {})
                for key, parts in pieces.items():
                    row[key] = parts[i]

    def get(self, meta: SequenceMeta) -> SequenceSample:
        """Returns the batch that ``meta`` describes.

        Raises:
            DataError: a tensor is missing; names key and datapoint.
        """
        data = {key: _concatenated(self.rows(key, meta.ids)) for key in meta.seqlens}
        return SequenceSample.from_meta(meta, data)

    def rows(self, key: str, ids: Sequence[str]) -> list[torch.Tensor]:
        """Returns the rows of ``ids`` under ``key``, one tensor each."""
        with self._lock:
            try:
                return [self._rows[name][key] for name in ids]
            except KeyError:
                missing = [n for n in ids if key not in self._rows.get(n, {})]
        raise DataError(
            f"key {key!r} of datapoints {missing[:3]} is not on this worker",
            where="tensor store",
            fix="report this as a bug: the transfer plan should have fetched it",
        )

    def write_events(self, ids: Iterable[str]) -> list[Any]:
        """Returns the GPU events after which these datapoints are written (realsys/devices/streams.py)."""
        with self._lock:
            return [self._write_events[name] for name in ids if name in self._write_events]

    def put_rows(self, key: str, rows: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Stores rows received from another worker."""
        with self._lock:
            for name, x in rows:
                self._rows.setdefault(name, {})[key] = x

    def clear(self, ids: Iterable[str]) -> None:
        """Removes datapoints; unknown ids are ignored."""
        with self._lock:
            for name in ids:
                self._rows.pop(name, None)
                self._write_events.pop(name, None)

    def __len__(self) -> int:
        return len(self._rows)

    # ---- for a checkpoint -------------------------------------------------------------------

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies everything in the store: datapoint → key → rows."""
        with self._lock:
            return {
                name: {key: x.to("cpu", copy=True) for key, x in keys.items()}
                for name, keys in self._rows.items()
            }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Restores what ``state_dict`` returned."""
        with self._lock:
            for name, keys in state.items():
                self._rows.setdefault(name, {}).update(keys)


def _concatenated(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates ``rows`` into a new tensor."""
    if len({x.device for x in rows}) > 1:  # rows from peers are in host memory
        rows = [x.cpu() for x in rows]
    return torch.cat(list(rows))
