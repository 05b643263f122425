"""Advantages over their deviation: in the batch, or in all batches so far. Within groups:
ppo_experience.py."""

from __future__ import annotations

import torch

from realsys.algorithms.advantage.advantages import masked_whiten
from realsys.algorithms.value.value_norm import RunningMoments
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.ppo_experience import FROM_SCORE


def normalised(
    batch: SequenceSample,
    settings: PPOSettings,
    mask_N: torch.Tensor,
    running: RunningMoments,
    ranks: DataParallel,
) -> SequenceSample:
    """Whitens advantages; of compared answers only the score's part, where it is not 0.

    So neither the KL penalty nor a group whose answers all scored the same is scaled up.

    Args:
        mask_N: tokens with a loss.
        running: of all batches so far; takes in this one with ``adv_norm=running``.
    """
    if settings.norm not in ("batch", "running"):
        return batch
    advantage_N = batch.data["advantages"]
    score_N = batch.data.get(FROM_SCORE, advantage_N)
    if FROM_SCORE in batch.keys:
        mask_N = mask_N & (score_N != 0)
    few = float(ranks.sum(mask_N.sum().double())) < 2
    if settings.norm == "running":
        running.update(score_N, mask_N, reduce=ranks.sum)
        white_N = running.normalise(score_N).masked_fill(~mask_N, 0.0)
    elif few and (settings.mask_truncated or FROM_SCORE in batch.keys):
        return batch  # too few for a variance; with none, nothing is trained
    else:
        white_N = masked_whiten(score_N, mask_N, reduce=ranks.sum)
    new = {**batch.data, "advantages": white_N + (advantage_N - score_N)}
    return SequenceSample(batch.meta, new)
