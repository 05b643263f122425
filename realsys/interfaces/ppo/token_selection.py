"""Which tokens of a batch pull the policy, chosen over all data-parallel ranks before the update.

Chosen once for the whole batch, from what was known before it: so neither micro-batches nor ranks change
the choice.
"""

from __future__ import annotations

import math

import torch

from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT
from realsys.interfaces.ppo.batch_checks import ENTROPY
from realsys.interfaces.ppo.off_policy import WEIGHTS


def keep_top_entropy(
    batch: SequenceSample, mask_N: torch.Tensor, share: float, ranks: DataParallel
) -> SequenceSample:
    """Gives weight 0 to tokens outside the ``share`` of highest entropy (arXiv:2506.01939, eq. 5); they
    stay in the denominator.
    """
    if share >= 1:
        return batch
    chosen_N = largest_share(batch.data[ENTROPY], mask_N, share, ranks)
    weight_N = batch.data.get(WEIGHTS, torch.ones_like(batch.data[ENTROPY]))
    new = {WEIGHTS: weight_N.masked_fill(~chosen_N, 0.0)}
    return batch.update(
        SequenceSample.from_tensors(batch.ids, {WEIGHTS: batch.meta.seqlens[INPUT]}, new)
    )


def largest_share(
    x_N: torch.Tensor, mask_N: torch.Tensor, share: float, ranks: DataParallel
) -> torch.Tensor:
    """bool ``[N]``: the ⌈share · count⌉ largest elements where ``mask_N``, over all ranks, and their
    equals.

    By bisection over the bits of a float32: 33 sums of one number, whatever the number of tokens.
    """
    total = float(ranks.sum(mask_N.sum().double()))
    wanted = math.ceil(share * total)
    order_N = _ordered(x_N)
    kept_R = order_N[mask_N]
    low, high = -(2**31), 2**31  # at least ``wanted`` are ≥ low; fewer are ≥ high
    while high - low > 1:
        middle = (low + high) // 2
        if float(ranks.sum((kept_R >= middle).sum().double())) >= wanted:
            low = middle
        else:
            high = middle
    return mask_N & (order_N >= low)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """int64 numbers in the order of float32 ``x``."""
    bits = x.float().contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(2**31) - bits - 1, bits)
