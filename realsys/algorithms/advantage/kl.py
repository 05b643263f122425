"""KL to the reference policy: estimators, penalised rewards, coefficient controllers.

Shapes: B sequences, T response tokens. Log-probabilities are those of the sampled tokens at the
sampling temperature. A penalty belongs either in the reward (``kl_penalised_rewards``) or in the
loss (``kl_estimate`` times a coefficient): the experiment decides, never both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Protocol, get_args

import torch

from realsys.algorithms.tensor_checks import require_same_shape
from realsys.api.errors import CheckpointError, ConfigError, DataError, did_you_mean

KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]
_MAX_LOG_RATIO = 20.0  # e^20 is still far from float32's limit
_MAX_K3 = 10.0


def kl_estimate(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator
) -> torch.Tensor:
    """float32 estimate per token of KL(policy ‖ reference) (Schulman, joschu.net/blog/kl-approx).

    With d = logprobs - ref_logprobs: k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d, abs = |d|. Only the
    gradient of k2 is, on average, that of the KL; ``k1+`` and ``k3+`` have the value of k1 and k3
    and the gradient of k2. For k3, d is clamped to ±20 and the result to at most 10: past either
    bound plain ``k3`` gives no gradient. The others are not clamped.
    """
    require_same_shape("kl_estimate", logprobs=logprobs, ref_logprobs=ref_logprobs)
    d = logprobs.float() - ref_logprobs.float()
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d * d
    if estimator == "k3":
        bounded = d.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return (torch.expm1(-bounded) + bounded).clamp(max=_MAX_K3)
    if estimator == "abs":
        return d.abs()
    if estimator in ("k1+", "k3+"):
        value = kl_estimate(logprobs, ref_logprobs, "k1" if estimator == "k1+" else "k3")
        k2 = 0.5 * d * d
        return value.detach() + (k2 - k2.detach())
    raise ConfigError(
        f"no KL estimator {estimator!r}",
        where="kl_estimate",
        fix=did_you_mean(estimator, get_args(KLEstimator)),
    )


def kl_loss(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    estimator: KLEstimator,
    *,
    old_logprobs: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 KL(policy ‖ reference) of each token as a term of the loss, with its gradient.

    Args:
        old_logprobs: of the policy that sampled the tokens; the estimate is then weighted by the ratio to
            it, which has a gradient too: value and gradient are right on average for its tokens, with k1 as
            with k3 (DeepSeek-V3.2, arXiv:2512.02556, eq. 7). None: not weighted.
    """
    made = kl_estimate(logprobs, ref_logprobs.detach(), estimator)
    if old_logprobs is None:
        return made
    require_same_shape("kl_loss", logprobs=logprobs, old_logprobs=old_logprobs)
    log_ratio = logprobs.float() - old_logprobs.detach().float()
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp() * made


@torch.no_grad()
def sequence_kl(
    logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """float32 ``[B]``: k1 summed over each sequence's tokens. Its mean feeds the controller."""
    require_same_shape("sequence_kl", logprobs_BT=logprobs_BT, mask_BT=mask_BT)
    return kl_estimate(logprobs_BT, ref_logprobs_BT, "k1").masked_fill(~mask_BT.bool(), 0.0).sum(1)


@torch.no_grad()
def kl_penalised_rewards(
    score_B: torch.Tensor,
    logprobs_BT: torch.Tensor,
    ref_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    kl_coef: float,
    estimator: KLEstimator = "k1",
    score_clip: float | None = None,
    score_on_truncated: bool = True,
    truncated_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 ``[B, T]``: -kl_coef · KL on each token, plus the score on the last one with mask 1.

    (Ziegler et al., arXiv:1909.08593, eq. 2.) A sequence without such a token gets nothing.

    Args:
        logprobs_BT: of the policy that sampled the tokens, so that the penalty is a constant
            while the policy is updated.
        score_clip: scores are clamped to ± this first.
        score_on_truncated: False withholds the score of answers that were cut off.
        truncated_B: bool; needed if ``score_on_truncated`` is False.
    """
    where = "kl_penalised_rewards"
    require_same_shape(where, logprobs_BT=logprobs_BT, mask_BT=mask_BT)
    require_same_shape(where, one_token_a_sequence=mask_BT[:, 0], score_B=score_B)
    mask_BT = mask_BT.bool()
    penalty_BT = kl_coef * kl_estimate(logprobs_BT, ref_logprobs_BT, estimator)
    reward_BT = (-penalty_BT).masked_fill(~mask_BT, 0.0)

    score_B = score_B.float()
    if score_clip is not None:
        score_B = score_B.clamp(-score_clip, score_clip)
    if not score_on_truncated:
        if truncated_B is None:
            raise DataError(
                "score_on_truncated is False but truncated_B is missing",
                where=where,
                fix="pass which answers were cut off (seq_no_eos_mask)",
            )
        require_same_shape(where, score_B=score_B, truncated_B=truncated_B)
        score_B = score_B.masked_fill(truncated_B.bool(), 0.0)
    tokens_to_come_BT = mask_BT.flip(1).cumsum(1).flip(1)
    is_last_BT = mask_BT & (tokens_to_come_BT == 1)
    return torch.where(is_last_BT, reward_BT + score_B[:, None], reward_BT)


class KLController(Protocol):
    """Holds the KL coefficient of an interface."""

    @property
    def coef(self) -> float:
        """The coefficient to use on the next batch."""

    def update(self, current_kl: float, num_sequences: int) -> None:
        """Told of each batch once, after it was used."""

    def state_dict(self) -> dict[str, float]:
        """What must survive a restart."""

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes back what ``state_dict`` gave."""


class FixedKLController:
    """Always the coefficient of the configuration, which therefore wins over a checkpoint."""

    def __init__(self, coef: float) -> None:
        if not coef >= 0:
            raise ConfigError(f"coef is {coef}", where="FixedKLController", fix="use 0 or more")
        self._coef = coef

    @property
    def coef(self) -> float:
        """The coefficient to use on the next batch."""
        return self._coef

    def update(self, current_kl: float, num_sequences: int) -> None:
        """Changes nothing."""

    def state_dict(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes nothing."""


class AdaptiveKLController:
    """Steers the coefficient so that the KL stays near ``target`` (arXiv:1909.08593, sec. 2.2).

    coef ← coef · (1 + clip(kl / target - 1, ±0.2) · min(num_sequences / horizon, 1))

    The bound on the last factor is ours: without it a batch of more than five horizons with a small KL
    would make the coefficient negative, and the penalty a reward.

    Args:
        coef: to begin with.
        target: KL of a whole sequence in nats, summed over its tokens.
        horizon: number of sequences over which the coefficient may change by 20 %.
    """

    def __init__(self, coef: float, *, target: float, horizon: float) -> None:
        for name, number in (("coef", coef), ("target", target), ("horizon", horizon)):
            if not number > 0:  # a coefficient of 0 would stay 0 for ever
                raise ConfigError(
                    f"{name} is {number}", where="AdaptiveKLController", fix="use a number above 0"
                )
        self._coef, self.target, self.horizon = coef, target, horizon

    @property
    def coef(self) -> float:
        """The coefficient to use on the next batch."""
        return self._coef

    def update(self, current_kl: float, num_sequences: int) -> None:
        """Moves the coefficient after one whole batch: call once a batch, alike on all ranks.

        Args:
            current_kl: mean over the batch's sequences of ``sequence_kl``, over all ranks. The
                KL itself: neither times the coefficient nor with the sign of a reward.
            num_sequences: in the batch, over all ranks.
        """
        if not math.isfinite(current_kl):
            raise DataError(
                f"the batch's KL is {current_kl}",
                where="AdaptiveKLController.update",
                fix="look for broken log-probabilities in this batch",
            )
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self._coef *= 1.0 + error * min(num_sequences / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """The coefficient reached."""
        return {"coef": self._coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes back what ``state_dict`` gave."""
        if "coef" not in state:
            raise CheckpointError(
                f"no 'coef' in {sorted(state)}",
                where="AdaptiveKLController",
                fix="resume with the controller that wrote the checkpoint",
            )
        coef = float(state["coef"])
        if not 0 < coef < math.inf:
            raise CheckpointError(
                f"the KL coefficient is {coef}",
                where="AdaptiveKLController",
                fix="resume from a checkpoint of before, or begin anew with its model",
            )
        self._coef = coef
