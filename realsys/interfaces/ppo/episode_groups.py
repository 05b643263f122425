"""Which sequences of a batch are branches of one episode: groups compare episodes, not branches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from realsys.algorithms.advantage.group_scores import GroupScores
from realsys.api.basics.reward import EPISODES
from realsys.api.errors import DataError
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT


@dataclass(frozen=True)
class EpisodeGroups:
    """E episodes of B sequences.

    Attributes:
        group_E: int64 ``[E]``: with which others each is compared: those of its id and role.
        episode_B: int64 ``[B]``; None: each sequence is an episode.
    """

    group_E: torch.Tensor
    episode_B: torch.Tensor | None = None

    @staticmethod
    def of(data: SequenceSample, device: torch.device) -> EpisodeGroups:
        """Reads them from a batch.

        Raises:
            DataError: the note of an id is of another number of sequences than it has.
        """
        pieces = data.meta.seqlens[INPUT]
        group_B = torch.tensor([i for i, group in enumerate(pieces) for _ in group], device=device)
        texts = data.meta.metadata.get(EPISODES)
        if not texts:
            return EpisodeGroups(group_B)
        episode_B: list[int] = []
        group_E: list[int] = []
        groups: dict[tuple[int, str], int] = {}  # (id, role) → group
        for place, (id_, text, group) in enumerate(zip(data.ids, texts, pieces, strict=True)):
            known: dict[tuple[int, str], int] = {}  # (episode, role) → its number in the batch
            for number, role in _pairs(text, len(group), where=f"batch, id {id_}"):
                if (number, role) not in known:
                    known[number, role] = len(group_E)
                    group_E.append(groups.setdefault((place, role), len(groups)))
                episode_B.append(known[number, role])
        return EpisodeGroups(
            torch.tensor(group_E, device=device),
            None if len(group_E) == len(episode_B) else torch.tensor(episode_B, device=device),
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


def _pairs(text: str, count: int, *, where: str) -> list[tuple[int, str]]:
    """Reads an id's numbers and roles; of a record set aside there are none, and each sequence is an
    episode.
    """
    pairs = [(int(number), str(role)) for number, role in json.loads(text)]
    if pairs and len(pairs) != count:
        raise DataError(
            f"{count} sequences, and notes of {len(pairs)} which episode each is of",
            where=where,
            fix="report this as a bug: a group would compare branches as if they were episodes",
        )
    return pairs or [(i, "") for i in range(count)]
