"""How a call's batch is cut over data-parallel ranks (pure).

Generation and training get equal counts (training so that every rank has the same number of
minibatches); everything is balanced by tokens, but generation, whose lengths nobody knows yet.
"""

from __future__ import annotations

from realsys.api.data import SequenceMeta
from realsys.api.dataflow import MFCDef
from realsys.api.model import ModelInterfaceType
from realsys.data_plane.packing import balanced_partition, contiguous


def split_over_ranks(call: MFCDef, meta: SequenceMeta, num_ranks: int) -> list[list[int]]:
    """Positions in ``meta`` for each data-parallel rank, in order."""
    if num_ranks == 1:
        return [list(range(meta.batch_size))]
    if call.interface_type is ModelInterfaceType.GENERATE:
        return contiguous(meta.batch_size, num_ranks)
    equal = call.interface_type is ModelInterfaceType.TRAIN_STEP
    return balanced_partition(meta.tokens_per_id(), num_ranks, equal_counts=equal)
