"""On-policy distillation: what teachers add to the advantages of an answer's tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from realsys.api.errors import DataError
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_mask
from realsys.interfaces.ppo.batch_figures import mean_and_std

_KEY = "packed_teacher_logprobs_"


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
