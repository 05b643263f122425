"""The PPO policy loss per token, and how tokens add up to one number.

All functions take packed ``[N]`` or padded ``[B, T]`` tensors; a mask is 1 on tokens the policy
wrote. Loss per token and its sum are apart because the denominator is global: it counts the
tokens (or sequences) of every micro-batch and every data-parallel rank, which nobody here knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from realsys.algorithms.tensor_checks import require_same_shape
from realsys.api.errors import ConfigError, DataError, did_you_mean

Aggregation = Literal[
    "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
]
_MAX_LOG_RATIO = 20.0  # bounds the ratio by e^20 ≈ 5e8; past it there is no gradient


def ppo_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    dual_clip: float | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate loss of each token (Schulman et al., arXiv:1707.06347, eq. 7).

    Args:
        logprobs: of the policy being trained; the only one that gets a gradient.
        old_logprobs: of the policy before this update, same temperature.
        eps_clip: the ratio is clipped to ``[1 - eps_clip, 1 + eps_clip_higher]``.
        eps_clip_higher: None for ``eps_clip``; larger: "clip-higher" (arXiv:2503.14476, sec. 3.1).
        dual_clip: c > 1: bounds the loss by ``-c · advantage`` where the advantage is negative
            (arXiv:1912.09729). None for no bound.
        weights: multiply the loss of each token, without gradient. With those of
            ``correction_weights`` and old = proximal log-probs it is the loss of decoupled PPO
            (Hilton et al., arXiv:2110.00641, sec. 3).
    Returns:
        float32 loss per token, and float32 statistics per token without gradient; all 0 where the
        mask is 0. The statistics know nothing of weights: ``importance_ratio``; ``clip_fraction``
        (1 where clipping raised the loss); ``dual_clip_fraction``; ``approx_kl_k1`` and
        ``approx_kl_k3``, estimates of KL(old ‖ new).
    """
    require_same_shape(
        "ppo_policy_loss",
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
    )
    eps_clip_higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    _check_clips(eps_clip, eps_clip_higher, dual_clip)
    off = ~mask.bool()
    # Filled before exp: garbage on padding would otherwise put nan into the gradient.
    log_ratio = (logprobs.float() - old_logprobs.detach().float()).masked_fill(off, 0.0)
    advantages = advantages.detach().float().masked_fill(off, 0.0)

    bounded = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = bounded.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_higher)
    is_clipped = clipped > unclipped
    loss = torch.where(is_clipped, clipped, unclipped)
    is_dual_clipped = torch.zeros_like(off)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        is_dual_clipped = (advantages < 0) & (loss > bound)
        loss = torch.where(is_dual_clipped, bound, loss)
    if weights is not None:
        require_same_shape("ppo_policy_loss", logprobs=logprobs, weights=weights)
        loss = loss * weights.detach().float().masked_fill(off, 0.0)

    with torch.no_grad():
        stats = {
            "importance_ratio": ratio.masked_fill(off, 0.0),
            "clip_fraction": is_clipped.float(),
            "dual_clip_fraction": is_dual_clipped.float(),
            "approx_kl_k1": -log_ratio.detach(),
            "approx_kl_k3": torch.expm1(bounded) - bounded,
        }
    return loss, stats


def _check_clips(eps_clip: float, eps_clip_higher: float, dual_clip: float | None) -> None:
    if not 0 <= eps_clip < 1 or not eps_clip_higher >= 0:
        raise ConfigError(
            f"eps_clip is {eps_clip}, eps_clip_higher {eps_clip_higher}",
            where="ppo_policy_loss",
            fix="use 0 <= eps_clip < 1 and eps_clip_higher >= 0; 0.2 is common",
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(
            f"dual_clip is {dual_clip}",
            where="ppo_policy_loss",
            fix="use a number above 1, or none",
        )


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


def update_should_stop(
    mean_ratio: float,
    approx_kl: float,
    *,
    max_mean_ratio: float | None = None,
    max_approx_kl: float | None = None,
) -> bool:
    """Whether the policy has moved so far that the rest of this batch's updates should be skipped.

    Pass means over all ranks, so that all decide alike. A value that is not a number stops. The
    caller skips the optimizer step itself: a loss of 0 would still move weights by momentum.
    """
    limits = ((mean_ratio, max_mean_ratio), (approx_kl, max_approx_kl))
    return any(limit is not None and not value <= limit for value, limit in limits)


def _check_mode(mode: str) -> None:
    if mode not in get_args(Aggregation):
        raise ConfigError(
            f"no aggregation {mode!r}",
            where="policy loss",
            fix=did_you_mean(mode, get_args(Aggregation)),
        )


def _tokens_per_sequence(mask: torch.Tensor, lengths: Sequence[int] | None) -> torch.Tensor:
    return sum_per_sequence(mask.bool().float(), lengths)


def sum_per_sequence(x: torch.Tensor, lengths: Sequence[int] | None) -> torch.Tensor:
    """``[B]`` from ``[B, T]``, or from packed ``[N]`` and the lengths of its sequences."""
    if lengths is None:
        if x.dim() != 2:
            raise DataError(
                f"a tensor of shape {tuple(x.shape)} doesn't say where its sequences end",
                where="sequence aggregation",
                fix="pass lengths=, or a padded [B, T] tensor",
            )
        return x.sum(1)
    if x.dim() != 1 or sum(lengths) != x.shape[0]:
        raise DataError(
            f"lengths add up to {sum(lengths)}, the tensor has shape {tuple(x.shape)}",
            where="sequence aggregation",
            fix="pass the lengths of the packed sequences",
        )
    return torch.stack([piece.sum() for piece in torch.split(x, list(lengths))])
