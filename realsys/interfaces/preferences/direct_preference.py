"""Trains a policy on pairs of answers, the better one first, without a reward model (DPO and others).

The reference is the starting model, frozen. While training it is a model of its own, whose call writes
``packed_ref_logprobs``. Of held-out pairs its log-probs are those of the policy before the first update,
which this interface keeps. Losses are in realsys/algorithms/preference/pair_losses.py.

Shape suffixes: N tokens, R of them of answers, S = 2 P answers of P pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from realsys.algorithms.predictions import Predictions
from realsys.algorithms.preference.pair_losses import (
    PairLogprobs,
    kl_estimate_of,
    mean_log_ratio,
    pair_logprobs,
    pair_losses,
)
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError
from realsys.api.model import Model, ModelInterface
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_lengths, answer_mask, answer_tokens
from realsys.interfaces.interface_arguments import DirectPreferenceArguments
from realsys.interfaces.preferences.preference_training import (
    held_out_means,
    num_pairs,
    require_whole_pairs,
)
from realsys.interfaces.skipped_steps import without_skipped

REFERENCE = "packed_ref_logprobs"
KL_ESTIMATE = "kl_estimate"


@dataclass(frozen=True, kw_only=True, eq=False)
class DirectPreferenceInterface(DirectPreferenceArguments, ModelInterface):
    """Interface of policy and reference. It reads ``packed_input_ids`` and ``prompt_mask`` of two sequences
    an id, the preferred one first, and ``packed_ref_logprobs`` if the loss has a reference.
    """

    # Of held-out pairs: id → float32 log-probs of both answers' tokens by the reference, on the CPU.
    _held_out: dict[str, torch.Tensor] = field(init=False, repr=False, default_factory=dict)

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """Computes float32 ``logprobs`` of every token at temperature 1; 0 on prompts."""

        def logprobs(predictions: Predictions, mb: SequenceSample) -> torch.Tensor:
            mask_N = answer_mask(mb)
            logprob_R = predictions.logprobs(*answer_tokens(mb, mask_N))
            found_N = torch.zeros(len(mask_N), device=logprob_R.device, dtype=logprob_R.dtype)
            found_N[mask_N] = logprob_R
            return found_N

        output = model.module.forward(data, mb_spec=mb_spec, post_hook=logprobs)
        seqlens = {"logprobs": data.meta.seqlens[INPUT]}
        return SequenceSample.from_tensors(data.ids, seqlens, {"logprobs": output})

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """Makes one optimizer step on the mean loss of all pairs; returns the statistics of ``pair_loss``,
        ``grad_norm``, ``lr``, and ``kl_estimate`` if the loss reads it.
        """
        estimate = self._kl_estimate(model, (data,), mb_spec)
        stats: dict[str, float] = model.module.train_batch(
            input_=data,
            loss_fn=partial(self.pair_loss, kl_estimate=estimate.get(KL_ESTIMATE, 0.0)),
            loss_weight_fn=num_pairs,
            mb_spec=mb_spec,
            version_steps=model.version.global_step,
        )
        model.inc_version()
        return without_skipped(stats) | estimate

    def evaluate(
        self, model: Model, eval_batches: Iterable[SequenceSample], mb_spec: MicroBatchSpec
    ) -> dict[str, Any]:
        """Computes the statistics of ``pair_loss`` over all held-out pairs, and ``n_pairs``.

        Before the first update the policy is the reference: its log-probs are kept for later evaluations.
        Every rank must pass the same number of batches.

        Raises:
            ConfigError: pairs that were not held out when the training began.
        """
        batches = list(eval_batches)
        if self.loss.needs_reference:
            if model.version.global_step == 0:
                for batch in batches:
                    self._keep_reference(self.inference(model, batch, mb_spec))
            batches = [self._with_reference(batch) for batch in batches]
        estimate = self._kl_estimate(model, batches, mb_spec)
        loss_fn = partial(self.pair_loss, kl_estimate=estimate.get(KL_ESTIMATE, 0.0))
        return held_out_means(model, batches, loss_fn, mb_spec) | estimate

    def save(self, model: Model, save_dir: str) -> None:
        """Writes a Hugging Face directory."""
        model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=save_dir)

    def state_dict(self) -> dict[str, Any]:
        """Log-probs of held-out pairs by the reference."""
        return {"held_out": dict(self._held_out)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self._held_out.clear()
        self._held_out.update(state["held_out"])

    def pair_loss(
        self, predictions: Predictions, mb: SequenceSample, *, kl_estimate: float = 0.0
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Mean loss of a micro-batch's pairs, and means over them, without gradient.

        These are ``accuracy`` (share of pairs whose chosen answer has the larger implicit reward; equal
        rewards count half), ``chosen_reward``, ``rejected_reward``, ``margin`` (their difference), and
        ``chosen_logprob``, ``rejected_logprob`` (nats a token: each answer's mean).

        Args:
            kl_estimate: z₀ of KTO, of the whole batch.
        Raises:
            ConfigError: the two answers of a pair are in different micro-batches.
        """
        pairs = self._pairs(predictions, mb, kl_estimate=kl_estimate)
        made = pair_losses(self.loss, pairs)
        with torch.no_grad():
            margin_P = made.chosen_rewards - made.rejected_rewards
            figures = {
                "accuracy": (margin_P.sign() + 1) / 2,
                "margin": margin_P,
                "chosen_reward": made.chosen_rewards,
                "rejected_reward": made.rejected_rewards,
                "chosen_logprob": pairs.chosen / pairs.chosen_lengths,
                "rejected_logprob": pairs.rejected / pairs.rejected_lengths,
            }
            means = {name: x_P.mean() for name, x_P in figures.items()}
        return made.losses.mean(), means

    def _pairs(
        self, predictions: Predictions, mb: SequenceSample, *, kl_estimate: float = 0.0
    ) -> PairLogprobs:
        require_whole_pairs(mb)
        mask_N = answer_mask(mb)
        ref_R = mb.data[REFERENCE][mask_N] if self.loss.needs_reference else None
        logprob_R = predictions.logprobs(*answer_tokens(mb, mask_N))
        return pair_logprobs(logprob_R, ref_R, answer_lengths(mb), kl_estimate=kl_estimate)

    def _kl_estimate(
        self, model: Model, batches: Iterable[SequenceSample], mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """Computes z₀ over the pairs of these batches on all ranks, by a pass without gradients; empty for
        a loss that does not read it.
        """
        if not self.loss.needs_kl_estimate:
            return {}

        def log_ratio(predictions: Predictions, mb: SequenceSample) -> torch.Tensor:
            return mean_log_ratio(self._pairs(predictions, mb))

        return {
            KL_ESTIMATE: kl_estimate_of(held_out_means(model, batches, log_ratio, mb_spec)["loss"])
        }

    # ---- the reference on held-out pairs ------------------------------------------------------

    def _keep_reference(self, logprobs: SequenceSample) -> None:
        for sample in logprobs.unpack():
            self._held_out[sample.ids[0]] = sample.data["logprobs"].cpu()

    def _with_reference(self, batch: SequenceSample) -> SequenceSample:
        lengths = batch.meta.rows_per_id(INPUT)
        found = [self._held_out.get(name) for name in batch.ids]
        known = [
            x_N for x_N, n in zip(found, lengths, strict=True) if x_N is not None and len(x_N) == n
        ]
        if len(known) < len(lengths):
            raise ConfigError(
                f"{len(lengths) - len(known)} of {len(lengths)} held-out pairs were not held out when the "
                "training began, so their log-probs under the starting model are not known",
                where="task.eval_size, task.eval_path",
                fix="resume with the held-out pairs of the start, or with task.eval_size=0",
            )
        seqlens = {REFERENCE: batch.meta.seqlens[INPUT]}
        tensors = {REFERENCE: torch.cat(known)} if known else {REFERENCE: torch.zeros(0)}
        return batch.update(SequenceSample.from_tensors(batch.ids, seqlens, tensors))
