"""How old the weights behind each token are when it is trained on. Figures of one batch, no policy.

Shapes: N packed tokens, B sequences. Version v is the weights after v training steps; a token of
version v that is trained on weights of version w has lag w - v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from realsys.algorithms.tensor_checks import require_same_shape

LAG_BUCKETS = ("0", "1", "2", "3", "4_or_more")


@dataclass(frozen=True)
class TokenLags:
    """Of the tokens and sequences of one rank.

    Attributes:
        lag_N: int64, 0 where the mask is 0.
        oldest_B, newest_B: largest and smallest lag of each sequence that has a token; the others
            are left out.
        sequence_B: which sequences those are.
    """

    lag_N: torch.Tensor
    oldest_B: torch.Tensor
    newest_B: torch.Tensor
    sequence_B: torch.Tensor


@torch.no_grad()
def token_lags(
    version_N: torch.Tensor, mask_N: torch.Tensor, lengths: Sequence[int], *, version: int
) -> TokenLags:
    """Lags of the tokens where ``mask_N``, which are trained on weights of ``version``.

    Args:
        version_N: int64, version of the weights that made each token; anything where the mask is 0.
        lengths: of the packed sequences.
    """
    require_same_shape("token_lags", version_N=version_N, mask_N=mask_N)
    mask_N = mask_N.bool()
    lag_N = (version - version_N.to(torch.int64)).masked_fill(~mask_N, 0)
    found = [
        (b, lag[mask].max(), lag[mask].min())
        for b, (lag, mask) in enumerate(
            zip(torch.split(lag_N, list(lengths)), torch.split(mask_N, list(lengths)), strict=True)
        )
        if bool(mask.any())
    ]
    empty = lag_N.new_zeros(0)
    return TokenLags(
        lag_N,
        torch.stack([oldest for _, oldest, _ in found]) if found else empty,
        torch.stack([newest for _, _, newest in found]) if found else empty,
        torch.tensor([b for b, _, _ in found], dtype=torch.int64),
    )


def tokens_by_lag(lag_N: torch.Tensor, mask_N: torch.Tensor) -> torch.Tensor:
    """float64: number of tokens in each of ``LAG_BUCKETS``."""
    lags = lag_N[mask_N.bool()].clamp(0, len(LAG_BUCKETS) - 1)
    return torch.bincount(lags, minlength=len(LAG_BUCKETS)).double()
