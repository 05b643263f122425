"""GRPO on math questions: ``grpo-math``, and the same run with generation servers."""

from __future__ import annotations

from dataclasses import replace

from experiments.asynchronous import Async
from experiments.compose import RLExperiment
from experiments.ppo_math import MATH
from experiments.recipes import GRPO_DEFAULTS, OFF_POLICY, grpo
from experiments.schedule import Sync
from experiments.sft import SFTExperiment
from realsys.api.basics.losses import PPOLoss


def grpo_math() -> RLExperiment:
    """Policy optimisation without a critic on math questions (GRPO, Dr. GRPO, RLOO)."""
    return grpo(MATH, sft=SFTExperiment())


def dapo_math() -> RLExperiment:
    """grpo-math with clip-higher, overlong shaping and dynamic sampling, without a KL penalty (DAPO)."""
    algorithm = replace(
        GRPO_DEFAULTS,
        kl_ctl=0.0,
        loss=PPOLoss(eps_clip_higher=0.28),
        loss_aggregation="token_mean",
        overlong_buffer_len=4,
    )
    return replace(grpo_math(), algorithm=algorithm, schedule=Sync(success_range=(0.01, 0.99)))


def grpo_math_async() -> RLExperiment:
    """grpo-math with generation servers that sample while the model workers train."""
    return replace(grpo_math(), schedule=Async(), algorithm=replace(GRPO_DEFAULTS, **OFF_POLICY))
