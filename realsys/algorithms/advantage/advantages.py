"""Advantages and returns: GAE for a critic, group baselines without one, and whitening.

Shapes: B sequences, T response tokens (padded on the right). Index t is an action: ``value_BT[t]``
is the critic's value of the state *before* token t. ``mask_BT`` is 1 on response tokens, the end
token among them, and 0 on padding and on tokens the policy did not write (tool output).
Everything here is a constant to the optimizer: no gradient flows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch

from realsys.algorithms.tensor_checks import require_same_shape
from realsys.api.errors import ConfigError, DataError, did_you_mean

Reduce = Callable[[torch.Tensor], torch.Tensor]  # sums a small float64 tensor over ranks
Truncation = Literal["terminal", "bootstrap"]
ROUNDING_OF_MEANS = 1e-12  # of the mean, in float64, over up to billions of numbers


@torch.no_grad()
def gae_advantages(
    reward_BT: torch.Tensor,
    value_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    gamma: float,
    lam: float | torch.Tensor,
    truncation: Truncation = "terminal",
    truncated_B: torch.Tensor | None = None,
    bootstrap_value_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates, not whitened (Schulman et al., arXiv:1506.02438, eq. 16).

    At a token with mask 0 inside a response the next value and advantage pass through unchanged,
    as if the token were not there; a reward on it is ignored.

    Args:
        lam: of all sequences, or float ``[B]`` of each.
        truncation: what follows the last token of an answer that was cut off. ``terminal``:
            nothing, value 0, as after an end token. ``bootstrap``: ``bootstrap_value_B``.
        truncated_B: bool, True where the answer was cut off. Needed for ``bootstrap``.
        bootstrap_value_B: value of the state *after* the last token. Needed for ``bootstrap``.
    Returns:
        float32 ``[B, T]`` advantages and returns (advantage + value), 0 where the mask is 0.
    """
    where = "gae_advantages"
    require_same_shape(where, reward_BT=reward_BT, value_BT=value_BT, mask_BT=mask_BT)
    reward_BT, value_BT, mask_BT = reward_BT.float(), value_BT.float(), mask_BT.bool()
    next_value_B = _value_after_last_token(value_BT, truncation, truncated_B, bootstrap_value_B)
    next_advantage_B = torch.zeros_like(next_value_B)
    advantage_BT = torch.zeros_like(value_BT)
    for t in reversed(range(value_BT.shape[1])):
        mask_B, value_B = mask_BT[:, t], value_BT[:, t]
        delta_B = reward_BT[:, t] + gamma * next_value_B - value_B
        next_advantage_B = torch.where(
            mask_B, delta_B + gamma * lam * next_advantage_B, next_advantage_B
        )
        next_value_B = torch.where(mask_B, value_B, next_value_B)
        advantage_BT[:, t] = next_advantage_B
    advantage_BT = advantage_BT.masked_fill(~mask_BT, 0.0)
    return advantage_BT, (advantage_BT + value_BT).masked_fill(~mask_BT, 0.0)


def length_adaptive_lambda(lengths_B: torch.Tensor, alpha: float) -> torch.Tensor:
    """float32 ``[B]``: 1 − 1 / (alpha · length), at least 0 (VAPO, arXiv:2504.05118, sec. 4.2): the same
    share of an answer's tokens hears of its end, whatever its length.
    """
    return (1.0 - 1.0 / (alpha * lengths_B.clamp(min=1).float())).clamp(min=0.0)


def _value_after_last_token(
    value_BT: torch.Tensor,
    truncation: str,
    truncated_B: torch.Tensor | None,
    bootstrap_value_B: torch.Tensor | None,
) -> torch.Tensor:
    if truncation == "terminal":
        return value_BT.new_zeros(value_BT.shape[0])
    if truncation != "bootstrap":
        raise ConfigError(
            f"no truncation rule {truncation!r}",
            where="gae_advantages",
            fix=did_you_mean(truncation, ("terminal", "bootstrap")),
        )
    if truncated_B is None or bootstrap_value_B is None:
        raise DataError(
            "truncation is 'bootstrap' but truncated_B or bootstrap_value_B is missing",
            where="gae_advantages",
            fix="pass both, or use truncation='terminal'",
        )
    require_same_shape(
        "gae_advantages",
        one_value_a_sequence=value_BT.new_empty(value_BT.shape[0]),
        truncated_B=truncated_B,
        bootstrap_value_B=bootstrap_value_B,
    )
    return bootstrap_value_B.float().masked_fill(~truncated_B.bool(), 0.0)


@torch.no_grad()
def group_advantages(
    score_B: torch.Tensor,
    groups: torch.Tensor | int,
    *,
    normalise_std: bool,
    leave_one_out: bool = False,
    unbiased: bool = True,
    eps: float = 1e-6,
) -> torch.Tensor:
    """float32 ``[B]``: how much better each answer scored than others to the same prompt.

    - GRPO (arXiv:2402.03300, section 4.1): ``normalise_std=True``, (r - mean) / (std + eps).
    - Dr. GRPO (arXiv:2503.20783, section 3.2): ``normalise_std=False``, r - mean.
    - RLOO (arXiv:2402.14740): ``leave_one_out=True``, r - mean of the others.

    A group of one has no baseline: its advantage is 0. (Taking mean 0 and deviation 1 for it, as
    some codebases do, would train on the raw reward.) So is that of a group of equal scores, exactly.

    Args:
        groups: int ``[B]`` naming each answer's group, or the size of consecutive groups.
        unbiased: of ``normalise_std``: the deviation divides by n - 1.
    """
    if normalise_std and leave_one_out:
        raise ConfigError(
            "normalise_std and leave_one_out are both set",
            where="group_advantages",
            fix="use normalise_std for GRPO, leave_one_out for RLOO",
        )
    group_B = _group_index(groups, score_B)
    score = score_B.double()  # equal scores must differ from their mean by far less than eps
    num_groups = int(group_B.max()) + 1 if len(group_B) else 0

    def sum_per_group(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(num_groups).index_add_(0, group_B, x)[group_B]

    count = sum_per_group(torch.ones_like(score))
    others = (count - 1).clamp(min=1)
    # Three times 0.1 over 3 is not 0.1: what differs by rounding alone must not teach anything.
    differs = _spread(score, group_B, num_groups)[group_B] > 0
    centred = (score - sum_per_group(score) / count).masked_fill(~differs, 0.0)
    if leave_one_out:  # r_i - mean of the others = (r_i - mean of all) · n / (n - 1)
        centred = centred * count / others
    elif normalise_std:
        variance = sum_per_group(centred**2) / (others if unbiased else count)
        centred = centred / (variance.sqrt() + eps)
    return centred.float()


@torch.no_grad()
def num_equal_groups(score_B: torch.Tensor, groups: torch.Tensor | int) -> tuple[int, int]:
    """How many groups there are whose answers all scored the same, and how many of two answers or more.

    ``groups`` as in ``group_advantages``. A group of one is in neither number.
    """
    group_B = _group_index(groups, score_B)
    sizes_G = torch.bincount(group_B)
    equal_G = (_spread(score_B.double(), group_B, len(sizes_G)) == 0) & (sizes_G > 1)
    return int(equal_G.sum()), int((sizes_G > 1).sum())


def _spread(score_B: torch.Tensor, group_B: torch.Tensor, num_groups: int) -> torch.Tensor:
    """``[groups]``: the largest score of each less its smallest."""
    empty_G = score_B.new_zeros(num_groups)
    largest_G = empty_G.scatter_reduce(0, group_B, score_B, "amax", include_self=False)
    smallest_G = empty_G.scatter_reduce(0, group_B, score_B, "amin", include_self=False)
    return largest_G - smallest_G


def _group_index(groups: torch.Tensor | int, score_B: torch.Tensor) -> torch.Tensor:
    if isinstance(groups, torch.Tensor):
        require_same_shape("group_advantages", score_B=score_B, groups=groups)
        index_B: torch.Tensor = torch.unique(groups.to(score_B.device), return_inverse=True)[1]
        return index_B
    if groups < 1 or len(score_B) % groups:
        raise DataError(
            f"{len(score_B)} scores don't make groups of {groups}",
            where="group_advantages",
            fix="pass the number of answers a prompt, or each answer's group",
        )
    return torch.arange(len(score_B), device=score_B.device) // groups


def masked_sums(
    x: torch.Tensor, mask: torch.Tensor, reduce: Reduce | None = None
) -> tuple[float, float, float]:
    """Count, sum and sum of squares of ``x`` where ``mask``, over all ranks if ``reduce`` is given.

    In float64: float32 sums of squares lose the variance of large values.
    """
    require_same_shape("masked_sums", x=x, mask=mask)
    kept = x.detach()[mask.bool()].double()
    sums = torch.stack([kept.new_tensor(float(kept.numel())), kept.sum(), (kept * kept).sum()])
    count, first, second = (sums if reduce is None else reduce(sums)).tolist()
    return count, first, second


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scalar float32 mean of ``x`` where ``mask``; nan if nothing is, as of any empty mean.

    A statistic. Losses need the global denominator instead: policy_loss.aggregate.
    """
    require_same_shape("masked_mean", x=x, mask=mask)
    mask = mask.bool()
    return x.float().masked_fill(~mask, 0.0).sum() / mask.sum()


def differences(x: torch.Tensor, mean: float) -> torch.Tensor:
    """float64 ``x`` − ``mean``, exactly 0 where the two differ by the rounding of the mean alone.

    The mean of n equal numbers is not always that number: what is left, some 1e-16 of it, would be an
    advantage, and AdamW makes a whole step of any gradient. Float32 numbers that differ, differ by 6e-8 of
    themselves or more.
    """
    apart = x.double() - mean
    return apart.masked_fill(apart.abs() <= ROUNDING_OF_MEANS * abs(mean), 0.0)


@torch.no_grad()
def masked_whiten(
    x: torch.Tensor,
    mask: torch.Tensor,
    *,
    unbiased: bool = True,
    eps: float = 1e-8,
    reduce: Reduce | None = None,
) -> torch.Tensor:
    """float32: (x - mean) / sqrt(variance + eps) over the elements where ``mask``, 0 elsewhere.

    Args:
        unbiased: the variance divides by n - 1.
        reduce: sums a float64 ``[3]`` tensor over the data-parallel ranks (all of them call it),
            so that all whiten by the same mean. Without it the mean is this rank's own.
    Raises:
        DataError: too few elements, over all ranks, to have a variance.
    """
    count, first, second = masked_sums(x, mask, reduce)
    if count < (2 if unbiased else 1):
        raise DataError(
            f"{count:.0f} elements have no variance",
            where="masked_whiten",
            fix="use a larger batch, or don't whiten",
        )
    mean = first / count
    variance = max(second / count - mean * mean, 0.0)
    if unbiased:
        variance *= count / (count - 1)
    whitened = differences(x, mean) / math.sqrt(variance + eps)
    return whitened.float().masked_fill(~mask.bool(), 0.0)
