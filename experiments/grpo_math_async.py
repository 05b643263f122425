"""``grpo-math-async``: ``grpo-math`` with generation servers that sample while the model workers train.

The same settings as ``grpo-math`` with ``mode=async`` set, and the objective that answers of older weights
need (decoupled PPO). ``max_staleness`` bounds how old they may be.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.grpo_math import GRPOMathExperiment
from experiments.math_rl import MODES
from realsys.api.model import GenerationHyperparameters
from realsys.api.options import PPOHyperparameters, option


@dataclass(frozen=True, kw_only=True)
class GRPOMathAsyncExperiment(GRPOMathExperiment):
    """Group-relative policy optimisation on math questions, asynchronous."""

    mode: str = option("async", "see grpo-math", choices=MODES)
    ppo: PPOHyperparameters = option(
        PPOHyperparameters(
            gen=GenerationHyperparameters(max_new_tokens=16),
            advantage="grpo",
            adv_norm=False,
            kl_ctl=0.01,
            entropy_coef=0.01,
            use_decoupled_loss=True,
            correction="cap",
        ),
        "the algorithm",
    )
