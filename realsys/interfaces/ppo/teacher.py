"""On-policy distillation: what teachers say about the policy's own answers, and what becomes of it.

reverse   log π of each token that was drawn         → its advantage
forward   its most probable tokens with their log π  → a term of the loss
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from realsys.algorithms.predictions import Predictions, next_token_logprobs
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import DataError
from realsys.api.model import Model, ModelInterface
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_mask, kept_sets
from realsys.interfaces.interface_arguments import TeacherArguments
from realsys.interfaces.ppo.batch_figures import mean_and_std

_KEY = "packed_teacher_logprobs_"
TOP_IDS, TOP_LOGPROBS = "packed_teacher_top_ids_", "packed_teacher_top_logprobs_"


@dataclass(frozen=True, kw_only=True)
class TeacherInterface(TeacherArguments, ModelInterface):
    """Interface of a frozen policy that is asked about another one's answers."""

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """Computes, at the temperature of sampling, float32 ``logprobs`` of every token, over its kept set
        if ``data`` has them; or with ``top_k`` int32 ``top_ids`` and float32 ``top_logprobs`` ``[N, k]``,
        the most probable tokens at each place, over the whole vocabulary. What stands at a sequence's first
        token means nothing.
        """

        def found(predictions: Predictions, mb: SequenceSample) -> torch.Tensor:
            if self.top_k:
                made = predictions.top_k(self.top_k, temperature=self.gen.temperature)
                # Row t is about the token at t + 1. Ids of any vocabulary are exact in float32.
                return torch.cat([x.float() for x in made], 1).roll(1, 0)
            return next_token_logprobs(
                predictions,
                mb.data[INPUT],
                mb.piece_lengths(INPUT),
                temperature=self.gen.temperature,
                kept=kept_sets(mb, self.gen),
            )

        output = model.module.forward(data, mb_spec=mb_spec, post_hook=found)
        new = {"logprobs": output}
        if self.top_k:
            ids, logprobs = output.chunk(2, dim=1)
            new = {"top_ids": ids.int(), "top_logprobs": logprobs.contiguous()}
        seqlens = dict.fromkeys(new, data.meta.seqlens[INPUT])
        return SequenceSample.from_tensors(data.ids, seqlens, new)


def forward_kl(own_RK: torch.Tensor, teacher_RK: torch.Tensor) -> torch.Tensor:
    """float32 ``[R]``: Σ over the teacher's K most probable tokens of p (log p − log π) − p + π.

    The forward KL (Agarwal et al., arXiv:2306.13649, eq. 1), generalised to a part of the vocabulary, whose
    probabilities add up to less than 1: so it is 0 or more, and 0 where π has the teacher's. Without − p +
    π it would be least where π has more of these tokens than the teacher. Over the whole vocabulary they
    cancel.

    Args:
        own_RK: log π, with the gradient. teacher_RK: log p.
    """
    teacher_RK = teacher_RK.detach().float()
    own_RK = own_RK.float()
    p_RK = teacher_RK.exp()
    return (p_RK * (teacher_RK - own_RK) - p_RK + own_RK.exp()).sum(1)


def with_teachers(
    batch: SequenceSample,
    teachers: Mapping[str, float],
    old_logprob_N: torch.Tensor,
    ranks: DataParallel,
) -> tuple[SequenceSample, dict[str, float]]:
    """Adds Σ weight · (log π_teacher − log π_old) to each answer token's advantage; returns statistics too.

    The policy's gradient is then that of −Σ weight · KL(π ‖ π_teacher), one token at a time (reverse KL;
    Agarwal et al., arXiv:2306.13649; Lu and Thinking Machines Lab 2025, "On-Policy Distillation"). All
    log-probs are at the temperature of sampling, and constants.

    Raises:
        DataError: a teacher's log-probs are missing or not finite. Raised on all ranks.
    """
    if not teachers:
        return batch, {}
    mask_N, figures = answer_mask(batch), {}
    advantage_N = batch.data["advantages"]
    for key, weight in teachers.items():
        if key not in batch.keys or batch.meta.seqlens[key] != batch.meta.seqlens[INPUT]:
            raise DataError(
                f"no {key!r} of the batch's tokens",
                where="ppo_actor, teachers",
                fix="let an inference call of the teacher write it before actor_train",
            )
        apart_N = (batch.data[key] - old_logprob_N).float().masked_fill(~mask_N, 0.0)
        if float(ranks.sum((~apart_N.isfinite()).sum().double())):
            raise DataError(
                f"answer tokens have a {key} that is not finite",
                where="ppo_actor, teachers",
                fix="check the teacher's weights",
            )
        advantage_N = advantage_N + weight * apart_N
        figures[f"teacher/{key.removeprefix(_KEY)}/kl"] = -mean_and_std(apart_N, mask_N, ranks)[0]
    return SequenceSample(batch.meta, {**batch.data, "advantages": advantage_N}), figures
