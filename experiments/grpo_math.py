"""``grpo-math``: policy optimisation without a critic on math questions (GRPO, Dr. GRPO, RLOO).

    actor_gen ─┬─ rew_inf ─┬─ actor_train
               └─ ref_inf ─┘

An answer's advantage is its score relative to the other answers to the same question, minus the KL
penalty. The starting policy is that of ``ppo-math``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from experiments.parts.math_rl import MathRLExperiment
from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError
from realsys.api.model import GenerationHyperparameters
from realsys.api.options import PPOHyperparameters, option

GRPO = PPOHyperparameters(
    gen=GenerationHyperparameters(max_new_tokens=16),
    advantage="grpo",
    adv_norm=False,
    kl_ctl=0.01,
    entropy_coef=0.01,
)


@dataclass(frozen=True, kw_only=True)
class GRPOMathExperiment(MathRLExperiment):
    """Group-relative policy optimisation on math questions, without a critic."""

    group_size: int = option(8, "answers a question", ge=2)
    ppo: PPOHyperparameters = option(GRPO, "the algorithm")

    @property
    def _all_roles(self) -> tuple[str, ...]:
        return "actor", "ref", "reward"

    @property
    def _right_roles(self) -> tuple[str, ...]:
        return "ref", "reward"

    def problems(self) -> Iterator[ConfigError]:
        """Yields the problems common to math experiments, and an advantage that needs a critic."""
        if self.ppo.advantage == "gae":
            yield ConfigError(
                "ppo.advantage=gae needs a critic, but this experiment has none",
                where="ppo.advantage",
                fix="use grpo, dr_grpo or rloo, or the experiment ppo-math",
            )
        yield from super().problems()

    def _all_calls(self) -> tuple[MFCDef, ...]:
        """Builds four calls for three roles."""
        return tuple(self._policy_calls().values())
