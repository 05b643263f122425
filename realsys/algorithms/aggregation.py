"""How the losses of tokens add up to one number.

Loss per token and its sum are apart because the denominator is global: it counts the tokens (or sequences)
of every micro-batch and every data-parallel rank, which nobody here knows. Tensors are packed ``[N]`` or
padded ``[B, T]``; a mask is 1 on tokens the policy wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from realsys.algorithms.sequence_sums import sum_per_sequence
from realsys.algorithms.tensor_checks import require_same_shape
from realsys.api.errors import ConfigError, DataError, did_you_mean

Aggregation = Literal[
    "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
]


def aggregate(
    per_token: torch.Tensor,
    mask: torch.Tensor,
    mode: Aggregation,
    *,
    denominator: float,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """Scalar: what these tokens contribute to the batch's loss.

    The contributions of all micro-batches and ranks add up to the loss if ``denominator`` is the
    sum of their ``aggregation_weight``. A micro-batch's own weight gives its own mean. Tokens that a
    correction left out stay in the mask: their loss is 0, and the others don't count more for it.

    - ``token_mean``: every token counts alike (DAPO, arXiv:2503.14476, sec. 3.3).
    - ``seq_mean_token_sum``: every sequence counts alike, by the sum of its tokens.
    - ``seq_mean_token_mean``: … by their mean (GRPO, arXiv:2402.03300, eq. 3).
    - ``seq_mean_token_sum_norm``: … by their sum over a constant length (Dr. GRPO,
      arXiv:2503.20783).

    Args:
        denominator: 0 is allowed where nothing is left to count, the result is then 0.
        lengths: of packed sequences; needed by the sequence modes for ``[N]``.
    """
    require_same_shape("aggregate", per_token=per_token, mask=mask)
    _check_mode(mode)
    if not denominator >= 0:
        raise DataError(
            f"denominator is {denominator}", where="aggregate", fix="pass the sum of weights"
        )
    kept = per_token.float().masked_fill(~mask.bool(), 0.0)
    if mode == "seq_mean_token_mean":
        count = _tokens_per_sequence(mask, lengths).clamp(min=1)
        total = (sum_per_sequence(kept, lengths) / count).sum()
    else:
        total = kept.sum()
    return total / denominator if denominator else total


def aggregation_weight(
    mask: torch.Tensor,
    mode: Aggregation,
    *,
    lengths: Sequence[int] | None = None,
    norm_length: int | None = None,
) -> float:
    """How much these tokens add to the denominator of ``aggregate``.

    Tokens for ``token_mean``, otherwise sequences that have any token with mask 1.

    Args:
        norm_length: the constant of ``seq_mean_token_sum_norm``, e.g. max_new_tokens. Needed
            there: the padded width must not stand in for it, as it changes from batch to batch.
    """
    _check_mode(mode)
    if mode == "token_mean":
        return float(mask.bool().sum())
    num_sequences = float((_tokens_per_sequence(mask, lengths) > 0).sum())
    if mode != "seq_mean_token_sum_norm":
        return num_sequences
    if norm_length is None or norm_length < 1:
        raise ConfigError(
            f"norm_length is {norm_length} for seq_mean_token_sum_norm",
            where="aggregation_weight",
            fix="use a constant number of tokens, e.g. max_new_tokens",
        )
    return num_sequences * norm_length


def _check_mode(mode: str) -> None:
    if mode not in get_args(Aggregation):
        raise ConfigError(
            f"no aggregation {mode!r}",
            where="policy loss",
            fix=did_you_mean(mode, get_args(Aggregation)),
        )


def _tokens_per_sequence(mask: torch.Tensor, lengths: Sequence[int] | None) -> torch.Tensor:
    return sum_per_sequence(mask.bool().float(), lengths)
