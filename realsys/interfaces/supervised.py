"""Supervised fine-tuning: next-token loss on answers, with the prompt masked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from realsys.algorithms.aggregation import aggregate
from realsys.algorithms.predictions import Predictions
from realsys.api.data import MicroBatchSpec
from realsys.api.model import Model, ModelInterface
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_tokens, num_answer_tokens
from realsys.interfaces.skipped_steps import without_skipped


@dataclass(frozen=True, kw_only=True)
class SFTInterface(ModelInterface):
    """Interface that reads ``packed_input_ids`` and ``prompt_mask`` (True on tokens without loss)."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """Makes one optimizer step; returns ``loss``, ``grad_norm``, ``lr``, ``n_tokens``,
        ``n_sequences``.
        """
        stats: dict[str, float] = model.module.train_batch(
            input_=data,
            loss_fn=next_token_loss,
            loss_weight_fn=num_answer_tokens,
            mb_spec=mb_spec,
            version_steps=model.version.global_step,
        )
        model.inc_version()
        return {**without_skipped(stats), **_sizes(model, data)}

    def evaluate(
        self, model: Model, eval_batches: Iterable[SequenceSample], mb_spec: MicroBatchSpec
    ) -> dict[str, Any]:
        """Computes ``loss`` and ``perplexity`` per answer token of the held-out data, over all ranks.

        Every rank must pass the same number of batches.
        """
        total_loss = total_tokens = 0.0
        for batch in eval_batches:
            means = model.module.eval_batch(
                input_=batch,
                loss_fn=next_token_loss,
                loss_weight_fn=num_answer_tokens,
                mb_spec=mb_spec,
            )
            tokens = _sizes(model, batch)["n_tokens"]
            total_loss += means["loss"] * tokens
            total_tokens += tokens
        loss = total_loss / total_tokens if total_tokens else math.nan
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "n_tokens": total_tokens}

    def save(self, model: Model, save_dir: str) -> None:
        """Writes a Hugging Face directory."""
        model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=save_dir)


def next_token_loss(predictions: Predictions, mb: SequenceSample) -> torch.Tensor:
    """Mean of ``-log p`` over the answer tokens."""
    loss_R = -predictions.logprobs(*answer_tokens(mb))
    mask_R = torch.ones_like(loss_R, dtype=torch.bool)
    return aggregate(loss_R, mask_R, "token_mean", denominator=float(len(loss_R)))


def _sizes(model: Model, data: SequenceSample) -> dict[str, float]:
    """Numbers of answer tokens and sequences over all ranks."""
    own = [num_answer_tokens(data), float(len(data.piece_lengths(INPUT)))]
    sums = DataParallel.of(model).sum(torch.tensor(own, dtype=torch.float64)).tolist()
    return dict(zip(("n_tokens", "n_sequences"), sums, strict=True))
