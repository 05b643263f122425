"""A batch with its tensors, the input and output of interfaces and engines.

``SequenceSample`` is a ``SequenceMeta`` (realsys/api/data.py, which defines the layout and the index
arithmetic) and one tensor per key. Methods return new samples and never write to a tensor. If the
selected rows are contiguous, the new sample is a view of the old one: clone before writing in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import index
from typing import Any

import torch

from realsys.api.data import MicroBatchSpec, SequenceMeta
from realsys.api.errors import DataError, did_you_mean
from realsys.data.packing import Run, pack_microbatches, runs_within


@dataclass(frozen=True, eq=False)
class SequenceSample:
    """A batch: ids, and for each key a tensor packed along dimension 0 in the order of the ids.

    Raises:
        DataError: tensors and description disagree in keys, rows, dtype or trailing shape.
    """

    meta: SequenceMeta
    data: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        if self.data.keys() != self.meta.seqlens.keys():
            raise DataError(
                f"tensors for keys {sorted(self.data)}, description of {sorted(self.meta.keys)}",
                where="SequenceSample",
                fix="pass one tensor for every described key",
            )
        for key, x in self.data.items():
            self._check(key, x)

    @staticmethod
    def from_tensors(
        ids: Sequence[str],
        seqlens: Mapping[str, Sequence[Sequence[int]]],
        data: Mapping[str, torch.Tensor],
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> SequenceSample:
        """Makes a sample from tensors, taking dtypes and trailing shapes from them.

        Args:
            seqlens: key → for each id the lengths of its pieces.
            metadata: name → one plain value per id.
        """
        meta = SequenceMeta(
            ids=tuple(ids),
            seqlens={k: _lengths(k, per_id) for k, per_id in seqlens.items()},
            dtypes={k: _dtype_name(x) for k, x in data.items()},
            trailing_shapes={k: tuple(x.shape[1:]) for k, x in data.items()},
            metadata={k: tuple(values) for k, values in (metadata or {}).items()},
        )
        return SequenceSample(meta, dict(data))

    @staticmethod
    def from_meta(meta: SequenceMeta, data: Mapping[str, torch.Tensor]) -> SequenceSample:
        """Makes the batch that ``meta`` describes from ``data``, which may hold more keys."""
        if missing := sorted(meta.keys - data.keys()):
            raise DataError(
                f"no tensor for key {missing[0]!r}",
                where=f"tensors {sorted(data)}",
                fix=did_you_mean(missing[0], data),
            )
        return SequenceSample(meta, {k: data[k] for k in meta.seqlens})

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the datapoints, in order."""
        return self.meta.ids

    @property
    def keys(self) -> frozenset[str]:
        """Names of the tensors."""
        return self.meta.keys

    @property
    def batch_size(self) -> int:
        """Number of ids."""
        return self.meta.batch_size

    def piece_lengths(self, key: str) -> list[int]:
        """Length of every piece under ``key``, over all ids in order, as attention kernels need it."""
        self.meta.rows_per_id(key)  # raises DataError for a missing key
        return [n for pieces in self.meta.seqlens[key] for n in pieces]

    def cu_seqlens(self, key: str) -> torch.Tensor:
        """Cumulative piece lengths, int32 ``[pieces + 1]`` on the key's device."""
        bounds = list(accumulate(self.piece_lengths(key), initial=0))
        return torch.tensor(bounds, dtype=torch.int32, device=self.data[key].device)

    def select(self, keys: Iterable[str]) -> SequenceSample:
        """Keeps only ``keys``, for the same ids."""
        meta = self.meta.select(keys)
        return SequenceSample(meta, {k: self.data[k] for k in meta.seqlens})

    def remap(self, names: Mapping[str, str]) -> SequenceSample:
        """Renames keys by ``names`` (old → new); others keep their name."""
        meta = self.meta.remap(names)
        return SequenceSample(meta, {names.get(k, k): x for k, x in self.data.items()})

    def update(self, other: SequenceSample) -> SequenceSample:
        """Adds or replaces keys and metadata from ``other``, which has the same ids in order."""
        return SequenceSample(self.meta.update(other.meta), {**self.data, **other.data})

    def to(self, device: torch.device | str) -> SequenceSample:
        """Moves the batch to ``device``."""
        return SequenceSample(self.meta, {k: x.to(device) for k, x in self.data.items()})

    def take(self, indices: Sequence[int]) -> SequenceSample:
        """Selects the ids at ``indices``, in that order."""
        return self._cut([indices])[0]

    def reorder(self, ids: Sequence[str]) -> SequenceSample:
        """Selects the datapoints ``ids``, in that order."""
        return self.take(self.meta.index_of(ids))

    def split(self, parts: Sequence[int] | Sequence[Sequence[int]]) -> list[SequenceSample]:
        """Splits the batch by sizes (``[3, 1]``) or by index lists (``[[0, 2, 3], [1]]``).

        Raises:
            DataError: the parts don't hold every id exactly once.
        """
        lists: list[Sequence[int]] = []
        start = 0
        for part in parts:
            lists.append(range(start, start + part) if isinstance(part, int) else part)
            start += len(lists[-1])
        if sorted(i for part in lists for i in part) != list(range(self.batch_size)):
            raise DataError(
                f"parts {[list(p) for p in lists][:4]} don't split {self.batch_size} ids",
                where="SequenceSample.split",
                fix="put every index from 0 to batch_size - 1 into one part; take() makes subsets",
            )
        return self._cut(lists)

    def unpack(self) -> list[SequenceSample]:
        """Splits the batch into one sample per id."""
        return self._cut([[i] for i in range(self.batch_size)])

    def microbatches(self, mb_spec: MicroBatchSpec) -> list[tuple[list[Run], SequenceSample]]:
        """Splits the batch into the micro-batches that ``mb_spec`` allows, each with its runs of
        sequences.

        Each run is an id of its micro-batch, see ``runs_within``, ``pack_microbatches`` and
        ``SequenceMeta.parted``. An id's longest key counts against the limit. Which sequences go
        together depends on lengths alone.
        """
        runs = runs_within(self.meta.pieces_per_id(), max_tokens=mb_spec.max_tokens_per_mb)
        parted = self if len(runs) == self.batch_size else self._parted(runs)
        pieces = pack_microbatches(
            parted.meta.tokens_per_id(),
            max_tokens=mb_spec.max_tokens_per_mb,
            min_num=mb_spec.n_mbs,
        )
        return [
            ([runs[i] for i in p], mb) for p, mb in zip(pieces, parted._cut(pieces), strict=True)
        ]

    @staticmethod
    def gather(parts: Sequence[SequenceSample]) -> SequenceSample:
        """Concatenates batches along ids. All must have the same keys, dtypes and shapes."""
        meta = SequenceMeta.gather([p.meta for p in parts])
        if len(parts) == 1:
            return parts[0]
        return SequenceSample(
            meta, {k: torch.cat([p.data[k] for p in parts]) for k in meta.seqlens}
        )

    def _cut(self, parts: Sequence[Sequence[int]]) -> list[SequenceSample]:
        if bad := [i for part in parts for i in part if not 0 <= i < self.batch_size]:
            raise DataError(
                f"index {bad[0]} in a batch of {self.batch_size} ids",
                where="SequenceSample.take",
                fix="use indices from 0 to batch_size - 1",
            )
        metas = [self.meta.take(part) for part in parts]
        data: list[dict[str, torch.Tensor]] = [{} for _ in parts]
        for key, x in self.data.items():
            starts = list(accumulate(self.meta.rows_per_id(key), initial=0))
            for part, tensors in zip(parts, data, strict=True):
                tensors[key] = _rows(x, starts, part)
        return [SequenceSample(m, d) for m, d in zip(metas, data, strict=True)]

    def _parted(self, runs: Sequence[Run]) -> SequenceSample:
        meta, data = self.meta.parted(runs), dict(self.data)
        for key, x in data.items():
            rows = meta.rows_per_id(key)
            if sum(rows) != len(x):  # a piece of the whole id is copied to each of its runs
                starts = list(accumulate(self.meta.rows_per_id(key), initial=0))
                data[key] = torch.cat(
                    [
                        x.narrow(0, starts[i] + (sum(pieces[:a]) if num < sum(pieces) else 0), num)
                        for (i, a, _), num in zip(runs, rows, strict=True)
                        for pieces in [self.meta.seqlens[key][i]]
                    ]
                )
        return SequenceSample(meta, data)

    def _check(self, key: str, x: torch.Tensor) -> None:
        rows = sum(self.meta.rows_per_id(key))
        described = (self.meta.dtypes[key], tuple(self.meta.trailing_shapes[key]))
        found = (_dtype_name(x), tuple(x.shape[1:]))
        if x.dim() == 0 or x.shape[0] != rows:
            what = f"{key!r} has shape {tuple(x.shape)}, its seqlens add up to {rows} rows"
        elif found[0] != described[0]:
            what = f"{key!r} is {found[0]}, described as {described[0]}"
        elif found[1] != described[1]:
            what = f"{key!r} has trailing shape {found[1]}, described as {described[1]}"
        else:
            return
        raise DataError(what, where="SequenceSample", fix="correct the tensor or its description")


def _rows(x: torch.Tensor, starts: Sequence[int], part: Sequence[int]) -> torch.Tensor:
    """Gathers the rows of the ids in ``part``: a view if they are contiguous, else a copy."""
    if not part:
        return x[:0]
    first, last = part[0], part[-1]
    if last - first == len(part) - 1 and list(part) == list(range(first, last + 1)):
        return x.narrow(0, starts[first], starts[last + 1] - starts[first])
    return torch.cat([x[starts[i] : starts[i + 1]] for i in part])


def _lengths(key: str, per_id: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Converts piece lengths to plain ints. ``SequenceMeta`` rejects negative ones."""
    try:
        return tuple(tuple(index(n) for n in pieces) for pieces in per_id)
    except TypeError as error:
        raise DataError(
            f"lengths of {key!r} are not integers: {error}",
            where="SequenceSample.from_tensors, seqlens",
            fix="give for each id a list of the lengths of its pieces",
        ) from error


def _dtype_name(x: object) -> str:
    if not isinstance(x, torch.Tensor):
        raise DataError(
            f"found a {type(x).__name__} instead of a tensor",
            where="SequenceSample",
            fix="give a tensor for each key, or leave the key out",
        )
    return str(x.dtype).removeprefix("torch.")
