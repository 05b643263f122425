"""The policy's objective on one micro-batch: the loss over its answer tokens, minus the entropy bonus.

Formulas are in realsys/algorithms/policy/token_losses.py; this module selects the batch's keys, the tokens
that count, and the micro-batch weights that make results independent of the split.
"""

from __future__ import annotations

import torch

from realsys.algorithms.aggregation import Aggregation, aggregate, aggregation_weight
from realsys.algorithms.policy.policy_loss import policy_loss
from realsys.algorithms.predictions import Predictions
from realsys.algorithms.sequence_sums import sum_per_sequence
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_mask, answer_tokens, kept_sets
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.off_policy import WEIGHTS
from realsys.interfaces.ppo.ppo_experience import BEHAVIOUR, PROXIMAL

_TOKENS = "tokens_per_weight"


class PolicyObjective:
    """The loss that the settings describe.

    Attributes:
        aggregation: how token losses are aggregated.
    """

    def __init__(self, settings: PPOSettings) -> None:
        self._settings = settings
        # Its options are checked at use.
        self.aggregation: Aggregation = settings.loss_aggregation  # type: ignore[assignment]

    def mask(self, data: SequenceSample) -> torch.Tensor:
        """Returns bool ``[N]``: answer tokens with a loss, before any is excluded by its weight."""
        mask_N = answer_mask(data)
        if not self._settings.mask_truncated:
            return mask_N
        lengths = torch.tensor(data.piece_lengths(INPUT), device=mask_N.device)
        truncated_N: torch.Tensor = data.data["seq_no_eos_mask"].repeat_interleave(lengths)
        return mask_N & ~truncated_N

    def has_gradient(self, data: SequenceSample) -> torch.Tensor:
        """Returns bool ``[N]``: tokens whose loss has a gradient, by their advantage or by another term.

        A new loss term must be added here. Tokens with weight 0 have no gradient except through the entropy
        bonus, which the minibatch's other tokens have as well.
        """
        counts_N = self.mask(data)
        if WEIGHTS in data.keys:
            counts_N = counts_N & (data.data[WEIGHTS] != 0)
        if self._settings.entropy_coef:
            return counts_N
        return counts_N & (data.data["advantages"] != 0)

    def weight(self, mb: SequenceSample) -> float:
        """Weight of a micro-batch in the denominator of loss and statistics (``loss_weight_fn``)."""
        return self._weight(self.mask(mb), mb)

    def loss(
        self, predictions: Predictions, mb: SequenceSample
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        """Returns a micro-batch's mean loss, its statistics, and the log-ratio of each of its R
        loss tokens.

        Statistics are passed to ``means_over_tokens`` after the engine has summed them.
        """
        settings, mask_N = self._settings, self.mask(mb)
        kept = kept_sets(mb, settings.gen)
        logprob_R, entropy_R = predictions.logprobs_and_entropy(
            *answer_tokens(mb, mask_N),
            temperature=settings.gen.temperature,
            train_entropy=settings.entropy_coef > 0,
            kept=None if kept is None else kept.take(mask_N),
        )
        old = PROXIMAL if settings.needs_prox_logprobs else BEHAVIOUR
        old_logprob_R = mb.data[old][mask_N]
        every_R = torch.ones_like(logprob_R, dtype=torch.bool)
        weight, lengths_R = self._weight(mask_N, mb), self._lengths(mask_N, mb)
        loss_R, found = policy_loss(
            settings.loss,
            logprob_R,
            old_logprob_R,
            mb.data["advantages"][mask_N],
            every_R,
            lengths=lengths_R,
            weights=mb.data[WEIGHTS][mask_N] if WEIGHTS in mb.keys else None,
        )

        def mean(per_token: torch.Tensor, by: Aggregation) -> torch.Tensor:
            return aggregate(per_token, every_R, by, denominator=weight, lengths=lengths_R)

        loss = mean(loss_R, self.aggregation)
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * mean(entropy_R, self.aggregation)
        figures = {
            "importance_weight": mean(found["importance_ratio"], "token_mean"),
            "clip_ratio": mean(found["clip_fraction"], "token_mean"),
            "dual_clip_ratio": mean(found["dual_clip_fraction"], "token_mean"),
            "approx_kl": mean(found["approx_kl_k3"], "token_mean"),
            "entropy": mean(entropy_R.detach(), "token_mean"),
        }
        if self.aggregation != "token_mean":
            figures[_TOKENS] = mean(torch.ones_like(loss_R), "token_mean")
        return loss, figures, logprob_R.detach() - old_logprob_R

    def means_over_tokens(self, stats: dict[str, float]) -> dict[str, float]:
        """Converts a step's ``stats`` to means over tokens, whatever the loss aggregation.

        Sums over tokens were divided by numbers of sequences; so was the number of tokens.
        """
        if self.aggregation == "token_mean":
            return stats
        tokens = stats[_TOKENS]
        own = ("importance_weight", "clip_ratio", "dual_clip_ratio", "approx_kl", "entropy")
        rest = {name: value for name, value in stats.items() if name != _TOKENS}
        return {**rest, **{name: stats[name] / tokens for name in own}}

    def _weight(self, mask_N: torch.Tensor, mb: SequenceSample) -> float:
        return aggregation_weight(
            mask_N,
            self.aggregation,
            lengths=mb.piece_lengths(INPUT),
            norm_length=self._settings.gen.max_new_tokens,
        )

    def _lengths(self, mask_N: torch.Tensor, mb: SequenceSample) -> list[int] | None:
        """Loss tokens of each sequence; None if neither aggregation nor loss needs them."""
        if self.aggregation == "token_mean" and not self._settings.loss.of_sequences:
            return None
        counts_B = sum_per_sequence(mask_N.long(), mb.piece_lengths(INPUT))
        lengths: list[int] = counts_B.tolist()
        return lengths
