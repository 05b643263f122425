"""The critic's loss per token, and how much of the returns it explains.

Tensors are packed ``[N]`` or padded ``[B, T]``. With value normalisation (value_norm.py) all
three of values, old values and returns are in normalised units. Sums: policy_loss.aggregate.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional as F

from realsys.algorithms.advantage.advantages import Reduce, masked_sums
from realsys.algorithms.tensor_checks import require_same_shape
from realsys.api.errors import ConfigError, did_you_mean


def clipped_value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    eps_clip: float | None,
    kind: Literal["mse", "huber"] = "mse",
    huber_delta: float = 10.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The larger of two losses of each token: of the value, and of the value held near the old one.

    0.5 · max((v - R)², (clip(v, v_old ± eps_clip) - R)²), the clipping of OpenAI's baselines PPO
    (an ablation of it: Andrychowicz et al., arXiv:2006.05990).

    Args:
        eps_clip: None for no clipping.
        kind: ``huber`` grows linearly where the error exceeds ``huber_delta``.
    Returns:
        float32 loss per token, and ``clip_fraction`` per token (1 where clipping raised the loss);
        both 0 where the mask is 0.
    """
    require_same_shape(
        "clipped_value_loss", values=values, old_values=old_values, returns=returns, mask=mask
    )
    if kind not in ("mse", "huber"):
        fix = did_you_mean(kind, ("mse", "huber"))
        raise ConfigError(f"no value loss {kind!r}", where="clipped_value_loss", fix=fix)
    if eps_clip is not None and not eps_clip > 0:
        fix = "use a number above 0, or none for no clipping"
        raise ConfigError(f"eps_clip is {eps_clip}", where="clipped_value_loss", fix=fix)
    off = ~mask.bool()
    values = values.float().masked_fill(off, 0.0)
    old_values = old_values.detach().float().masked_fill(off, 0.0)
    returns = returns.detach().float().masked_fill(off, 0.0)

    def error(prediction: torch.Tensor) -> torch.Tensor:
        if kind == "huber":
            return F.huber_loss(prediction, returns, reduction="none", delta=huber_delta)
        return 0.5 * (prediction - returns) ** 2

    loss = error(values)
    is_clipped = torch.zeros_like(off)
    if eps_clip is not None:
        moved = values - old_values
        held = error(old_values + moved.clamp(-eps_clip, eps_clip))
        # Asked for first: old + (new - old) is not new, but for rounding, where nothing was clipped.
        is_clipped = (moved.abs() > eps_clip) & (held > loss)
        loss = torch.where(is_clipped, held, loss)
    return loss, {"clip_fraction": is_clipped.float()}


def explained_variance(
    values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    reduce: Reduce | None = None,
) -> float:
    """1 - var(returns - values) / var(returns): 1 is perfect, 0 no better than a constant.

    nan if all returns are equal. ``reduce`` as in ``masked_whiten``.
    """
    require_same_shape("explained_variance", values=values, returns=returns, mask=mask)
    error = returns.double() - values.double()
    unexplained, total = _variance(error, mask, reduce), _variance(returns, mask, reduce)
    return 1.0 - unexplained / total if total > 0 else float("nan")


def _variance(x: torch.Tensor, mask: torch.Tensor, reduce: Reduce | None) -> float:
    count, first, second = masked_sums(x, mask, reduce)
    return max(second / count - (first / count) ** 2, 0.0) if count else float("nan")
