"""Math questions without a critic: ``grpo-math``, also with generation servers, and its relatives."""

from __future__ import annotations

from dataclasses import replace

from experiments.asynchronous import Async
from experiments.compose import RLExperiment
from experiments.ppo_math import MATH
from experiments.recipes import GRPO_DEFAULTS, OFF_POLICY, cispo, dapo, distill, grpo, gspo, rloo
from experiments.sft import SFTExperiment


def grpo_math() -> RLExperiment:
    """Policy optimisation without a critic on math questions (GRPO, Dr. GRPO, RLOO)."""
    return grpo(MATH, sft=SFTExperiment())


def dapo_math() -> RLExperiment:
    """grpo-math with clip-higher, overlong shaping and dynamic sampling, without a KL penalty (DAPO)."""
    return dapo(MATH, sft=SFTExperiment())


def grpo_math_async() -> RLExperiment:
    """grpo-math with generation servers that sample while the model workers train."""
    return replace(grpo_math(), schedule=Async(), algorithm=replace(GRPO_DEFAULTS, **OFF_POLICY))


def rloo_math() -> RLExperiment:
    """RLOO on math questions."""
    return rloo(MATH, sft=SFTExperiment())


def gspo_math() -> RLExperiment:
    """GSPO on math questions."""
    return gspo(MATH, sft=SFTExperiment())


def cispo_math() -> RLExperiment:
    """CISPO on math questions."""
    return cispo(MATH, sft=SFTExperiment())


def distill_math() -> RLExperiment:
    """On-policy distillation on math questions; needs ``teachers.NAME.path`` and ``actor.path``."""
    return distill(MATH, sft=SFTExperiment())
