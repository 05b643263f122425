"""Trains a reward model on pairs of answers, the better one first (Bradley-Terry)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError
from realsys.api.model import LossFn, Model, ModelInterface
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT
from realsys.interfaces.interface_arguments import PreferenceArguments
from realsys.interfaces.skipped_steps import without_skipped


@dataclass(frozen=True, kw_only=True)
class PreferenceInterface(PreferenceArguments, ModelInterface):
    """Interface that reads ``packed_input_ids``: two sequences an id, the preferred one first.

    The module gives one value a token; a sequence's score is that of its last token. It is saved as such a
    module, which tells it from transformers' sequence classifiers (realsys.models.hf).
    """

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """Makes one optimizer step; returns ``loss``, ``accuracy`` (share of pairs whose preferred answer
        scores higher), ``margin`` (mean difference of their scores), ``grad_norm``, ``lr``.
        """
        stats: dict[str, float] = model.module.train_batch(
            input_=data,
            loss_fn=self.pair_loss,
            loss_weight_fn=num_pairs,
            mb_spec=mb_spec,
            version_steps=model.version.global_step,
        )
        model.inc_version()
        return without_skipped(stats)

    def evaluate(
        self, model: Model, eval_batches: Iterable[SequenceSample], mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """Computes ``accuracy``, ``margin`` and ``loss`` of the held-out pairs, and ``n_pairs``.

        Every rank must pass the same number of batches.
        """
        return held_out_means(model, eval_batches, self.pair_loss, mb_spec)

    def save(self, model: Model, save_dir: str) -> None:
        """Writes a Hugging Face directory that ``reward_model.path`` takes."""
        model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=save_dir)

    def pair_loss(
        self, values_N: torch.Tensor, mb: SequenceSample
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Mean over pairs of −log σ(c − r) + centering · (c + r)² (Eisenstein et al., arXiv:2312.09244).

        Args:
            values_N: float ``[N]``, one value a token.
        Raises:
            ConfigError: the two answers of a pair are in different micro-batches.
        """
        require_whole_pairs(mb)
        chosen_P, rejected_P = last_values(values_N, mb).view(-1, 2).unbind(1)
        margin_P = chosen_P - rejected_P
        centering_P = self.centering * (chosen_P + rejected_P).square()
        loss = (centering_P - logsigmoid(margin_P)).mean()
        return loss, {"accuracy": (margin_P > 0).float().mean(), "margin": margin_P.mean()}


def last_values(
    values_N: torch.Tensor, data: SequenceSample, *, skips: int | None = None
) -> torch.Tensor:
    """Returns ``[S]``: the value of each sequence's last token that is not ``skips``; of its first if there
    is none.
    """
    lengths_S = torch.tensor(data.piece_lengths(INPUT), device=values_N.device)
    ends_S = lengths_S.cumsum(0)
    if skips is None:
        return values_N[ends_S - 1]
    places_N = torch.arange(len(values_N), device=values_N.device)
    sequence_N = torch.arange(len(lengths_S), device=values_N.device).repeat_interleave(lengths_S)
    counts_N = data.data[INPUT].to(values_N.device) != skips
    found_S = (ends_S - lengths_S).scatter_reduce(
        0, sequence_N[counts_N], places_N[counts_N], "amax"
    )
    return values_N[found_S]


def num_pairs(data: SequenceSample) -> float:
    """Number of pairs; the ``loss_weight_fn`` of losses that are means over them."""
    return float(data.batch_size)


def require_whole_pairs(mb: SequenceSample) -> None:
    """Refuses a micro-batch with one answer of a pair.

    Raises:
        ConfigError: the other one is in another micro-batch.
    """
    if any(len(pieces) != 2 for pieces in mb.meta.seqlens[INPUT]):
        raise ConfigError(
            "the two answers of a pair do not fit one micro-batch",
            where="model.max_tokens_per_mb",
            fix="raise it to twice max_answer_len + task.max_prompt_len, or set it to none",
        )


def held_out_means(
    model: Model, batches: Iterable[SequenceSample], loss_fn: LossFn, mb_spec: MicroBatchSpec
) -> dict[str, float]:
    """Means over all pairs of what ``loss_fn`` returns (``loss`` and its statistics), and ``n_pairs``.

    Every rank must pass the same number of batches. Without a pair the means are missing, and ``loss`` NaN.
    """
    sums: dict[str, float] = {}
    pairs = 0.0
    for batch in batches:
        means = model.module.eval_batch(
            input_=batch, loss_fn=loss_fn, loss_weight_fn=num_pairs, mb_spec=mb_spec
        )
        own = torch.tensor([num_pairs(batch)], dtype=torch.float64)
        size = float(DataParallel.of(model).sum(own)[0])
        sums = {name: sums.get(name, 0.0) + value * size for name, value in means.items()}
        pairs += size
    found = {name: total / pairs if pairs else math.nan for name, total in sums.items()}
    return {"loss": math.nan, **found, "n_pairs": pairs}
