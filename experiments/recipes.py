"""Recipes: a task of any kind, learned by an algorithm, with defaults that suit a small model.

    register_experiment("grpo-reverse", lambda: grpo(Reverse()))

A recipe is a function without arguments that returns an experiment; what it sets are defaults, which the
command line changes. These take a task and changes; ``ppo-math`` (ppo_math.py), ``grpo-math`` and the like
(grpo_math.py) are made with them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.algorithm import GRPO, PPO
from experiments.compose import RLExperiment
from experiments.parts.chosen_settings import (
    FROM_SCRATCH_ENTROPY,
    FROM_SCRATCH_KL,
    SMALL_ANSWER,
    SMALL_CRITIC_LR,
    SMALL_LR,
)
from experiments.schedule import Sync
from experiments.sft import SFTExperiment
from experiments.task import Task
from realsys.api.basics.estimators import NoAdvantage, RLOOAdvantage
from realsys.api.basics.losses import CISPOLoss, GSPOLoss, PPOLoss
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


PPO_DEFAULTS = PPO(kl_ctl=FROM_SCRATCH_KL, gae_lambda=0.95, entropy_coef=FROM_SCRATCH_ENTROPY)
GRPO_DEFAULTS = GRPO(kl_ctl=FROM_SCRATCH_KL, entropy_coef=FROM_SCRATCH_ENTROPY)
# For answers sampled with older weights: decoupled PPO (arXiv:2505.24298).
OFF_POLICY: dict[str, Any] = {"use_decoupled_loss": True, "correction": "cap"}


def ppo(task: Task, **changes: Any) -> RLExperiment:
    """PPO with a critic; ``changes`` are fields of the experiment."""
    return _recipe(task, **{"algorithm": PPO_DEFAULTS, "critic": CRITIC, **changes})


def grpo(task: Task, **changes: Any) -> RLExperiment:
    """GRPO, without a critic; ``changes`` are fields of the experiment."""
    return _recipe(task, **{"algorithm": GRPO_DEFAULTS, "group_size": 8, **changes})


def rloo(task: Task, **changes: Any) -> RLExperiment:
    """RLOO: an answer is compared with the mean of the others (arXiv:2402.14740)."""
    return grpo(task, **{"algorithm": replace(GRPO_DEFAULTS, advantage=RLOOAdvantage()), **changes})


def dapo(task: Task, **changes: Any) -> RLExperiment:
    """DAPO: clip-higher, every token alike, a penalty before the limit, only questions of mixed answers, no
    KL penalty (arXiv:2503.14476). Its buffer suits short answers.
    """
    algorithm = replace(
        GRPO_DEFAULTS,
        kl_ctl=0.0,
        loss=PPOLoss(eps_clip_higher=0.28),
        loss_aggregation="token_mean",
        overlong_buffer_len=4,
    )
    schedule = Sync(success_range=(0.01, 0.99))
    return grpo(task, **{"algorithm": algorithm, "schedule": schedule, **changes})


def gspo(task: Task, **changes: Any) -> RLExperiment:
    """GSPO: one ratio an answer, every answer alike (arXiv:2507.18071)."""
    by_answer = replace(GRPO_DEFAULTS, loss=GSPOLoss(), loss_aggregation="seq_mean_token_mean")
    return grpo(task, **{"algorithm": by_answer, **changes})


def cispo(task: Task, **changes: Any) -> RLExperiment:
    """CISPO: bounded ratios weigh all tokens (arXiv:2506.13585)."""
    return grpo(task, **{"algorithm": replace(GRPO_DEFAULTS, loss=CISPOLoss()), **changes})


def distill(task: Task, **changes: Any) -> RLExperiment:
    """On-policy distillation: the policy's own answers, pulled by ``teachers`` alone (arXiv:2306.13649)."""
    taught = replace(GRPO_DEFAULTS, advantage=NoAdvantage(), kl_ctl=0.0, entropy_coef=0.0)
    return grpo(task, **{"algorithm": taught, **changes})


def _recipe(task: Task, **fields: Any) -> RLExperiment:
    made: dict[str, Any] = {"actor": ACTOR, "gen": GEN, "sft": SFTExperiment(task=task)}
    return RLExperiment(task=task, **{**made, **fields})
