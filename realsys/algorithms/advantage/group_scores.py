"""Answers with their scores, as estimators of advantages see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class GroupScores:
    """B answers of one data-parallel rank; groups are whole.

    Attributes:
        scores: float32 ``[B]``, shaped and clipped.
        groups: int64 ``[B]``, 0 …: which question each answers.
        lengths: int64 ``[B]``, tokens that the policy wrote.
        parts: float32 ``[B]`` each: parts of the reward, before shaping; NaN where an answer has none of
            that name. Only for estimators with ``reads_parts``.
    """

    scores: torch.Tensor
    groups: torch.Tensor
    lengths: torch.Tensor
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def group_sum(self, x_B: torch.Tensor) -> torch.Tensor:
        """Returns ``[B]``: the sum over each answer's group."""
        num = int(self.groups.max()) + 1 if len(self.groups) else 0
        return x_B.new_zeros(num).index_add_(0, self.groups, x_B)[self.groups]

    def group_mean(self, x_B: torch.Tensor) -> torch.Tensor:
        """Returns ``[B]``: the mean over each answer's group."""
        return self.group_sum(x_B) / self.group_sum(torch.ones_like(x_B))
