"""GRPO on math questions: ``grpo-math``, and the same run with generation servers."""

from __future__ import annotations

from dataclasses import replace

from experiments.asynchronous import Async
from experiments.compose import RLExperiment
from experiments.ppo_math import MATH
from experiments.recipes import GRPO_DEFAULTS, OFF_POLICY, grpo
from experiments.sft import SFTExperiment


def grpo_math() -> RLExperiment:
    """Policy optimisation without a critic on math questions (GRPO, Dr. GRPO, RLOO)."""
    return grpo(MATH, sft=SFTExperiment())


def grpo_math_async() -> RLExperiment:
    """grpo-math with generation servers that sample while the model workers train."""
    return replace(grpo_math(), schedule=Async(), algorithm=replace(GRPO_DEFAULTS, **OFF_POLICY))
