"""Figures of a batch for the metrics, equal on all data-parallel ranks."""

from __future__ import annotations

import torch

from realsys.algorithms.advantage.advantages import masked_sums
from realsys.api.errors import DataError
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import PROMPT_MASK, answer_lengths, answer_mask


def mean_and_std(x: torch.Tensor, mask: torch.Tensor, ranks: DataParallel) -> tuple[float, float]:
    """Mean and standard deviation over all ranks' elements where ``mask``; nan if there are none."""
    count, first, second = masked_sums(x, mask, ranks.sum)
    if not count:
        return float("nan"), float("nan")
    mean = first / count
    return mean, max(second / count - mean * mean, 0.0) ** 0.5


def require_something_to_learn(
    batch: SequenceSample, scored_B: torch.Tensor, ranks: DataParallel
) -> None:
    """Refuses a batch of which no advantage could be made, whatever the estimator; alike on all ranks.

    Raises:
        DataError: no answer has a reward, or none has a token that the policy wrote.
    """
    own = [float(scored_B.sum()), float((~scored_B).sum()), float(answer_mask(batch).sum())]
    scored, unscored, tokens = ranks.sum(torch.tensor(own, dtype=torch.float64)).tolist()
    if not scored:
        raise DataError(
            f"none of the {unscored:.0f} answers of the batch has a reward",
            where="rewards",
            fix="look for `record set aside` in the logs of the workers that score",
        )
    if not tokens:
        raise DataError(
            f"the batch has no answer token, in {scored:.0f} answers",
            where=PROMPT_MASK,
            fix="look at the agent's episodes: all in them is marked as prompt or as a tool's output",
        )


def batch_figures(
    batch: SequenceSample, scored_B: torch.Tensor, ranks: DataParallel
) -> dict[str, float]:
    """Rewards, advantages and lengths of a batch that ``require_something_to_learn`` accepts."""
    x, mask_N = batch.data, answer_mask(batch)
    lengths = answer_lengths(batch)
    own = [float(x["seq_no_eos_mask"].sum()), float(len(mask_N))]
    own += [float(scored_B.sum()), float((~scored_B).sum())]
    sums = ranks.sum(torch.tensor(own, dtype=torch.float64)).tolist()
    no_eos, num_tokens, num_sequences, num_unscored = sums
    reward_mean, reward_std = mean_and_std(x["rewards"], scored_B, ranks)
    length_mean, _ = mean_and_std(torch.tensor(lengths, device=scored_B.device), scored_B, ranks)
    advantage_mean, advantage_std = mean_and_std(x["advantages"], mask_N, ranks)
    return {
        **({"reward/answers_set_aside": num_unscored} if num_unscored else {}),
        "reward/mean": reward_mean,
        "reward/std": reward_std,
        "advantage/mean": advantage_mean,
        "advantage/std": advantage_std,
        "response_length/mean": length_mean,
        "response_length/max": ranks.max(max(lengths)),
        "no_eos_ratio": no_eos / num_sequences,
        "n_tokens": num_tokens,
        "n_sequences": num_sequences,
    }
