"""Metadata of a batch without its tensors: ids, keys, lengths, dtypes.

``SequenceMeta`` is all that the master ever holds; ``SequenceSample`` (realsys.data.transfer) is the
same with the tensors. Both are immutable: every method returns a new value. Index arithmetic lives
here, once, and ``SequenceSample`` reuses it for slicing. No torch.

Layout: every key is packed along dimension 0 in the order of ``ids``. One id (a prompt) may own
several sequences (a group of answers): ``seqlens[key][i]`` lists the lengths of id ``i``'s pieces.
A key with one value a sequence (a reward) has length-1 pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from realsys.api.errors import ConfigError, DataError, did_you_mean

# 256 MiB of float32, and a few times that during computation. Large enough for a GPU to multiply
# a chunk of rows by the head as fast as all rows at once; estimated, not measured.
LOGITS_AT_ONCE = 2**26

# Keys with any number of rows for a token: they cost no computation, so no batch is cut by their length.
UNCOUNTED_KEYS = frozenset({"packed_kept_ids"})


def logits_at_once(vocab_size: int) -> int:
    """Number of rows whose logits may exist in memory at the same time."""
    return max(1, LOGITS_AT_ONCE // vocab_size)


@dataclass(frozen=True, kw_only=True)
class MicroBatchSpec:
    """Limits by which an engine cuts one batch into micro-batches.

    At least ``n_mbs`` micro-batches, more if needed to keep each under ``max_tokens_per_mb`` tokens.
    The sequences of an id stay together if they fit and are split otherwise; a single sequence
    longer than the limit gets a micro-batch of its own.

    Attributes:
        max_cache_tokens: capacity of the key-value cache during generation, in tokens (at least one whole
            answer's). None: on a GPU as many as free memory holds, on a CPU ``max_tokens_per_mb``.
    """

    n_mbs: int = 1
    max_tokens_per_mb: int | None = None
    max_cache_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.n_mbs < 1:
            raise ConfigError(f"n_mbs is {self.n_mbs}", where="mb_spec.n_mbs", fix="use 1 or more")
        for name in ("max_tokens_per_mb", "max_cache_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(
                    f"{name} is {value}",
                    where=f"mb_spec.{name}",
                    fix="use 1 or more tokens, or none for no limit",
                )


@dataclass(frozen=True, kw_only=True)
class SequenceMeta:
    """Metadata of a batch of sequences, without its tensors.

    Attributes:
        ids: one per datapoint, unique within the batch.
        seqlens: key → for each id the lengths of its pieces along dimension 0.
        dtypes: key → torch dtype name, e.g. ``"int64"``, ``"float32"``, ``"bool"``.
        trailing_shapes: key → shape behind dimension 0; ``()`` for one value a token.
        metadata: name → one plain value (str, int, float, bool, None; of ``record`` a table) per id.
    """

    ids: tuple[str, ...]
    seqlens: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    trailing_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    metadata: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(set(self.ids)) != len(self.ids):
            twice = sorted(i for i, num in Counter(self.ids).items() if num > 1)
            raise DataError(
                f"ids appear twice in one batch: {twice[:5]}",
                where="SequenceMeta.ids",
                fix="give every datapoint an id of its own",
            )
        if set(self.seqlens) != set(self.dtypes) or set(self.seqlens) != set(self.trailing_shapes):
            raise DataError(
                f"keys differ: seqlens {sorted(self.seqlens)}, dtypes {sorted(self.dtypes)}, "
                f"trailing_shapes {sorted(self.trailing_shapes)}",
                where="SequenceMeta",
                fix="describe every key in all three",
            )
        for name, values in (*self.seqlens.items(), *self.metadata.items()):
            if len(values) != len(self.ids):
                raise DataError(
                    f"{name!r} has {len(values)} entries for {len(self.ids)} ids",
                    where="SequenceMeta",
                    fix="give one entry per id",
                )
        for key, per_id in self.seqlens.items():
            if any(min(pieces, default=0) < 0 for pieces in per_id):
                at = next(i for i, pieces in enumerate(per_id) if min(pieces, default=0) < 0)
                raise DataError(
                    f"{key!r} has lengths {list(per_id[at])[:8]} for id {self.ids[at]!r}",
                    where="SequenceMeta.seqlens",
                    fix="give lengths of 0 or more",
                )

    @property
    def keys(self) -> frozenset[str]:
        """Names of the batch's tensors."""
        return frozenset(self.seqlens)

    @property
    def batch_size(self) -> int:
        """Number of ids."""
        return len(self.ids)

    def rows_per_id(self, key: str) -> tuple[int, ...]:
        """Number of rows along dimension 0 that each id has under ``key``."""
        self._require_keys([key])
        return tuple(sum(pieces) for pieces in self.seqlens[key])

    def tokens_per_id(self) -> tuple[int, ...]:
        """Number of rows of each id's longest key, the cost measure for balancing and packing.

        ``UNCOUNTED_KEYS`` are left out.
        """
        if not (counted := self._counted):
            return (1,) * len(self.ids)
        per_key = [self.rows_per_id(key) for key in counted]
        return tuple(max(rows) for rows in zip(*per_key, strict=True))

    def select(self, keys: Iterable[str]) -> SequenceMeta:
        """Keeps only ``keys``, for the same ids. Raises DataError naming a missing key."""
        wanted = list(keys)
        self._require_keys(wanted)
        return replace(
            self,
            seqlens={k: self.seqlens[k] for k in wanted},
            dtypes={k: self.dtypes[k] for k in wanted},
            trailing_shapes={k: self.trailing_shapes[k] for k in wanted},
        )

    def remap(self, names: Mapping[str, str]) -> SequenceMeta:
        """Renames keys by ``names`` (old → new); others keep their name."""
        self._require_keys(names)
        new = {k: names.get(k, k) for k in self.seqlens}
        if len(set(new.values())) != len(new):
            raise DataError(
                f"renaming by {dict(names)} makes two keys one",
                where="key remap",
                fix="give every key a name of its own",
            )
        return replace(
            self,
            seqlens={new[k]: v for k, v in self.seqlens.items()},
            dtypes={new[k]: v for k, v in self.dtypes.items()},
            trailing_shapes={new[k]: v for k, v in self.trailing_shapes.items()},
        )

    def take(self, indices: Sequence[int]) -> SequenceMeta:
        """Selects the ids at ``indices``, in that order (for reordering, splitting and subsets)."""
        return replace(
            self,
            ids=tuple(self.ids[i] for i in indices),
            seqlens={k: tuple(v[i] for i in indices) for k, v in self.seqlens.items()},
            metadata={k: tuple(v[i] for i in indices) for k, v in self.metadata.items()},
        )

    def pieces_per_id(self) -> tuple[tuple[int, ...], ...]:
        """Token counts of each id's sequences (by its longest key), the units by which an id can be
        split.

        A key with one piece for several sequences belongs to all of them and is ignored. If keys
        disagree on the number of sequences, the id counts as one sequence and is never split.
        """
        counted = [self.seqlens[key] for key in self._counted]
        return tuple(_pieces([per_id[i] for per_id in counted]) for i in range(len(self.ids)))

    def parted(self, runs: Sequence[tuple[int, int, int]]) -> SequenceMeta:
        """Splits ids into ``runs`` (id's index, first sequence, end), one new id per run, in order.

        A run that covers only part of ``q-7`` is named ``q-7[2:5]``. A key with one piece per id is
        copied whole to each of its runs, as metadata are.
        """
        num = [len(pieces) for pieces in self.pieces_per_id()]

        def name(i: int, a: int, b: int) -> str:
            return self.ids[i] if b - a == num[i] else f"{self.ids[i]}[{a}:{b}]"

        def piece(pieces: tuple[int, ...], i: int, a: int, b: int) -> tuple[int, ...]:
            return pieces[a:b] if len(pieces) == num[i] else pieces

        return replace(
            self,
            ids=tuple(name(*run) for run in runs),
            seqlens={
                k: tuple(piece(v[run[0]], *run) for run in runs) for k, v in self.seqlens.items()
            },
            metadata={k: tuple(v[i] for i, _, _ in runs) for k, v in self.metadata.items()},
        )

    def index_of(self, ids: Sequence[str]) -> list[int]:
        """Returns the positions of ``ids`` in this batch. Raises DataError for an unknown id."""
        position = {name: i for i, name in enumerate(self.ids)}
        missing = [i for i in ids if i not in position]
        if missing:
            raise DataError(
                f"ids {missing[:5]} are not in this batch of {len(self.ids)}",
                where="SequenceMeta.index_of",
                fix="request only ids that are in the batch",
            )
        return [position[i] for i in ids]

    def update(self, other: SequenceMeta) -> SequenceMeta:
        """Adds or replaces keys and metadata from ``other``, which has the same ids in order."""
        if other.ids != self.ids:
            raise DataError(
                f"can't merge a batch of ids {other.ids[:3]}… into one of {self.ids[:3]}…",
                where="SequenceMeta.update",
                fix="reorder one of them first (take/index_of)",
            )
        return replace(
            self,
            seqlens={**self.seqlens, **other.seqlens},
            dtypes={**self.dtypes, **other.dtypes},
            trailing_shapes={**self.trailing_shapes, **other.trailing_shapes},
            metadata={**self.metadata, **other.metadata},
        )

    @staticmethod
    def gather(parts: Sequence[SequenceMeta]) -> SequenceMeta:
        """Concatenates batches along ids. All must have the same keys, dtypes and shapes."""
        if not parts:
            raise DataError("nothing to gather", where="SequenceMeta.gather", fix="pass a batch")
        first = parts[0]
        for part in parts[1:]:
            if part._form != first._form:
                raise DataError(
                    f"batches differ: {sorted(first.keys)} {dict(first.dtypes)} "
                    f"and {sorted(part.keys)} {dict(part.dtypes)}",
                    where="SequenceMeta.gather",
                    fix="select the same keys first",
                )
        return replace(
            first,
            ids=tuple(i for p in parts for i in p.ids),
            seqlens={k: tuple(s for p in parts for s in p.seqlens[k]) for k in first.seqlens},
            metadata={k: tuple(m for p in parts for m in p.metadata[k]) for k in first.metadata},
        )

    @property
    def _counted(self) -> list[str]:
        """Keys whose lengths measure cost."""
        return [key for key in self.seqlens if key not in UNCOUNTED_KEYS]

    @property
    def _form(self) -> tuple[object, ...]:
        """What batches that become one have in common."""
        return self.keys, dict(self.dtypes), dict(self.trailing_shapes), set(self.metadata)

    def _require_keys(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key not in self.seqlens:
                raise DataError(
                    f"no key {key!r} in this batch",
                    where=f"batch with keys {sorted(self.seqlens)}",
                    fix=did_you_mean(key, self.seqlens),
                )


def _pieces(by_key: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns token counts of one id's sequences, given the piece lengths under each key."""
    if not by_key:
        return (1,)
    num = max(map(len, by_key))
    if any(len(pieces) not in (1, num) for pieces in by_key):
        return (max(map(sum, by_key)),)
    of_sequences = [pieces for pieces in by_key if len(pieces) == num]
    return tuple(map(max, zip(*of_sequences, strict=True)))
