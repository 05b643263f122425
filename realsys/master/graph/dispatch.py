"""Splits a call's batch over data-parallel ranks (pure).

Generation and training get equal counts; everything except generation, whose lengths are not known yet,
is balanced by tokens. A training batch is distributed minibatch by minibatch: for any number of ranks,
all of them together see the same minibatches.

Generation gets contiguous runs of the batch, so its results lie in runs on the ranks: where runs are
balanced anyway, everything is split into runs, and data stays on the rank that made it.
"""

from __future__ import annotations

from collections.abc import Sequence

from realsys.api.data import SequenceMeta
from realsys.api.dataflow import MFCDef
from realsys.api.model import ModelInterfaceType
from realsys.data.packing import balanced_partition, contiguous

_BALANCED = 1.01  # the heaviest part to the mean


def split_over_ranks(call: MFCDef, meta: SequenceMeta, num_ranks: int) -> list[list[int]]:
    """Returns the positions in ``meta`` for each data-parallel rank, in order."""
    if num_ranks == 1:
        return [list(range(meta.batch_size))]
    if call.interface_type is ModelInterfaceType.GENERATE:
        return contiguous(meta.batch_size, num_ranks)
    tokens = meta.tokens_per_id()
    if call.interface_type is not ModelInterfaceType.TRAIN_STEP:
        return _balanced(tokens, num_ranks)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for minibatch in contiguous(meta.batch_size, call.n_minibatches):
        parts = _balanced([tokens[i] for i in minibatch], num_ranks, equal_counts=True)
        for rank, part in zip(ranks, parts, strict=True):
            rank += [minibatch[i] for i in part]
    return ranks


def _balanced(
    tokens: Sequence[int], num_parts: int, *, equal_counts: bool = False
) -> list[list[int]]:
    runs = contiguous(len(tokens), num_parts)
    heaviest = max(sum(tokens[i] for i in run) for run in runs)
    if heaviest * num_parts <= _BALANCED * sum(tokens):
        return runs
    return balanced_partition(tokens, num_parts, equal_counts=equal_counts)
