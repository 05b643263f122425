"""A reward model in the graph of a run: its settings, its call, and what it can't do (pure).

    actor_gen ── rule_inf ── rew_inf ── actor_train

The rule is called as without it, in asynchronous runs by rollout workers. ``rew_inf`` reads its rewards,
and every later call reads those of ``rew_inf`` in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.parts.model_files import model_problems, reader_problems
from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError, RealsysError
from realsys.api.model import ModelInterfaceAbstraction
from realsys.api.options import ModelOptions, option

REWARDS, WEIGHED = "rewards", "weighed_rewards"


@dataclass(frozen=True, kw_only=True)
class RewardModelOptions(ModelOptions):
    """A frozen sequence classifier with one label, which reads the policy's tokens."""

    backend: str = option("inference", "registered backend")
    weight: float = option(1.0, "of its score; the rule's is rule_weight")
    rule_weight: float = option(1.0, "of the rule's score; at 0 the rule is only logged")
    clip: float | None = option(None, "its score is clipped to ± this; none: it is not", gt=0)


def scored_calls(
    calls: Sequence[MFCDef], model: RewardModelOptions, make: Callable[..., MFCDef]
) -> tuple[MFCDef, ...]:
    """Adds the reward model's call before the first that reads rewards."""
    args = {"weight": model.weight, "rule_weight": model.rule_weight, "clip": model.clip}
    scored = make(
        "rew_inf",
        "reward_model",
        "inference",
        ModelInterfaceAbstraction("reward_model", args),
        input_keys=("packed_input_ids", REWARDS),
        output_keys=(WEIGHED,),
        output_key_remap={REWARDS: WEIGHED},
    )
    found = [_reading(replace(c, name="rule_inf") if c.name == "rew_inf" else c) for c in calls]
    first = next(i for i, call in enumerate(found) if WEIGHED in call.input_keys)
    return (*found[:first], scored, *found[first:])


def _reading(call: MFCDef) -> MFCDef:
    """The call with the model's rewards in place of the rule's."""
    if REWARDS not in call.input_keys:
        return call
    keys = tuple(WEIGHED if key == REWARDS else key for key in call.input_keys)
    return replace(call, input_keys=keys, input_key_remap={WEIGHED: REWARDS})


def reward_model_problems(
    model: RewardModelOptions, *, actor_path: str | None, longest: int, trains: bool
) -> Iterator[ConfigError]:
    """Yields a model that can't score the policy's answers, or changes nothing.

    Args:
        longest: tokens of the longest prompt and answer together.
    """
    if not trains or model.weight == 0:
        yield ConfigError(
            "the reward model has no effect: "
            + ("its weight is 0" if trains else "nothing trains with this schedule"),
            where="reward_model.weight" if trains else "reward_model and schedule",
            fix="leave reward_model out" + ", or give it a weight" * trains,
        )
    if model.path is None or actor_path is None:
        missing = "reward_model.path" if model.path is None else "actor.path"
        yield ConfigError(
            f"{missing} is not given"
            + ("" if model.path is None else ", and a reward model needs the policy's tokenizer"),
            where=f"reward_model and {missing}",
            fix=f"set {missing}=<Hugging Face directory>",
        )
        return
    broken = list(model_problems(model, "reward_model", critic=True))
    yield from broken
    if broken:
        return
    yield from head_problems(model.path, where="reward_model.path")
    yield from reader_problems(
        "the reward model",
        model.path,
        actor_path,
        where="reward_model",
        longest=longest,
        fix="train one from the policy: realsys launch reward-model model.path=<actor.path>",
    )


def head_problems(path: str, *, where: str) -> Iterator[ConfigError]:
    """Yields that a complete model's directory is no classifier with one label."""
    from realsys.models.hf_directory import weight_shapes

    try:
        shapes = weight_shapes(Path(path).expanduser())
    except RealsysError:
        return  # reported by the check of the directory
    head = next((n for n in ("score.weight", "classifier.weight") if n in shapes), None)
    if head is None or shapes[head][0] != 1:
        yield ConfigError(
            "it is no sequence classifier: it has no weights score.weight"
            if head is None
            else f"the classifier has {shapes[head][0]} labels, and a reward is one number",
            where=f"{where}={path}",
            fix="give a classifier with one label, e.g. made by realsys launch reward-model",
        )
