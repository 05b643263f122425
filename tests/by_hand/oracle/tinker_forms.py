"""Losses of Tinker, written from its documentation; its servers are not public, so nothing of it runs here.

Sources: https://tinker-docs.thinkingmachines.ai/tinker/losses and its pages ``cross-entropy``,
``importance-sampling``, ``ppo``, ``cispo`` and ``dro``; the same text is docs/losses.mdx of
https://github.com/thinking-machines-lab/tinker-cookbook at a2b1b820d480. p is the policy in training, q the
one that sampled, A the advantage. All are sums over tokens: an average is up to whoever makes A.
"""

from __future__ import annotations

import torch
from peer_io import Batch


def cross_entropy(batch: Batch) -> torch.Tensor:
    """Σ −w log p."""
    return _sum(-batch["logprobs"] * batch["weights"], batch)


def importance_sampling(batch: Batch) -> torch.Tensor:
    """Σ −(p/q) A."""
    return _sum(-_ratio(batch) * batch["advantages"], batch)


def ppo(batch: Batch, *, clip_low_threshold: float, clip_high_threshold: float) -> torch.Tensor:
    """Σ −min((p/q) A, clip(p/q, low, high) A); the bounds are on the ratio itself."""
    ratio, advantages = _ratio(batch), batch["advantages"]
    held = ratio.clip(clip_low_threshold, clip_high_threshold)
    return _sum(-torch.minimum(ratio * advantages, held * advantages), batch)


def cispo(batch: Batch, *, clip_low_threshold: float, clip_high_threshold: float) -> torch.Tensor:
    """Σ −sg(clip(p/q, low, high)) log p · A."""
    with torch.no_grad():
        weight = _ratio(batch).clip(clip_low_threshold, clip_high_threshold)
    return _sum(-weight * batch["logprobs"] * batch["advantages"], batch)


def dro(batch: Batch, *, beta: float) -> torch.Tensor:
    """Σ −(log p · A − β/2 (log p/q)²)."""
    log_ratio = batch["logprobs"] - batch["old_logprobs"]
    return _sum(0.5 * beta * log_ratio**2 - batch["logprobs"] * batch["advantages"], batch)


def _ratio(batch: Batch) -> torch.Tensor:
    return torch.exp(batch["logprobs"] - batch["old_logprobs"])


def _sum(per_token: torch.Tensor, batch: Batch) -> torch.Tensor:
    """A datum has the tokens that count and no others: here those with mask 1."""
    return per_token[batch["mask"]].sum()


FORMS = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
}
