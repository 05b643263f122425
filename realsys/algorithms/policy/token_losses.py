"""The losses of a policy by name: each a short function of log-ratios, advantages and sequences.

``policy_loss.py`` prepares what they get, weights what they return and makes statistics. Settings and their
meaning are in realsys/api/basics/losses.py; how to add one: docs/adding_an_algorithm.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from realsys.algorithms.sequence_sums import sum_per_sequence, to_tokens
from realsys.api.basics.choice import formula_of
from realsys.api.basics.losses import (
    CISPOLoss,
    ClipCovLoss,
    DPPOLoss,
    GSPOLoss,
    KLCovLoss,
    PolicyLoss,
    PPOLoss,
    SAPOLoss,
)
from realsys.api.errors import ConfigError, DataError

_LEAST = 1e-12  # of a probability, so that its logarithm is finite


@dataclass(frozen=True)
class PolicyTokens:
    """What a loss is made from: packed ``[N]`` or padded ``[B, T]``, float32, 0 where the mask is 0.

    Attributes:
        logprobs: of the policy being trained; with a gradient.
        log_ratio: those less the log-probs before the update, within ±20; with a gradient.
        advantages: constants.
        mask: bool, True on tokens that the policy wrote.
        lengths: of packed sequences; None if padded, or if the loss does not look at sequences.
        chosen: bool, tokens that a loss by covariance treats in another way; None for other losses.
    """

    logprobs: torch.Tensor
    log_ratio: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    lengths: tuple[int, ...] | None = None
    chosen: torch.Tensor | None = None

    def sequence_mean(self, per_token: torch.Tensor) -> torch.Tensor:
        """Returns the mean over each sequence's tokens where the mask is 1, on each of its tokens."""
        count_B = sum_per_sequence(self.mask.float(), self.lengths).clamp(min=1)
        total_B = sum_per_sequence(per_token.masked_fill(~self.mask, 0.0), self.lengths)
        return to_tokens(total_B / count_B, per_token, self.lengths)


@dataclass(frozen=True)
class TokenLosses:
    """Losses with their gradient, and bool masks of tokens that a bound held.

    Attributes:
        dual_clipped: by a bound on the loss of bad actions; None if there is none.
    """

    losses: torch.Tensor
    clipped: torch.Tensor
    dual_clipped: torch.Tensor | None = None


def ppo_loss(loss: PPOLoss, tokens: PolicyTokens) -> TokenLosses:
    """max(−A r, −A clip(r)) (Schulman et al., arXiv:1707.06347, eq. 7), at most −c · A where A < 0
    (dual clip, arXiv:1912.09729, eq. 5).

    The ratio is clipped to ``[1 − eps_clip, 1 + eps_clip_higher]``; a larger upper range is "clip-higher"
    (arXiv:2503.14476, sec. 3.1).
    """
    if loss.c_clip is not None and not loss.c_clip > 1:
        raise ConfigError(f"c_clip is {loss.c_clip}", where="policy loss", fix="use more than 1")
    made = _clip(tokens.log_ratio.exp(), tokens.advantages, loss.eps_clip, loss.eps_clip_higher)
    if loss.c_clip is None:
        return made
    bound = -loss.c_clip * tokens.advantages
    over = (tokens.advantages < 0) & (made.losses > bound)
    return TokenLosses(torch.where(over, bound, made.losses), made.clipped, over)


def gspo_loss(loss: GSPOLoss, tokens: PolicyTokens) -> TokenLosses:
    """The same with s, the geometric mean of a sequence's ratios, in place of r (GSPO, Zheng et al.,
    arXiv:2507.18071, eq. 5 to 7), by tokens: s has the value of its sequence's and the gradient of its
    token's log-prob, which add up to that of s (sec. 4.3). For a sequence of one token it is PPO's.
    """
    log_ratio = tokens.log_ratio
    of_sequence = tokens.sequence_mean(log_ratio.detach())
    ratio = (of_sequence + (log_ratio - log_ratio.detach())).exp()
    return _clip(ratio, tokens.advantages, loss.eps_clip, loss.eps_clip_higher)


def cispo_loss(loss: CISPOLoss, tokens: PolicyTokens) -> TokenLosses:
    """−sg(clip(r)) · A · log π (CISPO, MiniMax, arXiv:2506.13585, eq. 4 and 5).

    The bounds are on r itself: ``[ratio_low, ratio_high]``; the paper tunes the upper one alone.
    """
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(loss.ratio_low, loss.ratio_high)
    return TokenLosses(-weight * tokens.advantages * tokens.logprobs, weight != ratio)


def sapo_loss(loss: SAPOLoss, tokens: PolicyTokens) -> TokenLosses:
    """−A · 4/τ · σ(τ (r − 1)) (SAPO, Gao et al., arXiv:2511.20347), τ by the advantage's sign.

    At r = 1 its gradient is that of −A r; it fades on both sides. Nothing counts as clipped.
    """
    positive = tokens.advantages > 0
    tau = torch.where(positive, loss.tau_positive, loss.tau_negative)
    gate = torch.sigmoid(tau * (tokens.log_ratio.exp() - 1)) * (4 / tau)
    return TokenLosses(-tokens.advantages * gate, torch.zeros_like(positive))


def dppo_loss(loss: DPPOLoss, tokens: PolicyTokens) -> TokenLosses:
    """−A · r; 0 where the token moved out of the trust region, and A would move it further (DPPO, Qi et
    al., arXiv:2602.04879, sec. 4): A > 0, r > 1, D > δ_high, or A < 0, r < 1, D > δ_low.

    With p of π and q before the update, of the sampled token, D is the divergence of (q, 1 − q) and
    (p, 1 − p): |p − q| (tv), or q log (q / p) + (1 − q) log ((1 − q) / (1 − p)) (kl).
    """
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    with torch.no_grad():
        new, old = tokens.logprobs.exp(), (tokens.logprobs - log_ratio).exp().clamp(max=1.0)
        if loss.divergence == "tv":
            apart = (new - old).abs()
        else:
            rest_old, rest_new = (1 - old).clamp(min=_LEAST), (1 - new).clamp(min=_LEAST)
            apart = rest_old * (rest_old / rest_new).log() - old * log_ratio
        further = (advantages > 0) & (log_ratio > 0) & (apart > loss.delta_high)
        further |= (advantages < 0) & (log_ratio < 0) & (apart > loss.delta_low)
    made = -advantages * log_ratio.exp()
    return TokenLosses(made.masked_fill(further, 0.0), further)


def clip_cov_loss(loss: ClipCovLoss, tokens: PolicyTokens) -> TokenLosses:
    """PPO's loss, 0 on the chosen tokens (Clip-Cov, Cui et al., arXiv:2505.22617, eq. 13)."""
    chosen = _chosen(tokens)
    made = _clip(tokens.log_ratio.exp(), tokens.advantages, loss.eps_clip, loss.eps_clip_higher)
    return TokenLosses(made.losses.masked_fill(chosen, 0.0), made.clipped | chosen)


def kl_cov_loss(loss: KLCovLoss, tokens: PolicyTokens) -> TokenLosses:
    """−A · r, and + coef · |log r| on the chosen tokens (KL-Cov, Cui et al., arXiv:2505.22617, eq. 14, with
    the estimate of the authors' code). Nothing counts as clipped.
    """
    log_ratio, chosen = tokens.log_ratio, _chosen(tokens)
    penalty = (loss.coef * log_ratio.abs()).masked_fill(~chosen, 0.0)
    return TokenLosses(-tokens.advantages * log_ratio.exp() + penalty, torch.zeros_like(chosen))


def token_losses(loss: PolicyLoss, tokens: PolicyTokens) -> TokenLosses:
    """Returns the losses of the kind that is chosen: a user's, or that of the built-in one it inherits."""
    formula = formula_of(loss, _FORMULAS, own="token_losses")
    if formula is not None:
        return formula(loss, tokens)
    made = loss.token_losses(tokens)
    shape = tokens.advantages.shape
    if not isinstance(made, TokenLosses) or any(
        not isinstance(x, torch.Tensor) or x.shape != shape for x in (made.losses, made.clipped)
    ):
        raise ConfigError(
            f"token_losses of {type(loss).__name__} returned something else than a loss and a bool of each "
            f"of {tuple(shape)} tokens",
            where=f"{type(loss).__module__}, class {type(loss).__name__}",
            fix="return TokenLosses(losses, clipped), both in the shape of tokens.advantages",
        )
    return made


def _chosen(tokens: PolicyTokens) -> torch.Tensor:
    if tokens.chosen is None:
        raise DataError(
            "nobody chose tokens for a loss by covariance",
            where="policy loss",
            fix="pass chosen=, see realsys/interfaces/ppo/token_selection.py",
        )
    return tokens.chosen


def _clip(
    ratio: torch.Tensor, advantages: torch.Tensor, eps_clip: float, eps_clip_higher: float | None
) -> TokenLosses:
    eps_clip_higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    if not 0 <= eps_clip < 1 or not eps_clip_higher >= 0:
        raise ConfigError(
            f"eps_clip is {eps_clip}, eps_clip_higher {eps_clip_higher}",
            where="policy loss",
            fix="use 0 <= eps_clip < 1 and eps_clip_higher >= 0; 0.2 is common for ppo",
        )
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_higher)
    is_clipped = bounded > unclipped
    return TokenLosses(torch.where(is_clipped, bounded, unclipped), is_clipped)


_FORMULAS: dict[type[PolicyLoss], Callable[[Any, PolicyTokens], TokenLosses]] = {
    PPOLoss: ppo_loss,
    GSPOLoss: gspo_loss,
    CISPOLoss: cispo_loss,
    ClipCovLoss: clip_cov_loss,
    DPPOLoss: dppo_loss,
    KLCovLoss: kl_cov_loss,
    SAPOLoss: sapo_loss,
}
