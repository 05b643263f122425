"""The policy's loss, chosen by name: ``algorithm.loss=gspo``. No torch: formulas are in
realsys/algorithms/policy/token_losses.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from realsys.api.basics.choice import Choice
from realsys.api.basics.option_fields import option

if TYPE_CHECKING:
    from realsys.algorithms.policy.token_losses import PolicyTokens, TokenLosses


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Choice):
    """Base: a loss of each token from its log-ratio and advantage. A user's kind has ``token_losses``.

    Its gradient is 0 where the advantage is 0: a minibatch of such tokens makes no optimizer step.

    Attributes:
        of_sequences: it looks at whole sequences, so that it needs their lengths.
    """

    choice = "loss"
    of_sequences: ClassVar[bool] = False

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """Returns the loss of each token, with its gradient, and which tokens were clipped."""
        raise NotImplementedError(f"{type(self).__name__} has no token_losses(tokens)")


@dataclass(frozen=True, kw_only=True)
class PPOLoss(PolicyLoss):
    """PPO (arXiv:1707.06347, eq. 7): the ratio of each token is clipped."""

    kind = "ppo"
    eps_clip: float = option(0.2, "clip range of the importance ratio", gt=0, lt=1)
    eps_clip_higher: float | None = option(
        None, "upper clip range if it differs (clip-higher, arXiv:2503.14476)", gt=0
    )
    c_clip: float | None = option(None, "dual clip bound (arXiv:1912.09729); none is off", gt=1)


@dataclass(frozen=True, kw_only=True)
class GSPOLoss(PolicyLoss):
    """GSPO (arXiv:2507.18071, eq. 5 to 7): one ratio a sequence, the geometric mean of its tokens', is
    clipped. As in the paper with ``loss_aggregation=seq_mean_token_mean``.
    """

    kind = "gspo"
    of_sequences = True
    eps_clip: float = option(3e-4, "clip range of a sequence's ratio", gt=0, lt=1)
    eps_clip_higher: float | None = option(4e-4, "upper clip range if it differs", gt=0)


@dataclass(frozen=True, kw_only=True)
class CISPOLoss(PolicyLoss):
    """CISPO (arXiv:2506.13585, eq. 4 and 5): the ratio is a constant weight of −A · log π, and bounded; no
    token loses its gradient.
    """

    kind = "cispo"
    ratio_low: float = option(0.0, "least weight; 0 is none, as in the paper", ge=0, lt=1)
    ratio_high: float = option(5.0, "largest weight (arXiv:2510.13786)", gt=1)


@dataclass(frozen=True, kw_only=True)
class SAPOLoss(PolicyLoss):
    """SAPO (arXiv:2511.20347): −A · 4/τ · sigmoid(τ · (ratio − 1)), which fades where clipping cuts."""

    kind = "sapo"
    tau_positive: float = option(1.0, "how fast it fades where the advantage is positive", gt=0)
    tau_negative: float = option(1.05, "how fast it fades where it is negative", gt=0)


@dataclass(frozen=True, kw_only=True)
class DPPOLoss(PolicyLoss):
    """DPPO (arXiv:2602.04879): −A · ratio; a token has no gradient that leads further away once its
    probability has left a trust region.
    """

    kind = "dppo"
    divergence: str = option(
        "tv",
        "of the sampled token against all others: tv, the change of its probability; kl, in nats (0.05 is "
        "common)",
        choices=("tv", "kl"),
    )
    delta_low: float = option(0.2, "largest divergence where the advantage is negative", gt=0)
    delta_high: float = option(0.2, "largest divergence where it is positive", gt=0)


@dataclass(frozen=True, kw_only=True)
class CovarianceLoss(PolicyLoss):
    """Base: some tokens are treated in another way, by how their log-prob and advantage vary together
    (arXiv:2505.22617): (A − mean) · (log π_old − mean), over the answer tokens of the batch.

    Attributes:
        at_random: tokens are drawn from those in ``covariance_range``; otherwise the largest are taken.
    """

    at_random: ClassVar[bool] = False
    share: float = option(2e-4, "share of the batch's answer tokens that is chosen", gt=0, le=1)

    @property
    def covariance_range(self) -> tuple[float, float]:
        """What a chosen token's covariance lies in."""
        return float("-inf"), float("inf")


@dataclass(frozen=True, kw_only=True)
class ClipCovLoss(CovarianceLoss):
    """Clip-Cov (arXiv:2505.22617, eq. 13): PPO's loss, 0 on tokens drawn from those of high covariance."""

    kind = "clip_cov"
    at_random = True
    cov_low: float = option(1.0, "least covariance of a chosen token")
    cov_high: float = option(5.0, "largest covariance of a chosen token")
    eps_clip: float = option(0.2, "clip range of the ratio of the other tokens", gt=0, lt=1)
    eps_clip_higher: float | None = option(None, "upper clip range if it differs", gt=0)

    @property
    def covariance_range(self) -> tuple[float, float]:
        """As the settings say."""
        return self.cov_low, self.cov_high


@dataclass(frozen=True, kw_only=True)
class KLCovLoss(CovarianceLoss):
    """KL-Cov (arXiv:2505.22617, eq. 14): −A · ratio, with a penalty |log ratio| on the tokens of the
    largest covariance.
    """

    kind = "kl_cov"
    coef: float = option(1.0, "weight of the penalty", ge=0)
