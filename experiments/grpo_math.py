"""``grpo-math``: policy optimisation without a critic on math questions (GRPO, Dr. GRPO, RLOO).

    actor_gen ─┬─ rew_inf ─┬─ actor_train
               └─ ref_inf ─┘

An answer's advantage is how much better it scored than the others to the same question, less the KL
penalty. Starting policy as of ``ppo-math``.
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
    """Group-relative policy optimisation on math questions: no critic."""

    group_size: int = option(8, "answers a question", ge=2)
    ppo: PPOHyperparameters = option(GRPO, "the algorithm")

    @property
    def _all_roles(self) -> tuple[str, ...]:
        return "actor", "ref", "reward"

    @property
    def _right_roles(self) -> tuple[str, ...]:
        return "ref", "reward"

    def problems(self) -> Iterator[ConfigError]:
        """What all such experiments check, and that no critic is missed."""
        if self.ppo.advantage == "gae":
            yield ConfigError(
                "ppo.advantage=gae needs a critic, and this experiment has none",
                where="ppo.advantage",
                fix="use grpo, dr_grpo or rloo, or the experiment ppo-math",
            )
        yield from super().problems()

    def _all_calls(self) -> tuple[MFCDef, ...]:
        """Three roles, four calls."""
        return tuple(self._policy_calls().values())
