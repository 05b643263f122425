"""``grpo-math-async``: ``grpo-math`` with generation servers that sample while the model workers train.

The settings of ``grpo-math`` with ``mode=async``, and the objective for answers sampled with older
weights (decoupled PPO). ``max_staleness`` bounds how old those weights may be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.grpo_math import GRPO, GRPOMathExperiment
from experiments.parts.math_rl import DECOUPLED
from experiments.parts.modes import MODES
from realsys.api.options import PPOHyperparameters, option


@dataclass(frozen=True, kw_only=True)
class GRPOMathAsyncExperiment(GRPOMathExperiment):
    """Group-relative policy optimisation on math questions, asynchronous."""

    mode: str = option("async", "see grpo-math", choices=tuple(MODES))
    ppo: PPOHyperparameters = option(replace(GRPO, **DECOUPLED), "the algorithm")
