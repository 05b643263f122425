"""Which tokens of a batch pull the policy, chosen over all data-parallel ranks before the update.

Chosen once for the whole batch, from what was known before it: so neither micro-batches nor ranks change
the choice.
"""

from __future__ import annotations

import math
from zlib import crc32

import torch

from realsys.algorithms.advantage.advantages import masked_sums
from realsys.api.basics.losses import CovarianceLoss, PolicyLoss
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT
from realsys.interfaces.ppo.batch_checks import ENTROPY
from realsys.interfaces.ppo.off_policy import WEIGHTS

CHOSEN = "chosen_tokens"  # bool per token, of losses by covariance
_ROUNDED = 1 - 1e-12  # 0.07 · 100 is 7.000000000000001, which must not become 8 tokens


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


def choose_by_covariance(
    batch: SequenceSample,
    loss: PolicyLoss,
    old_logprob_N: torch.Tensor,
    mask_N: torch.Tensor,
    ranks: DataParallel,
) -> SequenceSample:
    """Adds ``chosen_tokens`` for losses by covariance: the share of the batch's answer tokens with the
    largest ones, or drawn from those in a range. The draw depends on the answer's id and the token's place
    alone.
    """
    if not isinstance(loss, CovarianceLoss):
        return batch
    advantage_N = batch.data["advantages"]
    means = [_mean(x_N, mask_N, ranks) for x_N in (advantage_N, old_logprob_N)]
    together_N = (advantage_N - means[0]) * (old_logprob_N - means[1])
    low, high = loss.covariance_range
    inside_N = mask_N & (together_N > low) & (together_N < high)
    count, found = ranks.sum(torch.stack([mask_N.sum(), inside_N.sum()]).double()).tolist()
    rank_N = _draws(batch).to(together_N) if loss.at_random else together_N
    share = min(loss.share * count / found, 1.0) if found else 1.0
    chosen_N = largest_share(rank_N, inside_N, share, ranks)
    new = SequenceSample.from_tensors(
        batch.ids, {CHOSEN: batch.meta.seqlens[INPUT]}, {CHOSEN: chosen_N}
    )
    return batch.update(new)


def largest_share(
    x_N: torch.Tensor, mask_N: torch.Tensor, share: float, ranks: DataParallel
) -> torch.Tensor:
    """bool ``[N]``: the ⌈share · count⌉ largest elements where ``mask_N``, over all ranks, and their
    equals.

    By bisection over the bits of a float32: 33 sums of one number, whatever the number of tokens.
    """
    total = float(ranks.sum(mask_N.sum().double()))
    wanted = math.ceil(share * total * _ROUNDED)
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


def _mean(x_N: torch.Tensor, mask_N: torch.Tensor, ranks: DataParallel) -> float:
    count, total, _ = masked_sums(x_N, mask_N, ranks.sum)
    return total / max(count, 1.0)


def _draws(batch: SequenceSample) -> torch.Tensor:
    """float32 ``[N]`` in [0, 1), by the id and the place of each token."""
    rows = zip(batch.ids, batch.meta.rows_per_id(INPUT), strict=True)
    made = [
        torch.rand(num, generator=torch.Generator().manual_seed(crc32(name.encode())))
        for name, num in rows
    ]
    return torch.cat(made)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """int64 numbers in the order of float32 ``x``."""
    bits = x.float().contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(2**31) - bits - 1, bits)
