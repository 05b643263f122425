"""``ppo-math-async``: ``ppo-math`` with generation servers that sample while the model workers train.

    rollout workers ⇄ generation servers
          └─ answers, scored ─▶ ref_inf ────┐
                                actor_inf ──┼─ actor_train ─▶ new weights to the servers
                                critic_inf ─┴─ critic_train

The settings of ``ppo-math`` with ``mode=async``, and the objective for answers sampled with older weights
(decoupled PPO). ``max_staleness`` bounds how old those weights may be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.parts.math_rl import DECOUPLED, PPO
from experiments.parts.modes import MODES
from experiments.ppo_math import PPOMathExperiment
from realsys.api.options import PPOHyperparameters, option


@dataclass(frozen=True, kw_only=True)
class PPOMathAsyncExperiment(PPOMathExperiment):
    """PPO on math questions, asynchronous."""

    mode: str = option("async", "see ppo-math", choices=tuple(MODES))
    ppo: PPOHyperparameters = option(replace(PPO, **DECOUPLED), "the algorithm")
