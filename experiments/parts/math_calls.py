"""Calls of a policy trained on scored answers: generate, score, reference log-probs, update (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from realsys.api.dataflow import Hook, MFCDef, ParamReallocHook
from realsys.api.model import ModelInterfaceAbstraction, ModelName

ANSWERS = ("packed_input_ids", "prompt_mask")
PROXIMAL = "packed_prox_logprobs"
REFERENCE = "packed_ref_logprobs"
POLICY_KEYS = (*ANSWERS, "packed_logprobs", "rewards", "seq_no_eos_mask")  # read by every update


def policy_calls(
    call: Callable[..., MFCDef],
    *,
    ppo: Mapping[str, Any],
    reward: str,
    experience: tuple[str, ...],
    proximal: bool = False,
    max_staleness: int | None = None,
    after_update: tuple[Hook, ...] = (),
) -> dict[str, MFCDef]:
    """Builds the calls of actor, reference and reward, by name.

    Args:
        call: (name, role, kind, interface, **further fields) → the call.
        ppo: arguments of interface ``ppo_actor``, without the reward.
        experience: keys that the update reads.
        proximal: the actor recomputes the log-probs of its answers before the update.
        max_staleness: the update refuses tokens of older weights; None: not checked.
    """
    actor = ModelInterfaceAbstraction("ppo_actor", {**ppo, "reward": reward})
    asserted = {} if max_staleness is None else {"max_staleness": max_staleness}
    trained = ModelInterfaceAbstraction("ppo_actor", {**actor.args, **asserted})
    again = (
        ()
        if not proximal
        else (
            call(
                "actor_inf",
                "actor",
                "inference",
                actor,
                input_keys=("packed_input_ids",),
                output_keys=(PROXIMAL,),
                output_key_remap={"logprobs": PROXIMAL},
            ),
        )
    )
    calls = (
        call(
            "actor_gen",
            "actor",
            "generate",
            actor,
            input_keys=("packed_prompts",),
            output_keys=(*ANSWERS, "packed_logprobs", "seq_no_eos_mask"),
        ),
        call(
            "rew_inf",
            "reward",
            "inference",
            ModelInterfaceAbstraction("math_reward", {"reward": reward}),
            input_keys=ANSWERS,
            output_keys=("rewards",),
        ),
        call(
            "ref_inf",
            "ref",
            "inference",
            actor,
            input_keys=("packed_input_ids",),
            output_keys=(REFERENCE,),
            output_key_remap={"logprobs": REFERENCE},
        ),
        *again,
        call(
            "actor_train",
            "actor",
            "train_step",
            trained,
            input_keys=(*experience, *((PROXIMAL,) if proximal else ())),
            post_hooks=after_update,
        ),
    )
    return {made.name: made for made in calls}


def rollout_end(call: Callable[..., MFCDef], keys: tuple[str, ...]) -> MFCDef:
    """Builds the only call of a rollout-only run: it consumes the rollouts, which ends the step."""
    end = ModelInterfaceAbstraction("rollout_end")
    return call("rollout_end", "reward", "inference", end, input_keys=keys)


def to_reference(eta: float) -> ParamReallocHook:
    """Builds the hook after a call of the actor: reference ← eta · actor + (1 − eta) · reference."""
    return ParamReallocHook(target=ModelName("ref"), eta=eta)
