"""``ppo-math-split``: ``ppo-math`` with actor and reference on one half of the workers, critic and reward
on the other.

The halves compute concurrently: reference, values and reward at the same time, and both updates. During
the first steps only the critic is trained, so that the policy never follows the values of an untrained
head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.parts.math_rl import PPO
from experiments.ppo_math import PPOMathExperiment
from realsys.api.options import MOST_WORKERS, PPOHyperparameters, option


@dataclass(frozen=True, kw_only=True)
class PPOMathSplitExperiment(PPOMathExperiment):
    """PPO on math questions, actor and critic on two halves of the model workers."""

    placement: str = option(
        "split",
        "shared: roles share the model workers; split: actor and reference on the first half, the "
        "others on the second",
        choices=("shared", "split"),
    )
    n_model_workers: int | None = option(
        2, "model workers, each with one GPU; none: as many as are needed", ge=1, le=MOST_WORKERS
    )
    ppo: PPOHyperparameters = option(replace(PPO, critic_warmup_steps=5), "the algorithm")
