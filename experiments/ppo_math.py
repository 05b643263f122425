"""PPO on math questions: ``ppo-math``, and the same run with other schedules and placements."""

from __future__ import annotations

from dataclasses import replace

from experiments.compose import RLExperiment
from experiments.placement import Split
from experiments.recipes import OFF_POLICY, PPO_DEFAULTS, ppo
from experiments.sft import SFTExperiment
from experiments.task import MathTask

MATH = MathTask(train_size=100 * 64)


def ppo_math() -> RLExperiment:
    """PPO with actor, critic, reference and a rule-based reward on math questions."""
    return ppo(MATH, sft=SFTExperiment())


def ppo_math_split() -> RLExperiment:
    """ppo-math with actor and reference on one half of the model workers, critic and reward on the other.

    First the critic alone is trained, so that the policy never follows the values of an untrained head.
    """
    warmed_up = replace(PPO_DEFAULTS, critic_warmup_steps=5)
    return replace(ppo_math(), placement=Split(n_model_workers=2), algorithm=warmed_up)


def ppo_math_async() -> RLExperiment:
    """ppo-math with generation servers that sample while the model workers train."""
    from experiments.asynchronous import Async  # not for the recipes above

    return replace(ppo_math(), schedule=Async(), algorithm=replace(PPO_DEFAULTS, **OFF_POLICY))


def ppo_math_detached() -> RLExperiment:
    """ppo-math with named makers and trainers, and a graph of who sends what to whom."""
    from experiments.detached import Detached  # not for the recipes above

    return replace(ppo_math_async(), schedule=Detached())
