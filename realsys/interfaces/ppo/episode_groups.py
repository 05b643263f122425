"""Which sequences of a batch are branches of one episode: groups compare episodes, not branches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from realsys.algorithms.advantage.group_scores import GroupScores
from realsys.api.basics.reward import EPISODES
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT


@dataclass(frozen=True)
class EpisodeGroups:
    """E episodes of B sequences.

    Attributes:
        group_E: int64 ``[E]``: the id that each is an episode of.
        episode_B: int64 ``[B]``; None: each sequence is an episode.
    """

    group_E: torch.Tensor
    episode_B: torch.Tensor | None = None

    @staticmethod
    def of(data: SequenceSample, device: torch.device) -> EpisodeGroups:
        """Reads them from a batch."""
        pieces = data.meta.seqlens[INPUT]
        group_B = torch.tensor([i for i, group in enumerate(pieces) for _ in group], device=device)
        texts = data.meta.metadata.get(EPISODES)
        if not texts:
            return EpisodeGroups(group_B)
        episode_B: list[int] = []
        group_E: list[int] = []
        for place, (text, group) in enumerate(zip(texts, pieces, strict=True)):
            numbers = json.loads(text)
            if len(numbers) != len(group):  # a record that was set aside
                numbers = list(range(len(group)))
            order = {number: i for i, number in enumerate(dict.fromkeys(numbers))}
            episode_B += [len(group_E) + order[number] for number in numbers]
            group_E += [place] * len(order)
        if len(group_E) == len(episode_B):
            return EpisodeGroups(group_B)
        return EpisodeGroups(
            torch.tensor(group_E, device=device), torch.tensor(episode_B, device=device)
        )

    def scores(
        self,
        score_B: torch.Tensor,
        lengths_B: torch.Tensor,
        parts: Mapping[str, torch.Tensor] | None = None,
    ) -> GroupScores:
        """Returns what estimators compare: an episode's score is the mean of its branches'."""
        return GroupScores(
            self.mean(score_B),
            self.group_E,
            self.sum(lengths_B),
            parts={name: self.mean(part_B) for name, part_B in (parts or {}).items()},
        )

    def sum(self, x_B: torch.Tensor) -> torch.Tensor:
        """``[E]``: the sum over each episode's sequences."""
        if self.episode_B is None:
            return x_B
        return x_B.new_zeros(len(self.group_E)).index_add_(0, self.episode_B, x_B)

    def mean(self, x_B: torch.Tensor) -> torch.Tensor:
        """``[E]``: the mean over each episode's sequences."""
        if self.episode_B is None:
            return x_B
        return self.sum(x_B) / self.sum(torch.ones_like(x_B))

    def spread(self, x_E: torch.Tensor) -> torch.Tensor:
        """``[B]``: each sequence gets its episode's."""
        return x_E if self.episode_B is None else x_E[self.episode_B]
