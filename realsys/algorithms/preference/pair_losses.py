"""The losses of pairs of answers by name: each a short function of the answers' log-probs.

The log-prob of an answer is the sum over its tokens, the end token included, at temperature 1. Settings and
their meaning are in realsys/api/basics/preference_losses.py.

Shape suffixes: P pairs, S = 2 P answers, the chosen one of each pair first; R tokens of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from realsys.algorithms.sequence_sums import sum_per_sequence
from realsys.api.basics.choice import formula_of
from realsys.api.basics.preference_losses import DPOLoss, IPOLoss, KTOLoss, PairLoss, SimPOLoss
from realsys.api.errors import ConfigError, DataError


@dataclass(frozen=True)
class PairLogprobs:
    """What a loss is made from: float ``[P]`` each, in nats.

    Attributes:
        chosen, rejected: log π of the answers; with a gradient.
        ref_chosen, ref_rejected: those of the reference, constants; 0 for a loss without a reference.
        chosen_lengths, rejected_lengths: tokens of the answers, at least 1.
        kl_estimate: scalar ``[]``, z₀ of KTO, a constant (``kl_estimate_of``); 0 for other losses.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    ref_chosen: torch.Tensor
    ref_rejected: torch.Tensor
    chosen_lengths: torch.Tensor
    rejected_lengths: torch.Tensor
    kl_estimate: torch.Tensor

    @property
    def chosen_log_ratio(self) -> torch.Tensor:
        """log π − log π_ref of the chosen answers, ``[P]``."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_log_ratio(self) -> torch.Tensor:
        """log π − log π_ref of the rejected answers, ``[P]``."""
        return self.rejected - self.ref_rejected


@dataclass(frozen=True)
class PairLosses:
    """Losses ``[P]`` with their gradient, and the implicit rewards ``[P]`` of both answers.

    A reward is on the scale on which the loss compares answers: the larger one's answer is preferred.
    """

    losses: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor


def pair_logprobs(
    logprobs_R: torch.Tensor,
    ref_logprobs_R: torch.Tensor | None,
    lengths_S: Sequence[int],
    *,
    kl_estimate: float = 0.0,
) -> PairLogprobs:
    """Sums the log-probs of tokens to those of answers, and arranges these by pairs.

    Args:
        logprobs_R: float, of the policy, packed; all answers one after the other.
        ref_logprobs_R: those of the reference; None: 0.
        lengths_S: tokens of each answer; they add up to R.
    Raises:
        DataError: an odd number of answers, an answer without a token, or lengths of other tokens.
    """
    if len(lengths_S) % 2 or min(lengths_S, default=1) < 1:
        raise DataError(
            f"{len(lengths_S)} answers with {min(lengths_S, default=0)} tokens or more are no pairs",
            where="pair_logprobs",
            fix="pass two answers a pair, each with its end token",
        )
    new_S = sum_per_sequence(logprobs_R, lengths_S)
    ref_S = torch.zeros_like(new_S)
    if ref_logprobs_R is not None:
        ref_S = sum_per_sequence(ref_logprobs_R.detach().to(new_S.dtype), lengths_S)
    counts_S = torch.tensor(lengths_S, dtype=new_S.dtype, device=new_S.device)
    (chosen, rejected), (ref_chosen, ref_rejected), (chosen_lengths, rejected_lengths) = (
        x_S.view(-1, 2).unbind(1) for x_S in (new_S, ref_S, counts_S)
    )
    return PairLogprobs(
        chosen=chosen,
        rejected=rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        kl_estimate=new_S.new_tensor(kl_estimate),
    )


def mean_log_ratio(pairs: PairLogprobs) -> torch.Tensor:
    """Mean of log π − log π_ref over all 2 P answers, a scalar without gradient."""
    return (pairs.chosen_log_ratio + pairs.rejected_log_ratio).detach().mean() / 2


def kl_estimate_of(mean_log_ratio_of_batch: float) -> float:
    """z₀ = max(0, mean log-ratio of the batch's answers), an estimate of KL(π ‖ π_ref) in nats.

    In the paper (sec. 4.1) and in trl's ``KTOTrainer`` the mean is over answers to *other* prompts: each
    prompt of a micro-batch gets its neighbour's answer, and ranks are averaged. That takes another pass of
    policy and reference, and depends on how the batch is split.
    Here it is over the answers of the whole global batch, before its update: the same for all micro-batches
    and ranks. trl's ``kto_pair``, a loss that it had for pairs, was made from the batch's own answers too,
    with one estimate from the chosen and one from the rejected ones. As in the paper it is a constant: it
    only says where the loss saturates.
    """
    return max(0.0, mean_log_ratio_of_batch)


def dpo_loss(loss: DPOLoss, pairs: PairLogprobs) -> PairLosses:
    """−log σ(h), h = β log π(w)/π_ref(w) − β log π(l)/π_ref(l) (Rafailov et al., arXiv:2305.18290, eq. 7).

    With ``label_smoothing`` ε it is −(1 − ε) log σ(h) − ε log σ(−h): conservative DPO (Mitchell, "A note on
    DPO with noisy preferences", 2023), which is smallest at σ(h) = 1 − ε.
    """
    chosen, rejected = loss.beta * pairs.chosen_log_ratio, loss.beta * pairs.rejected_log_ratio
    h, smoothing = chosen - rejected, loss.label_smoothing
    losses = -(1 - smoothing) * logsigmoid(h) - smoothing * logsigmoid(-h)
    return PairLosses(losses, chosen, rejected)


def ipo_loss(loss: IPOLoss, pairs: PairLogprobs) -> PairLosses:
    """(log π(w)/π_ref(w) − log π(l)/π_ref(l) − 1 / (2 τ))² (Azar et al., arXiv:2310.12036, eq. 17).

    Log-ratios are sums over tokens, as in the paper. trl divides them by the answers' lengths, by its
    comment on the word of the paper's authors: its ``beta`` is about this τ times a length. The rewards are
    τ times the log-ratios.
    """
    difference = pairs.chosen_log_ratio - pairs.rejected_log_ratio
    losses = (difference - 1 / (2 * loss.tau)).square()
    return PairLosses(
        losses, loss.tau * pairs.chosen_log_ratio, loss.tau * pairs.rejected_log_ratio
    )


def kto_loss(loss: KTOLoss, pairs: PairLogprobs) -> PairLosses:
    """Mean over a pair's two answers of λ − v (Ethayarajh et al., arXiv:2402.01306, eq. 8), with
    v = λ_D σ(β (r − z₀)) of the chosen answer, v = λ_U σ(β (z₀ − r)) of the rejected, r the log-ratio.
    """
    r_chosen, r_rejected = pairs.chosen_log_ratio, pairs.rejected_log_ratio
    z0 = pairs.kl_estimate.detach()
    # λ (1 − σ(x)) = λ σ(−x), which does not round to 0
    of_chosen = loss.desirable_weight * torch.sigmoid(loss.beta * (z0 - r_chosen))
    of_rejected = loss.undesirable_weight * torch.sigmoid(loss.beta * (r_rejected - z0))
    return PairLosses((of_chosen + of_rejected) / 2, loss.beta * r_chosen, loss.beta * r_rejected)


def simpo_loss(loss: SimPOLoss, pairs: PairLogprobs) -> PairLosses:
    """−log σ(β/|w| log π(w) − β/|l| log π(l) − γ) (Meng et al., arXiv:2405.14734, eq. 6).

    γ is the paper's: where its program asks for ``gamma_beta_ratio``, that is γ / β.
    """
    chosen = loss.beta * pairs.chosen / pairs.chosen_lengths
    rejected = loss.beta * pairs.rejected / pairs.rejected_lengths
    return PairLosses(-logsigmoid(chosen - rejected - loss.gamma), chosen, rejected)


def pair_losses(loss: PairLoss, pairs: PairLogprobs) -> PairLosses:
    """Returns the losses of the kind that is chosen: a user's, or that of the built-in one it inherits."""
    formula = formula_of(loss, _FORMULAS, own="pair_losses")
    if formula is not None:
        return formula(loss, pairs)
    made = loss.pair_losses(pairs)
    if not isinstance(made, PairLosses) or made.losses.shape != pairs.chosen.shape:
        raise ConfigError(
            f"pair_losses of {type(loss).__name__} returned something else than a loss of each of "
            f"{len(pairs.chosen)} pairs",
            where=f"{type(loss).__module__}, class {type(loss).__name__}",
            fix="return PairLosses(losses, chosen_rewards, rejected_rewards), in the shape of pairs.chosen",
        )
    return made


_FORMULAS: dict[type[PairLoss], Callable[[Any, PairLogprobs], PairLosses]] = {
    DPOLoss: dpo_loss,
    IPOLoss: ipo_loss,
    KTOLoss: kto_loss,
    SimPOLoss: simpo_loss,
}
