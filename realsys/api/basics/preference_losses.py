"""The loss of a pair of answers, chosen by name: ``loss=ipo``. No torch: formulas are in
realsys/algorithms/preference/pair_losses.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from realsys.api.basics.choice import Choice
from realsys.api.basics.option_fields import option

if TYPE_CHECKING:
    from realsys.algorithms.preference.pair_losses import PairLogprobs, PairLosses


@dataclass(frozen=True, kw_only=True)
class PairLoss(Choice):
    """Base: a loss of each pair from the log-probs of its answers. A user's kind has ``pair_losses``.

    Attributes:
        needs_reference: it compares with the starting model, which the run then holds.
        needs_kl_estimate: it reads the batch's mean log-ratio, which takes another pass over the batch.
    """

    choice = "pair_loss"
    needs_reference: ClassVar[bool] = True
    needs_kl_estimate: ClassVar[bool] = False

    def pair_losses(self, pairs: PairLogprobs) -> PairLosses:
        """Returns the loss of each pair, with its gradient, and the rewards of its two answers."""
        raise NotImplementedError(f"{type(self).__name__} has no pair_losses(pairs)")


@dataclass(frozen=True, kw_only=True)
class DPOLoss(PairLoss):
    """DPO (arXiv:2305.18290, eq. 7): the log-odds that the chosen answer is better are its implicit reward
    less that of the rejected one.
    """

    kind = "dpo"
    beta: float = option(0.1, "how strongly the policy is kept near the reference", gt=0)
    label_smoothing: float = option(
        0.0, "share of pairs taken to be the wrong way round (conservative DPO)", ge=0, lt=0.5
    )


@dataclass(frozen=True, kw_only=True)
class IPOLoss(PairLoss):
    """IPO (arXiv:2310.12036, eq. 17): the log-ratios of a pair are to differ by 1 / (2 · tau), not by more.

    The log-ratios are sums over an answer's tokens, as in the paper.
    """

    kind = "ipo"
    tau: float = option(0.1, "how strongly the policy is kept near the reference", gt=0)


@dataclass(frozen=True, kw_only=True)
class KTOLoss(PairLoss):
    """KTO (arXiv:2402.01306, eq. 8): each answer by itself is held against the mean log-ratio of the batch;
    gains and losses fade where they are large.
    """

    kind = "kto"
    needs_kl_estimate = True
    beta: float = option(0.1, "how strongly the policy is kept near the reference", gt=0)
    desirable_weight: float = option(1.0, "weight of chosen answers", gt=0)
    undesirable_weight: float = option(1.0, "weight of rejected answers", gt=0)


@dataclass(frozen=True, kw_only=True)
class SimPOLoss(PairLoss):
    """SimPO (arXiv:2405.14734, eq. 6): the mean log-prob of the chosen answer's tokens is to exceed that of
    the rejected one's by a margin; there is no reference.
    """

    kind = "simpo"
    needs_reference = False
    beta: float = option(2.0, "scale of a token's mean log-prob", gt=0)
    gamma: float = option(0.5, "margin by which the chosen answer's reward is to be larger", ge=0)
