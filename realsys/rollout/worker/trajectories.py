"""Packs the episodes of a prompt into one datapoint, after validation (pure)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from realsys.api.agent import Episode, Trajectory
from realsys.api.basics.reward import EPISODES, PARTS
from realsys.api.errors import DataError
from realsys.data.answers_layout import INPUT, AnswerRow, answers_sample
from realsys.data.sequence_sample import SequenceSample
from realsys.rewards.scores import checked_score, numbers_of

REWARDS, VERSIONS = "rewards", "packed_versions"
_PART = "reward/"  # before the name of a reward's part, in an episode's figures


def trajectory_fault(
    trajectory: Trajectory, prompt: Sequence[int], *, has_kept: bool = False
) -> str:
    """Returns what is wrong with an agent's trajectory; empty if it is valid.

    Args:
        has_kept: answers came with kept sets, so it must have them.
    """
    t, count = trajectory, len(trajectory.tokens)
    for name in ("from_policy", "logprobs", "versions", *(("kept",) if has_kept else ())):
        if len(getattr(t, name)) != count:
            return f"it has {count} tokens and {len(getattr(t, name))} entries in {name}"
    if t.tokens[: len(prompt)] != tuple(prompt):
        return "it does not begin with the prompt"
    if any(t.from_policy[: len(prompt)]):
        return "it says that the policy wrote the prompt"
    if not any(t.from_policy):
        return "the policy wrote nothing of it"
    if not math.isfinite(t.reward):
        return f"its reward is {t.reward}"
    for place, by_policy in enumerate(t.from_policy):
        if by_policy and (t.versions[place] < 0 or not math.isfinite(t.logprobs[place])):
            return (
                f"token {place} is the policy's, with version {t.versions[place]} and "
                f"log-prob {t.logprobs[place]}"
            )
        if not by_policy and (t.versions[place], t.logprobs[place]) != (-1, 0.0):
            return f"token {place} is not the policy's, and has a version or a log-prob"
    return ""


def check_episode(
    episode: Episode, prompt: Sequence[int], *, agent: str, has_kept: bool = False
) -> None:
    """Raises DataError, naming the agent, if a sequence of the episode can't be trained on.

    Args:
        prompt: what each must begin with.
    """
    faults = [
        trajectory_fault(sequence, prompt, has_kept=has_kept) for sequence in episode.sequences
    ] or ["the episode has no sequence"]
    for fault in faults:
        if fault:
            raise DataError(
                f"a trajectory can't be used: {fault}",
                where=f"agent {agent!r}",
                fix="see docs/adding_an_agent.md for what a trajectory must be",
            )


def with_plain_numbers(episode: Episode, *, source: str) -> Episode:
    """Returns an agent's episode with rewards as floats, and of its figures those that are numbers.

    Args:
        source: the agent, for errors.
    Raises:
        RewardError: a reward is not a finite number.
    """
    sequences = [
        replace(one, reward=checked_score(one.reward, source=source)) for one in episode.sequences
    ]
    return replace(
        episode,
        reward=checked_score(episode.reward, source=source),
        sequences=tuple(sequences),
        stats=numbers_of(episode.stats),
    )


def versions_of(trajectories: Sequence[Trajectory]) -> tuple[int, int]:
    """Returns the oldest and newest weight version of the policy's tokens."""
    versions = [
        v for t in trajectories for v, p in zip(t.versions, t.from_policy, strict=True) if p
    ]
    return min(versions), max(versions)


def episodes_sample(
    id_: str, episodes: Sequence[Episode], *, metadata: Mapping[str, Any], may_branch: bool = False
) -> SequenceSample:
    """Packs one id with its group as ``PipelinableEngine.generate`` does, plus two keys.

    ``rewards`` (float32, one per sequence) and ``packed_versions`` (int64; -1 on tokens that are
    not the policy's). Observations are packed as prompt: ``prompt_mask`` is True on everything that
    the policy did not write.

    Args:
        metadata: metadata of this id, one value per name. Parts of rewards, which environments report as
            ``reward/<part>``, are added as ``rew_inf`` of a synchronous run gives them.
        may_branch: episodes of this run may have several sequences: it is noted which episode each belongs
            to (``EPISODES``). All ids of a run have the same metadata, so this holds for all or none.
    """
    trajectories = [t for episode in episodes for t in episode.sequences]
    rows = [
        AnswerRow(
            tokens=torch.tensor(t.tokens, dtype=torch.int64),
            is_prompt=~torch.tensor(t.from_policy, dtype=torch.bool),
            logprobs=torch.tensor(t.logprobs, dtype=torch.float32),
            kept=t.kept or None,
        )
        for t in trajectories
    ]
    truncated = torch.tensor([t.truncated for t in trajectories], dtype=torch.bool)
    parts = _reward_parts(episodes)
    metadata = {**metadata, **({PARTS: json.dumps(parts)} if any(parts) or may_branch else {})}
    if may_branch:
        metadata[EPISODES] = json.dumps(_episode_numbers(episodes))
    answers = answers_sample(
        [id_], [rows], truncated, metadata={name: [value] for name, value in metadata.items()}
    )
    more = SequenceSample.from_tensors(
        [id_],
        {REWARDS: [[1] * len(rows)], VERSIONS: answers.meta.seqlens[INPUT]},
        {
            REWARDS: torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
            VERSIONS: torch.tensor(
                [version for t in trajectories for version in t.versions], dtype=torch.int64
            ),
        },
    )
    return answers.update(more)


def _reward_parts(episodes: Sequence[Episode]) -> list[dict[str, float]]:
    """Returns the parts of each sequence's reward: those of its episode."""
    return [
        {name.removeprefix(_PART): x for name, x in e.stats.items() if name.startswith(_PART)}
        for e in episodes
        for _ in e.sequences
    ]


def _episode_numbers(episodes: Sequence[Episode]) -> list[list[Any]]:
    """Returns of each sequence a number and a role: with the same of both, sequences are compared as one.

    They are those of an episode, if they share its reward.
    """
    shared = all(e.shares_reward for e in episodes)
    pairs = [(number, t.role) for number, e in enumerate(episodes) for t in e.sequences]
    return [[number if shared else place, role] for place, (number, role) in enumerate(pairs)]
