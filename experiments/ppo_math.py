"""``ppo-math``: PPO with actor, critic, reference and a rule-based reward on math questions.

    actor_gen ─┬─ rew_inf ────┬─ actor_train
               ├─ ref_inf ────┤
               └─ critic_inf ─┴─ critic_train

Without ``actor.path=``, ``sft-math`` first makes the starting policy (phase ``sft``), cached by content.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from experiments.parts.math_rl import OPTIMIZER, MathRLExperiment
from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError
from realsys.api.model import ModelInterfaceAbstraction
from realsys.api.options import ModelOptions, OptimizerOptions, option


@dataclass(frozen=True, kw_only=True)
class PPOMathExperiment(MathRLExperiment):
    """PPO on math questions."""

    critic: ModelOptions = option(
        ModelOptions(optimizer=OptimizerOptions(lr=1e-3, **OPTIMIZER)),
        "the value model; without a path, the actor's body with a new head",
    )

    @property
    def _all_roles(self) -> tuple[str, ...]:
        return "actor", "critic", "ref", "reward"

    @property
    def _right_roles(self) -> tuple[str, ...]:
        return "critic", "reward"

    def problems(self) -> Iterator[ConfigError]:
        """Yields the problems common to math experiments, and an advantage that does not use the critic."""
        if self.ppo.advantage != "gae":
            yield ConfigError(
                f"ppo.advantage={self.ppo.advantage} uses no critic, but this experiment trains one",
                where="ppo.advantage",
                fix="use gae, or the experiment grpo-math",
            )
        yield from super().problems()

    def _all_calls(self) -> tuple[MFCDef, ...]:
        """Builds six calls for four roles."""
        calls = self._policy_calls("values")
        critic = ModelInterfaceAbstraction("ppo_critic", self._ppo_args())
        values = self._call(
            "critic_inf",
            "critic",
            "inference",
            critic,
            input_keys=("packed_input_ids",),
            output_keys=("values",),
        )
        experience = (*self._experience, "values")
        train = self._call("critic_train", "critic", "train_step", critic, input_keys=experience)
        before = [call for name, call in calls.items() if name != "actor_train"]
        return (*before, values, calls["actor_train"], train)
