"""The policy's objective on one micro-batch: the loss over its answer tokens, with its other terms.

    policy: the chosen loss + kl_coef · KL − entropy_coef · entropy + weight · KL(teacher ‖ π)
            over tokens with a loss
    nll:    nll_coef · −log π
            over those of rewarded answers

Formulas are in realsys/algorithms/policy/; this module selects the batch's keys, the tokens that count, and
the weights that make results independent of the split: each component is divided by its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from realsys.algorithms.advantage.kl import kl_loss
from realsys.algorithms.aggregation import Aggregation, aggregate, aggregation_weight
from realsys.algorithms.policy.correction import drifted_sequences
from realsys.algorithms.policy.policy_loss import policy_loss
from realsys.algorithms.predictions import Predictions
from realsys.algorithms.sequence_sums import sum_per_sequence, to_tokens
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_mask, answer_tokens, kept_sets
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.batch_checks import BEHAVIOUR, PROXIMAL, REFERENCE
from realsys.interfaces.ppo.off_policy import WEIGHTS
from realsys.interfaces.ppo.teacher import TOP_IDS, TOP_LOGPROBS, forward_kl
from realsys.interfaces.ppo.token_selection import CHOSEN

POLICY, NLL = "policy", "nll"  # components of the loss
_TOKENS = "tokens_per_weight"
# Means over tokens, whatever the loss aggregation.
_FIGURES = (
    *("importance_weight", "clip_ratio", "dual_clip_ratio", "approx_kl", "entropy"),
    *("kl_loss", "drifted"),
)


@dataclass(frozen=True)
class PolicyObjective:
    """The loss that the settings describe.

    Attributes:
        kl_coef: weight of the KL in the loss; of no meaning where it is in the reward.
        entropy_coef: weight of the entropy bonus.
        teachers: name of a teacher whose most probable tokens the batch has → weight of the forward KL.
    """

    settings: PPOSettings
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    teachers: Mapping[str, float] = field(default_factory=dict)

    @property
    def aggregation(self) -> Aggregation:
        """How token losses are aggregated."""
        return self.settings.loss_aggregation  # type: ignore[return-value]  # checked at use

    @property
    def old_logprobs(self) -> str:
        """Key of the log-probs that ratios are to."""
        return PROXIMAL if self.settings.needs_prox_logprobs else BEHAVIOUR

    @property
    def has_kl(self) -> bool:
        """Whether the KL is a term."""
        return self.settings.kl_in == "loss" and self.kl_coef > 0

    def mask(self, data: SequenceSample) -> torch.Tensor:
        """Returns bool ``[N]``: answer tokens with a loss, before any is excluded by its weight."""
        mask_N = answer_mask(data)
        if not self.settings.mask_truncated:
            return mask_N
        return mask_N & ~_of_tokens(data.data["seq_no_eos_mask"], data)

    def has_gradient(self, data: SequenceSample) -> torch.Tensor:
        """Returns bool ``[N]``: tokens whose loss has a gradient, by their advantage or by another term.

        A new loss term must be added here. Tokens with weight 0 have no gradient except through the other
        terms, which the minibatch's other tokens have as well.
        """
        counts_N = every_N = self.mask(data)
        if WEIGHTS in data.keys:
            counts_N = counts_N & (data.data[WEIGHTS] != 0)
        if self.entropy_coef or self.has_kl or self.teachers:
            return counts_N
        moves_N = counts_N & (data.data["advantages"] != 0)
        return moves_N | (every_N & _rewarded(data)) if self.settings.nll_coef else moves_N

    def weight(self, mb: SequenceSample) -> float | Mapping[str, float]:
        """Weight of a micro-batch in the denominators of loss and statistics (``loss_weight_fn``)."""
        mask_N = self.mask(mb)
        if not self.settings.nll_coef:
            return self._weight(mask_N, mb)
        right_N = mask_N & _rewarded(mb)
        return {POLICY: self._weight(mask_N, mb), NLL: self._weight(right_N, mb)}

    def loss(
        self, predictions: Predictions, mb: SequenceSample
    ) -> tuple[torch.Tensor | Mapping[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
        """Returns a micro-batch's mean loss, or that of each component, its statistics, and the log-ratio
        of each of its R loss tokens.

        Statistics are passed to ``means_over_tokens`` after the engine has summed them.
        """
        settings, mask_N = self.settings, self.mask(mb)
        kept = kept_sets(mb, settings.gen)
        logprob_R, entropy_R = predictions.logprobs_and_entropy(
            *answer_tokens(mb, mask_N),
            temperature=settings.gen.temperature,
            train_entropy=self.entropy_coef > 0,
            kept=None if kept is None else kept.take(mask_N),
        )
        old_logprob_R = mb.data[self.old_logprobs][mask_N]
        every_R = torch.ones_like(logprob_R, dtype=torch.bool)
        weight, lengths_R = self._weight(mask_N, mb), self._lengths(mask_N, mb)
        weight_R, drifted_R = self._token_weights(mb, mask_N, logprob_R, lengths_R)
        loss_R, found = policy_loss(
            settings.loss,
            logprob_R,
            old_logprob_R,
            mb.data["advantages"][mask_N],
            every_R,
            lengths=lengths_R,
            weights=weight_R,
            chosen=mb.data[CHOSEN][mask_N] if CHOSEN in mb.keys else None,
        )

        def mean(per_token: torch.Tensor, by: Aggregation) -> torch.Tensor:
            return aggregate(per_token, every_R, by, denominator=weight, lengths=lengths_R)

        figures = {
            "importance_weight": mean(found["importance_ratio"], "token_mean"),
            "clip_ratio": mean(found["clip_fraction"], "token_mean"),
            "dual_clip_ratio": mean(found["dual_clip_fraction"], "token_mean"),
            "approx_kl": mean(found["approx_kl_k3"], "token_mean"),
            "entropy": mean(entropy_R.detach(), "token_mean"),
        }
        loss = mean(loss_R, self.aggregation)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * mean(entropy_R, self.aggregation)
        if self.has_kl:
            kl_R = kl_loss(
                logprob_R,
                mb.data[REFERENCE][mask_N],
                settings.kl_estimate_by,  # type: ignore[arg-type]  # its options are checked at use
                old_logprobs=old_logprob_R if settings.kl_unbiased else None,
            )
            loss = loss + self.kl_coef * mean(kl_R, self.aggregation)
            figures["kl_loss"] = mean(kl_R.detach(), "token_mean")
        for name, by in self.teachers.items():
            ids_RK = mb.data[TOP_IDS + name][mask_N].long()
            own_RK = predictions.logprobs(
                ids_RK, answer_tokens(mb, mask_N)[1], temperature=settings.gen.temperature
            )
            apart_R = forward_kl(own_RK, mb.data[TOP_LOGPROBS + name][mask_N])
            loss = loss + by * mean(apart_R, self.aggregation)
            figures[f"teacher/{name}/forward_kl"] = mean(apart_R.detach(), "token_mean")
        if drifted_R is not None:
            figures["drifted"] = mean(drifted_R.float(), "token_mean")
        if self.aggregation != "token_mean":
            figures[_TOKENS] = mean(torch.ones_like(loss_R), "token_mean")
        log_ratio_R = logprob_R.detach() - old_logprob_R
        if not settings.nll_coef:
            return loss, figures, log_ratio_R
        parts = {POLICY: loss, NLL: settings.nll_coef * self._nll(logprob_R, mb, mask_N)}
        return parts, figures, log_ratio_R

    def means_over_tokens(self, stats: dict[str, float]) -> dict[str, float]:
        """Converts a step's ``stats`` to means over tokens, whatever the loss aggregation.

        Sums over tokens were divided by numbers of sequences; so was the number of tokens.
        """
        if self.aggregation == "token_mean":
            return stats
        tokens = stats[_TOKENS]
        own = [n for n in stats if n in _FIGURES or n.startswith("teacher/")]
        rest = {name: value for name, value in stats.items() if name != _TOKENS}
        return {**rest, **{name: stats[name] / tokens for name in own}}

    def _token_weights(
        self,
        mb: SequenceSample,
        mask_N: torch.Tensor,
        logprob_R: torch.Tensor,
        lengths_R: list[int] | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Weights of the policy's loss, and which tokens have weight 0 because their answer drifted."""
        weight_R = mb.data[WEIGHTS][mask_N] if WEIGHTS in mb.keys else None
        if self.settings.opsm_delta is None:
            return weight_R, None
        drifted_R = drifted_sequences(
            logprob_R,
            mb.data[BEHAVIOUR][mask_N],
            mb.data["advantages"][mask_N],
            lengths=lengths_R or [],
            delta=self.settings.opsm_delta,
        )
        weight_R = torch.ones_like(logprob_R) if weight_R is None else weight_R
        return weight_R.masked_fill(drifted_R, 0.0), drifted_R

    def _nll(
        self, logprob_R: torch.Tensor, mb: SequenceSample, mask_N: torch.Tensor
    ) -> torch.Tensor:
        """Mean of −log π over tokens of answers with a reward above 0; 0 without any."""
        right_R = _rewarded(mb)[mask_N]
        lengths = sum_per_sequence(mask_N.long(), mb.piece_lengths(INPUT)).tolist()
        return aggregate(
            -logprob_R,
            right_R,
            self.aggregation,
            denominator=self._weight(mask_N & _rewarded(mb), mb),
            lengths=lengths,
        )

    def _weight(self, mask_N: torch.Tensor, mb: SequenceSample) -> float:
        return aggregation_weight(
            mask_N,
            self.aggregation,
            lengths=mb.piece_lengths(INPUT),
            norm_length=self.settings.gen.max_new_tokens,
        )

    def _lengths(self, mask_N: torch.Tensor, mb: SequenceSample) -> list[int] | None:
        """Loss tokens of each sequence; None if nothing needs them."""
        by_token = self.aggregation == "token_mean" and self.settings.opsm_delta is None
        if by_token and not self.settings.loss.of_sequences:
            return None
        counts_B = sum_per_sequence(mask_N.long(), mb.piece_lengths(INPUT))
        lengths: list[int] = counts_B.tolist()
        return lengths


def _rewarded(data: SequenceSample) -> torch.Tensor:
    """Bool ``[N]``: tokens of answers with a reward above 0."""
    return _of_tokens(data.data["rewards"] > 0, data)


def _of_tokens(per_sequence_B: torch.Tensor, data: SequenceSample) -> torch.Tensor:
    return to_tokens(per_sequence_B, data.data[INPUT], data.piece_lengths(INPUT))
