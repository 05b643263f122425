"""Arguments of the built-in interfaces, typed: what ``ModelInterfaceAbstraction.args`` are read into.

Each interface inherits the class of its arguments; a plan is checked against it (realsys.api.registry).
No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realsys.api.basics.choice import KIND
from realsys.api.basics.losses import PPOLoss
from realsys.api.basics.preference_losses import DPOLoss, PairLoss
from realsys.api.errors import ConfigError
from realsys.api.model import GenerationHyperparameters
from realsys.api.options import PPOHyperparameters, ppo_problems

_CLIPS = ("eps_clip", "eps_clip_higher", "c_clip")


@dataclass(frozen=True, kw_only=True)
class PPOSettings(PPOHyperparameters):
    """Fields shared by the actor's and the critic's interface.

    Attributes:
        max_staleness: checked for every trained token with a version; None checks nothing. The master
            enforces the run's bound when it dispatches prompts, not this interface.
    """

    group_size: int = 1
    max_staleness: int | None = None

    @staticmethod
    def renamed(args: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arguments as plans have them now.

        PPO's clip ranges stood where the loss stands: with a loss they are left as they are, and refused.
        An advantage was a name, ``adv_norm`` true for ``batch``.
        """
        now = dict(args)
        if isinstance(now.get("advantage"), str):
            now["advantage"] = {KIND: now["advantage"]}
        if isinstance(now.get("adv_norm"), bool):
            now["adv_norm"] = "batch" if now["adv_norm"] else "none"
        clips = {name: now[name] for name in _CLIPS if name in now}
        if not clips or "loss" in now:
            return now
        rest = {name: value for name, value in now.items() if name not in clips}
        return {**rest, "loss": {KIND: PPOLoss.kind, **clips}}

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(
                f"group_size is {self.group_size}", where="group_size", fix="use 1 or more"
            )
        for problem in ppo_problems(self, longest=self.gen.max_new_tokens, path=""):
            raise problem


@dataclass(frozen=True, kw_only=True)
class PPOActorArguments(PPOSettings):
    """Arguments of interface ``ppo_actor``; ``reward`` scores held-out answers.

    Attributes:
        with_entropy: inference computes the entropy of each token besides its log-prob.
        teachers: key of a teacher's log-probs → weight of its part in advantages.
        forward_teachers: name of a teacher whose most probable tokens are given → weight of the forward KL.
    """

    reward: str = "math_verify"
    reward_args: Mapping[str, Any] = field(default_factory=dict)
    with_entropy: bool = False
    teachers: Mapping[str, float] = field(default_factory=dict)
    forward_teachers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TeacherArguments:
    """Arguments of interface ``teacher``.

    Attributes:
        gen: how the tokens were sampled.
        top_k: it gives its so many most probable tokens; 0: log-probs of the tokens that were drawn.
    """

    gen: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    top_k: int = 0


@dataclass(frozen=True, kw_only=True)
class PPOCriticArguments(PPOSettings):
    """Arguments of interface ``ppo_critic``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.advantage.by_critic:
            raise ConfigError(
                f"a critic is not used with advantage={self.advantage.kind!r}",
                where="ppo_critic, advantage",
                fix="use gae, or leave the critic out",
            )


@dataclass(frozen=True, kw_only=True)
class MathRewardArguments:
    """Arguments of interface ``math_reward``: rules (realsys.api.basics.reward) and their arguments.

    Attributes:
        report_means: also report each record's mean reward, for dynamic sampling.
    """

    reward: str = "math_verify"
    reward_args: Mapping[str, Any] = field(default_factory=dict)
    report_means: bool = False


@dataclass(frozen=True, kw_only=True)
class RewardModelArguments:
    """Arguments of interface ``reward_model``: reward = rule_weight · rule + weight · clipped score.

    Attributes:
        clip: the model's score is clipped to ± this; None: it is not.
    """

    weight: float = 1.0
    rule_weight: float = 1.0
    clip: float | None = None


@dataclass(frozen=True, kw_only=True)
class PreferenceArguments:
    """Arguments of interface ``preference``.

    Attributes:
        centering: weight of (chosen + rejected)², which keeps scores around 0.
    """

    centering: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DirectPreferenceArguments:
    """Arguments of interface ``direct_preference``: the loss of a pair."""

    loss: PairLoss = field(default_factory=DPOLoss)
