"""Recipes: a task of any kind, learned by PPO or GRPO, with defaults that suit a small model.

    register_experiment("grpo-reverse", lambda: grpo(Reverse()))

A recipe is a function without arguments that returns an experiment; what it sets are defaults, which the
command line changes. These two take a task and changes; ``ppo-math`` (ppo_math.py) and ``grpo-math``
(grpo_math.py) are made with them.
"""

from __future__ import annotations

from typing import Any

from experiments.algorithm import GRPO, PPO
from experiments.compose import RLExperiment
from experiments.parts.chosen_settings import SMALL_ANSWER, SMALL_CRITIC_LR, SMALL_LR
from experiments.sft import SFTExperiment
from experiments.task import Task
from realsys.api.model import GenerationHyperparameters
from realsys.api.options import ModelOptions, OptimizerOptions

GEN = GenerationHyperparameters(max_new_tokens=SMALL_ANSWER)
# The policy of the last steps is the product: without a decay it swings by several points of accuracy.
OPTIMIZER: dict[str, Any] = {
    "weight_decay": 0.0,
    "lr_schedule": "linear",
    "warmup_steps_proportion": 0.05,
}
ACTOR = ModelOptions(optimizer=OptimizerOptions(lr=SMALL_LR, **OPTIMIZER))
CRITIC = ModelOptions(optimizer=OptimizerOptions(lr=SMALL_CRITIC_LR, **OPTIMIZER))


PPO_DEFAULTS = PPO(kl_ctl=0.01, gae_lambda=0.95, entropy_coef=0.01)
GRPO_DEFAULTS = GRPO(kl_ctl=0.01, entropy_coef=0.01)
# For answers sampled with older weights: decoupled PPO (arXiv:2505.24298).
OFF_POLICY: dict[str, Any] = {"use_decoupled_loss": True, "correction": "cap"}


def ppo(task: Task, **changes: Any) -> RLExperiment:
    """PPO with a critic; ``changes`` are fields of the experiment."""
    return _recipe(task, **{"algorithm": PPO_DEFAULTS, "critic": CRITIC, **changes})


def grpo(task: Task, **changes: Any) -> RLExperiment:
    """GRPO, without a critic; ``changes`` are fields of the experiment."""
    return _recipe(task, **{"algorithm": GRPO_DEFAULTS, "group_size": 8, **changes})


def _recipe(task: Task, **fields: Any) -> RLExperiment:
    made: dict[str, Any] = {"actor": ACTOR, "gen": GEN, "sft": SFTExperiment(task=task)}
    return RLExperiment(task=task, **{**made, **fields})
