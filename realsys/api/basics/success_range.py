"""Decides by its mean reward whether a question is trained on (dynamic sampling, arXiv:2503.14476).

Used by rollout workers of asynchronous runs and by the master of synchronous ones. No torch.
"""

from __future__ import annotations

import enum


class SuccessPlace(enum.Enum):
    """Where the mean reward of a question's answers lies."""

    LOW = "below"
    IN_RANGE = "in"
    HIGH = "above"
    UNSCORED = "without"  # the rule gave no number for it, twice


def place_of_success(
    mean_reward: float | None, *, lowest: float | None, highest: float | None
) -> SuccessPlace:
    """Compares a mean reward with the range, bounds included.

    Args:
        mean_reward: of all answers to the question; None: it got none.
        lowest, highest: the range; None: open on that side.
    """
    if mean_reward is None or mean_reward != mean_reward:  # NaN lies nowhere
        return SuccessPlace.UNSCORED
    if lowest is not None and mean_reward < lowest:
        return SuccessPlace.LOW
    if highest is not None and mean_reward > highest:
        return SuccessPlace.HIGH
    return SuccessPlace.IN_RANGE
