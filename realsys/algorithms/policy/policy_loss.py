"""The loss of a policy's tokens, whichever is chosen, and statistics of the update.

All functions take packed ``[N]`` or padded ``[B, T]`` tensors; a mask is 1 on tokens the policy wrote. The
formulas are in token_losses.py; how tokens add up to one number: aggregation.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from realsys.algorithms.policy.token_losses import PolicyTokens, token_losses
from realsys.algorithms.tensor_checks import require_same_shape
from realsys.api.basics.losses import PolicyLoss

_MAX_LOG_RATIO = 20.0  # bounds the ratio by e^20 ≈ 5e8; past it there is no gradient


def policy_loss(
    loss: PolicyLoss,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    lengths: Sequence[int] | None = None,
    weights: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of each token, and statistics.

    Args:
        loss: which one, and its settings.
        logprobs: of the policy being trained; the only one that gets a gradient.
        old_logprobs: of the policy before this update, same temperature.
        lengths: of packed sequences, for losses that look at whole ones.
        weights: multiply the loss of each token, without gradient. With those of
            ``correction_weights`` and old = proximal log-probs it is the loss of decoupled PPO
            (Hilton et al., arXiv:2110.00641, sec. 3).
        chosen: bool, for losses by covariance.
    Returns:
        float32 loss per token, and float32 statistics per token without gradient; all 0 where the
        mask is 0. The statistics know nothing of weights: ``importance_ratio``, of the token;
        ``clip_fraction`` (1 where a bound changed the loss); ``dual_clip_fraction``; ``approx_kl_k1``
        and ``approx_kl_k3``, estimates of KL(old ‖ new).
    """
    require_same_shape(
        "policy_loss",
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
    )
    off = ~mask.bool()
    # Filled before exp: garbage on padding would otherwise put nan into the gradient.
    log_ratio = (logprobs.float() - old_logprobs.detach().float()).masked_fill(off, 0.0)
    bounded = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    tokens = PolicyTokens(
        logprobs=logprobs.float().masked_fill(off, 0.0),
        log_ratio=bounded,
        advantages=advantages.detach().float().masked_fill(off, 0.0),
        mask=~off,
        lengths=None if lengths is None else tuple(lengths),
        chosen=None if chosen is None else chosen.bool() & ~off,
    )
    made = token_losses(loss, tokens)
    per_token = made.losses
    if weights is not None:
        require_same_shape("policy_loss", logprobs=logprobs, weights=weights)
        per_token = per_token * weights.detach().float().masked_fill(off, 0.0)

    with torch.no_grad():
        dual = torch.zeros_like(off) if made.dual_clipped is None else made.dual_clipped
        stats = {
            "importance_ratio": bounded.exp().masked_fill(off, 0.0),
            "clip_fraction": made.clipped.float().masked_fill(off, 0.0),
            "dual_clip_fraction": dual.float(),
            "approx_kl_k1": -log_ratio.detach(),
            "approx_kl_k3": torch.expm1(bounded) - bounded,
        }
    return per_token, stats


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
