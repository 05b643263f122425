"""The policy's objective on one micro-batch: the loss over its answer tokens, with its other terms.

    policy: the chosen loss − entropy_coef · entropy + kl_coef · KL + weight · KL(teacher ‖ π)
    nll:    nll_coef · −log π, of answers with a reward

Formulas are in realsys/algorithms/policy/, the terms in objective_terms.py; here are the tokens that count,
and the weights that make results independent of the split: each component is divided by its own count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from realsys.algorithms.aggregation import Aggregation, aggregate, aggregation_weight
from realsys.algorithms.predictions import Predictions
from realsys.algorithms.sequence_sums import sum_per_sequence
from realsys.api.model import SKIPPED_STEPS
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_mask, answer_tokens, kept_sets, of_tokens
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.batch_checks import BEHAVIOUR, PROXIMAL
from realsys.interfaces.ppo.objective_terms import (
    NLL,
    POLICY,
    LossTokens,
    Term,
    policy_tokens,
    rewarded,
    terms,
)
from realsys.interfaces.ppo.off_policy import WEIGHTS
from realsys.interfaces.ppo.ppo_experience import AT_REFERENCE, EQUAL_SCORES

_TOKENS = "tokens_per_weight"
# Statistics that are means of their own: the loss's, which are aggregated as it is.
_OF_LOSS = ("loss", f"loss/{POLICY}", f"loss/{NLL}", "grad_norm", "lr", SKIPPED_STEPS)


@dataclass(frozen=True)
class PolicyObjective:
    """The loss that the settings describe.

    Attributes:
        kl_coef: weight of the KL in the loss; of no meaning where it is in the reward.
        entropy_coef: weight of the entropy bonus.
        teachers: name of a teacher whose most probable tokens the batch has → weight of the forward KL.
        taught: advantages have a part of teachers.
    """

    settings: PPOSettings
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    teachers: Mapping[str, float] = field(default_factory=dict)
    taught: bool = False

    @property
    def aggregation(self) -> Aggregation:
        """How token losses are aggregated."""
        return self.settings.loss_aggregation  # type: ignore[return-value]  # checked at use

    @property
    def old_logprobs(self) -> str:
        """Key of the log-probs that ratios are to."""
        return PROXIMAL if self.settings.needs_prox_logprobs else BEHAVIOUR

    def mask(self, data: SequenceSample) -> torch.Tensor:
        """Returns bool ``[N]``: answer tokens with a loss, before any is excluded by its weight."""
        mask_N = answer_mask(data)
        if not self.settings.mask_truncated:
            return mask_N
        return mask_N & ~of_tokens(data.data["seq_no_eos_mask"], data)

    def has_gradient(self, data: SequenceSample) -> torch.Tensor:
        """Returns bool ``[N]``: tokens whose loss has a gradient, by their advantage or by another term.

        A new term must be added here. Tokens with weight 0 have no gradient except through the other
        terms, which the minibatch's other tokens have as well. Where all answers to a question scored the
        same there is no entropy bonus, and a KL that is rounding alone is none.
        """
        counts_N = every_N = self.mask(data)
        if WEIGHTS in data.keys:
            counts_N = counts_N & (data.data[WEIGHTS] != 0)
        if self.teachers:
            return counts_N
        moves_N = counts_N & (data.data["advantages"] != 0)
        if AT_REFERENCE in data.keys and not self.taught:
            moves_N = moves_N & ~data.data[AT_REFERENCE]
        if self._kl_coef:
            moves_N = moves_N | (counts_N & ~data.data.get(AT_REFERENCE, ~counts_N))
        if self.entropy_coef:
            moves_N = moves_N | (counts_N & ~data.data.get(EQUAL_SCORES, ~counts_N))
        return moves_N | (every_N & rewarded(data)) if self.settings.nll_coef else moves_N

    def weight(self, mb: SequenceSample) -> float | Mapping[str, float]:
        """Weight of a micro-batch in the denominators of loss and statistics (``loss_weight_fn``)."""
        mask_N = self.mask(mb)
        if not self.settings.nll_coef:
            return self._weight(mask_N, mb)
        return {POLICY: self._weight(mask_N, mb), NLL: self._weight(mask_N & rewarded(mb), mb)}

    def loss(
        self, predictions: Predictions, mb: SequenceSample
    ) -> tuple[torch.Tensor | Mapping[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
        """Returns a micro-batch's mean loss, or that of each component, its statistics, and the log-ratio
        of each of its R loss tokens.

        Statistics are passed to ``means_over_tokens`` after the engine has summed them.
        """
        tokens = self._tokens(predictions, mb)
        policy_R, seen = policy_tokens(tokens, self.settings)
        weights = self.weight(mb)
        of_component = weights if isinstance(weights, Mapping) else {POLICY: weights}
        parts: dict[str, torch.Tensor] = {}

        def mean(term: Term, by: Aggregation) -> torch.Tensor:
            counts_R = term.counts_R
            return aggregate(
                term.losses_R,
                torch.ones_like(policy_R, dtype=torch.bool) if counts_R is None else counts_R,
                by,
                denominator=of_component[term.component],
                lengths=tokens.lengths_R,
            )

        for term in (Term(losses_R=policy_R), *self._terms(tokens)):
            own = mean(term, self.aggregation)
            own = own if term.coef == 1 else term.coef * own
            parts[term.component] = parts[term.component] + own if term.component in parts else own
            if term.figure:
                seen[term.figure] = term.losses_R.detach()
        if self.aggregation != "token_mean":
            seen[_TOKENS] = torch.ones_like(policy_R)
        figures = {name: mean(Term(losses_R=x), "token_mean") for name, x in seen.items()}
        log_ratio_R = tokens.logprob_R.detach() - tokens.old_logprob_R
        return parts if len(of_component) > 1 else parts[POLICY], figures, log_ratio_R

    def means_over_tokens(self, stats: dict[str, float]) -> dict[str, float]:
        """Converts a step's ``stats`` to means over tokens, whatever the loss aggregation.

        Sums over tokens were divided by numbers of sequences; so was the number of tokens.
        """
        if self.aggregation == "token_mean":
            return stats
        tokens = stats[_TOKENS]
        rest = {name: x for name, x in stats.items() if name != _TOKENS}
        return {name: x if name in _OF_LOSS else x / tokens for name, x in rest.items()}

    @property
    def _kl_coef(self) -> float:
        return self.kl_coef if self.settings.kl_in == "loss" else 0.0

    def _terms(self, tokens: LossTokens) -> tuple[Term, ...]:
        coefs = {"kl_coef": self._kl_coef, "entropy_coef": self.entropy_coef}
        return tuple(terms(tokens, self.settings, teachers=self.teachers, **coefs))

    def _tokens(self, predictions: Predictions, mb: SequenceSample) -> LossTokens:
        mask_N, gen = self.mask(mb), self.settings.gen
        kept = kept_sets(mb, gen)
        logprob_R, entropy_R = predictions.logprobs_and_entropy(
            *answer_tokens(mb, mask_N),
            temperature=gen.temperature,
            train_entropy=self.entropy_coef > 0,
            kept=None if kept is None else kept.take(mask_N),
        )
        return LossTokens(
            mb=mb,
            mask_N=mask_N,
            predictions=predictions,
            logprob_R=logprob_R,
            entropy_R=entropy_R,
            old_logprob_R=mb.data[self.old_logprobs][mask_N],
            lengths_R=self._lengths(mask_N, mb),
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
