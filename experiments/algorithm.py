"""Algorithms: hyper-parameters → model function calls. ``algorithm=ppo``.

    actor_gen ─┬─ rew_inf ────┬─ actor_train      ppo
               ├─ ref_inf ────┤
               └─ critic_inf ─┴─ critic_train

    actor_gen ─┬─ rew_inf ─┬─ actor_train         grpo: no critic
               └─ ref_inf ─┘

An algorithm names the calls of a synchronous run. What a schedule does without (``actor_gen`` and
``rew_inf`` where generation servers sample) is left out by compose.py.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from realsys.api.basics.choice import Choice
from realsys.api.basics.estimators import (
    GAE,
    AdvantageEstimator,
    AnswerEstimator,
    GDPOAdvantage,
    GRPOAdvantage,
    NoAdvantage,
    PassAtKAdvantage,
)
from realsys.api.dataflow import Hook, MFCDef, ParamReallocHook
from realsys.api.errors import ConfigError
from realsys.api.model import GenerationHyperparameters, ModelInterfaceAbstraction, ModelName
from realsys.api.options import (
    PolicyHyperparameters,
    PPOHyperparameters,
    ValueHyperparameters,
    option,
    ppo_problems,
)
from realsys.api.plain import to_plain

ANSWERS = ("packed_input_ids", "prompt_mask")
PROXIMAL = "packed_prox_logprobs"
REFERENCE = "packed_ref_logprobs"
ENTROPY = "packed_prox_entropy"
KEPT_SETS = ("packed_kept_counts", "packed_kept_ids")  # where tokens are sampled from a part of all
POLICY_KEYS = (*ANSWERS, "packed_logprobs", "rewards", "seq_no_eos_mask")  # read by every update


_OF_KL = (
    *("kl_in", "kl_estimator", "kl_unbiased", "ref_ema_eta"),
    *("use_adaptive_kl_ctl", "adaptive_kl_target", "adaptive_kl_horizon"),
)


@dataclass(frozen=True, kw_only=True)
class CallMaker:
    """What an algorithm makes its calls from.

    Attributes:
        make: (name, role, kind, interface, **further fields) → the call, on copy 0 of its role.
        gen, group_size: how a question is answered, and how often.
        keeps_sets: answers come with the sets of tokens that they were sampled from, over which all
            log-probs are computed.
        reward: arguments that name the rules which score an answer.
        reward_keys: what they look at besides the answer's tokens.
        report_means: the call that scores reports each question's mean reward, for dynamic sampling.
        versions: tokens carry the version of the weights that sampled them.
        max_staleness: the update refuses tokens of older weights; None: not checked.
    """

    make: Callable[..., MFCDef]
    gen: GenerationHyperparameters
    group_size: int
    keeps_sets: bool
    reward: Mapping[str, Any]
    reward_keys: tuple[str, ...] = ()
    report_means: bool = False
    versions: bool = False
    max_staleness: int | None = None


@dataclass(frozen=True, kw_only=True)
class Algorithm(Choice, abc.ABC):
    """Base: which models there are, and what is computed on them in a step.

    ``roles`` are in the order in which a worker lists them; ``right_roles`` are on the second half of the
    model workers under ``placement=split``. A role without calls is not held.
    """

    choice = "algorithm"
    roles: ClassVar[tuple[str, ...]]
    right_roles: ClassVar[tuple[str, ...]] = ()

    @property
    def only_taught(self) -> bool:
        """Whether nothing but teachers (``teachers.…``) says what the policy learns."""
        return False

    @abc.abstractmethod
    def calls(self, maker: CallMaker) -> tuple[MFCDef, ...]:
        """Builds the calls of a synchronous run."""

    def problems(self, gen: GenerationHyperparameters, group_size: int) -> Iterator[ConfigError]:
        """Yields settings that don't go together."""
        yield from ()


@dataclass(frozen=True, kw_only=True)
class PolicyAlgorithm(PolicyHyperparameters, Algorithm):
    """What PPO and GRPO share: the calls of actor, reference and reward."""

    ref_ema_eta: float | None = option(
        None,
        "after each update the reference moves so far towards the actor; none: it is frozen",
        gt=0,
        le=1,
    )

    @property
    def reads_reference_otherwise(self) -> bool:
        """Whether another setting than ``kl_ctl`` says what the KL to the reference is to do."""
        declared = {f.name: f.default for f in dataclasses.fields(self)}
        return any(getattr(self, name) != declared[name] for name in _OF_KL)

    @property
    def experience(self) -> tuple[str, ...]:
        """Keys that every update reads."""
        return (*POLICY_KEYS, *((REFERENCE,) if self.needs_ref_logprobs else ()))

    def problems(self, gen: GenerationHyperparameters, group_size: int) -> Iterator[ConfigError]:
        """Yields settings that don't go together."""
        if self.use_adaptive_kl_ctl and self.kl_ctl == 0:
            yield ConfigError(
                "an adaptive KL controller can't start from 0, because it multiplies the coefficient",
                where="algorithm.use_adaptive_kl_ctl and algorithm.kl_ctl",
                fix="give algorithm.kl_ctl a starting value, e.g. 0.01",
            )
        if self.ref_ema_eta is not None and not self.needs_ref_logprobs:
            yield ConfigError(
                "algorithm.kl_ctl is 0, so there is no reference that could follow the actor",
                where="algorithm.ref_ema_eta and algorithm.kl_ctl",
                fix="give algorithm.kl_ctl a value above 0, e.g. 0.01, or leave ref_ema_eta out",
            )
        chosen = self.estimator
        if self.adv_norm == "group" and (not chosen.compares or isinstance(chosen, GRPOAdvantage)):
            yield ConfigError(
                "adv_norm=group divides by the deviation of a group, and "
                f"advantage={chosen.kind} {'does so already' if chosen.compares else 'has no groups'}",
                where="algorithm.adv_norm",
                fix="leave adv_norm out, or use algorithm=grpo algorithm.advantage=dr_grpo",
            )
        yield from ppo_problems(self, longest=gen.max_new_tokens)

    @property
    @abc.abstractmethod
    def estimator(self) -> AdvantageEstimator:
        """How scores become advantages."""

    def interface_args(self, maker: CallMaker) -> dict[str, Any]:
        """Returns the hyper-parameters as arguments of the interfaces ``ppo_actor`` and ``ppo_critic``."""
        names = [f.name for f in dataclasses.fields(PPOHyperparameters) if hasattr(self, f.name)]
        own = {name: to_plain(getattr(self, name)) for name in names}
        return {**own, "gen": to_plain(maker.gen), "group_size": maker.group_size}

    def policy_calls(self, maker: CallMaker, *more_keys: str) -> dict[str, MFCDef]:
        """Builds the calls of actor, reference and reward by name; the update also reads ``more_keys``."""
        args = {**self.interface_args(maker), **maker.reward}
        actor = ModelInterfaceAbstraction("ppo_actor", args)
        rule = {**maker.reward, **({"report_means": True} if maker.report_means else {})}
        bound = {} if maker.max_staleness is None else {"max_staleness": maker.max_staleness}
        trained = ModelInterfaceAbstraction("ppo_actor", {**args, **bound})
        kept = kept_keys(maker.keeps_sets)
        read = (*self.experience, *more_keys, *kept)
        read = (*read, *(("packed_versions",) if maker.versions else ()))
        calls = [
            maker.make(
                "actor_gen",
                "actor",
                "generate",
                actor,
                input_keys=("packed_prompts",),
                output_keys=(*ANSWERS, "packed_logprobs", "seq_no_eos_mask", *kept),
            ),
            maker.make(
                "rew_inf",
                "reward",
                "inference",
                ModelInterfaceAbstraction("math_reward", rule),
                input_keys=(*ANSWERS, *maker.reward_keys),
                output_keys=("rewards",),
            ),
        ]
        if self.needs_ref_logprobs:
            calls.append(_logprobs("ref_inf", "ref", maker, actor, REFERENCE))
        if self.needs_prox_logprobs:
            entropy = self.top_entropy_share < 1
            interface = replace(actor, args={**args, "with_entropy": True}) if entropy else actor
            more = {"entropy": ENTROPY} if entropy else {}
            calls.append(_logprobs("actor_inf", "actor", maker, interface, PROXIMAL, **more))
            read = (*read, PROXIMAL, *more.values())
        update = maker.make(
            "actor_train",
            "actor",
            "train_step",
            trained,
            input_keys=read,
            n_minibatches=self.ppo_n_minibatches,
            post_hooks=self._after_update,
        )
        return {call.name: call for call in (*calls, update)}

    @property
    def _after_update(self) -> tuple[Hook, ...]:
        """Reference ← eta · actor + (1 − eta) · reference."""
        if self.ref_ema_eta is None:
            return ()
        return (ParamReallocHook(target=ModelName("ref"), eta=self.ref_ema_eta),)


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyAlgorithm, ValueHyperparameters):
    """PPO (arXiv:1707.06347): advantages by a critic's values (GAE)."""

    kind = "ppo"
    roles = ("actor", "critic", "ref", "reward")
    right_roles = ("critic", "reward")
    advantage: ClassVar[AdvantageEstimator] = GAE()

    @property
    def estimator(self) -> AdvantageEstimator:
        """By the critic's values."""
        return self.advantage

    def calls(self, maker: CallMaker) -> tuple[MFCDef, ...]:
        """Builds six calls for four roles."""
        calls = self.policy_calls(maker, "values")
        critic = ModelInterfaceAbstraction("ppo_critic", self.interface_args(maker))
        values = maker.make(
            "critic_inf",
            "critic",
            "inference",
            critic,
            input_keys=("packed_input_ids",),
            output_keys=("values",),
        )
        experience = (*self.experience, "values")
        train = maker.make(
            "critic_train",
            "critic",
            "train_step",
            critic,
            input_keys=experience,
            n_minibatches=self.ppo_n_minibatches,
        )
        before = [call for name, call in calls.items() if name != "actor_train"]
        return (*before, values, calls["actor_train"], train)


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyAlgorithm):
    """Group-relative policy optimisation: an answer's advantage is its score relative to the others of its
    group, minus the KL penalty; no critic.
    """

    kind = "grpo"
    roles = ("actor", "ref", "reward")
    right_roles = ("ref", "reward")
    advantage: AnswerEstimator = option(
        GRPOAdvantage(), "how the score of an answer becomes its advantage"
    )

    def problems(self, gen: GenerationHyperparameters, group_size: int) -> Iterator[ConfigError]:
        """Yields a group of one answer, and settings that don't go together."""
        if group_size < 2 and self.advantage.compares:
            yield ConfigError(
                f"group_size is {group_size}, so there is nothing to compare an answer with",
                where="group_size",
                fix="use 2 or more, algorithm.advantage=reinforce_pp, or algorithm=ppo",
            )
        yield from _estimator_problems(self, group_size)
        yield from super().problems(gen, group_size)

    @property
    def estimator(self) -> AdvantageEstimator:
        """The chosen one."""
        return self.advantage

    @property
    def only_taught(self) -> bool:
        """The score teaches nothing, and right answers are not imitated."""
        return isinstance(self.advantage, NoAdvantage) and not self.nll_coef

    def calls(self, maker: CallMaker) -> tuple[MFCDef, ...]:
        """Builds four calls for three roles."""
        return tuple(self.policy_calls(maker).values())


# Settings of scores → what to do where the parts of a reward are looked at.
_OF_SCORES = {
    "overlong_buffer_len": "and let the reward return the length's penalty as a part",
    "score_on_truncated": "and let the rule give parts of 0 where finish_reason is not stop",
    "max_reward_clip": "and let the reward bound its parts",
    "reward_output_scaling": "and use algorithm.advantage.weights",
    "reward_output_bias": "which a comparison within a group leaves out anyway",
}


def _estimator_problems(algorithm: GRPO, group_size: int) -> Iterator[ConfigError]:
    """Yields settings that an estimator of advantages contradicts."""
    chosen = algorithm.advantage
    if isinstance(chosen, PassAtKAdvantage) and chosen.k is not None and chosen.k > group_size:
        yield ConfigError(
            f"algorithm.advantage.k is {chosen.k}, a group has {group_size} answers",
            where="algorithm.advantage.k and group_size",
            fix=f"use 2 … {group_size}, none for the whole group, or a larger group_size",
        )
    declared = {f.name: f.default for f in dataclasses.fields(algorithm)}
    own = not isinstance(chosen, GDPOAdvantage)  # a user's estimator may look at scores besides
    names = ("overlong_buffer_len",) if own else tuple(_OF_SCORES)
    for name in names if chosen.reads_parts else ():
        if getattr(algorithm, name) != declared[name]:
            yield ConfigError(
                f"{name} changes the score, and advantage={chosen.kind} looks at its parts",
                where=f"algorithm.{name}",
                fix=f"leave it out, {_OF_SCORES[name]}",
            )


def kept_keys(keeps_sets: bool) -> tuple[str, ...]:
    """Keys of the kept sets, if answers have them."""
    return KEPT_SETS if keeps_sets else ()


def _logprobs(
    name: str, role: str, maker: CallMaker, actor: ModelInterfaceAbstraction, key: str, **more: str
) -> MFCDef:
    return maker.make(
        name,
        role,
        "inference",
        actor,
        input_keys=("packed_input_ids", *kept_keys(maker.keeps_sets)),
        output_keys=(key, *more.values()),
        output_key_remap={"logprobs": key, **more},
    )
