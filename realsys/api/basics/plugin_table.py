"""The table of plug-ins: a kind and a name → an object, built-in or registered. registry.py is its door.

Built-ins are listed as ``"module:attribute"`` text, so that a login node can check a name without importing
torch; the module is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from realsys.api.errors import ConfigError, UnknownName, did_you_mean

BUILTIN: dict[str, dict[str, str]] = {
    "interface": {
        "ppo_actor": "realsys.interfaces.ppo.ppo_actor:PPOActorInterface",
        "ppo_critic": "realsys.interfaces.ppo.ppo_critic:PPOCriticInterface",
        "direct_preference": "realsys.interfaces.preferences.direct_preference:DirectPreferenceInterface",
        "math_reward": "realsys.interfaces.math_reward:MathRewardInterface",
        "preference": "realsys.interfaces.preferences.preference_training:PreferenceInterface",
        "reward_model": "realsys.interfaces.preferences.reward_model:RewardModelInterface",
        "rollout_end": "realsys.interfaces.rollout_end:RolloutEndInterface",
        "sft": "realsys.interfaces.supervised:SFTInterface",
        "teacher": "realsys.interfaces.ppo.teacher:TeacherInterface",
    },
    "backend": {
        "fsdp": "realsys.backends.fsdp:FSDPBackend",
        "inference": "realsys.backends.inference:InferenceBackend",
        "megatron": "realsys.backends.megatron_backend:MegatronBackend",
    },
    "model": {
        "hf_causal_lm": "realsys.models.factories:hf_causal_lm",
        "hf_critic": "realsys.models.factories:hf_critic",
        "tiny_llama": "realsys.models.factories:tiny_llama",
        "tokenizer_only": "realsys.models.factories:tokenizer_only",
    },
    "dataset": {
        "math_prompts": "realsys.data.sources.math_questions:MathPrompts",
        "math_sft": "realsys.data.sources.math_questions:MathSFT",
        "mixture": "realsys.data.sources.mixed_questions:MixedQuestions",
        "preference_pairs": "realsys.data.preferences.preference_pairs:PreferencePairs",
        "rollout_dump": "realsys.data.sources.replayed_rollouts:RolloutDumpData",
    },
    "reward": {
        "code_tests": "realsys.rewards.programs.code_rule:CodeTests",
        "harbor": "realsys.rewards.harbor.harbor_rule:HarborTests",
        "judge": "realsys.rewards.judge:Judge",
        "math_verify": "realsys.rewards.final_text_rules:MathRule",
        "reasoning_gym": "realsys.rewards.final_text_rules:ReasoningGymRule",
        "verifiers": "realsys.rewards.verifiers_rule:verifiers_reward",
    },
    "filter": {},
    "transform": {},
    "agent": {
        "math_single_step": "realsys.rollout.agents.math_single_step:MathSingleStep",
        "math_multi_turn": "realsys.rollout.agents.math_multi_turn:MathMultiTurn",
        "tool_use": "realsys.rollout.agents.tool_use:ToolUse",
        "chat": "realsys.rollout.runners.chat_agent:ChatAgent",
        "command": "realsys.rollout.runners.command_agent:CommandAgent",
        "external": "realsys.rollout.runners.external_agent:ExternalAgent",
        "harbor": "realsys.rollout.runners.harbor_agent:HarborAgent",
        "harbor_command": "realsys.rollout.runners.harbor_command_agent:HarborCommandAgent",
        "nemo_gym": "realsys.rollout.runners.nemo_gym_agent:NemoGymAgent",
        "python": "realsys.rollout.runners.hosted_agent:PythonAgent",
        "verifiers": "realsys.rollout.runners.verifiers_agent:VerifiersAgent",
    },
    "environment": {
        "math_verify": "realsys.rollout.environments.math_question:MathVerify",
        "calculator": "realsys.rollout.environments.calculator:Calculator",
        "gymnasium": "realsys.rollout.environments.gymnasium_environment:GymnasiumEnvironment",
        "mcp": "realsys.rollout.environments.mcp_environment:MCPEnvironment",
        "openenv": "realsys.rollout.environments.openenv_environment:OpenEnvEnvironment",
    },
    "task": {
        "file": "experiments.task:FileTask",
        "harbor": "experiments.tasks.harbor:HarborTask",
        "math": "experiments.task:MathTask",
        "mixture": "experiments.tasks.mixture:Mixture",
        "preferences": "experiments.tasks.preferences:PreferencesTask",
        "reasoning_gym": "experiments.tasks.reasoning_gym:ReasoningGymTask",
        "verifiers": "experiments.tasks.verifiers:VerifiersTask",
    },
    "algorithm": {
        "grpo": "experiments.algorithm:GRPO",
        "ppo": "experiments.algorithm:PPO",
    },
    "advantage": {
        "dr_grpo": "realsys.api.basics.estimators:DrGRPOAdvantage",
        "gae": "realsys.api.basics.estimators:GAE",
        "gdpo": "realsys.api.basics.estimators:GDPOAdvantage",
        "grpo": "realsys.api.basics.estimators:GRPOAdvantage",
        "maxrl": "realsys.api.basics.estimators:MaxRLAdvantage",
        "none": "realsys.api.basics.estimators:NoAdvantage",
        "pass_at_k": "realsys.api.basics.estimators:PassAtKAdvantage",
        "reinforce_pp": "realsys.api.basics.estimators:ReinforcePPAdvantage",
        "reinforce_pp_baseline": "realsys.api.basics.estimators:ReinforcePPBaselineAdvantage",
        "rloo": "realsys.api.basics.estimators:RLOOAdvantage",
    },
    "loss": {
        "cispo": "realsys.api.basics.losses:CISPOLoss",
        "clip_cov": "realsys.api.basics.losses:ClipCovLoss",
        "dppo": "realsys.api.basics.losses:DPPOLoss",
        "gspo": "realsys.api.basics.losses:GSPOLoss",
        "kl_cov": "realsys.api.basics.losses:KLCovLoss",
        "ppo": "realsys.api.basics.losses:PPOLoss",
        "sapo": "realsys.api.basics.losses:SAPOLoss",
    },
    "pair_loss": {
        "dpo": "realsys.api.basics.preference_losses:DPOLoss",
        "ipo": "realsys.api.basics.preference_losses:IPOLoss",
        "kto": "realsys.api.basics.preference_losses:KTOLoss",
        "simpo": "realsys.api.basics.preference_losses:SimPOLoss",
    },
    "schedule": {
        "async": "experiments.asynchronous:Async",
        "detached": "experiments.detached:Detached",
        "one_step_off": "experiments.schedule:OneStepOff",
        "replay": "experiments.schedule:Replay",
        "rollout": "experiments.asynchronous:RolloutOnly",
        "sync": "experiments.schedule:Sync",
    },
    "placement": {
        "shared": "experiments.placement:Shared",
        "split": "experiments.placement:Split",
    },
    "experiment": {
        "cispo-math": "experiments.grpo_math:cispo_math",
        "dapo-math": "experiments.grpo_math:dapo_math",
        "distill-math": "experiments.grpo_math:distill_math",
        "dpo": "experiments.preferences.direct_training:dpo",
        "grpo-math": "experiments.grpo_math:grpo_math",
        "grpo-math-async": "experiments.grpo_math:grpo_math_async",
        "gspo-math": "experiments.grpo_math:gspo_math",
        "ppo-math": "experiments.ppo_math:ppo_math",
        "ppo-math-async": "experiments.ppo_math:ppo_math_async",
        "ppo-math-detached": "experiments.ppo_math:ppo_math_detached",
        "ppo-math-split": "experiments.ppo_math:ppo_math_split",
        "qwen2.5-0.5b-gsm8k": "experiments.known_results:qwen_gsm8k",
        "qwen2.5-7b-dapo": "experiments.known_results:qwen_dapo",
        "reward-model": "experiments.preferences.reward_training:reward_model",
        "rloo-math": "experiments.grpo_math:rloo_math",
        "sft-math": "experiments.sft:sft_math",
    },
}
registered: dict[str, dict[str, Any]] = {kind: {} for kind in BUILTIN}


def register(kind: str, name: str, thing: Any) -> None:
    """Registers ``thing`` under ``name``.

    Raises:
        ConfigError: another object has that name.
    """
    table = registered[kind]
    if name in BUILTIN[kind] or table.get(name, thing) is not thing:
        raise ConfigError(
            f"{kind} {name!r} is already registered",
            where=f"register_{kind}({name!r}, …)",
            fix="choose another name",
        )
    table[name] = thing


def names(kind: str) -> list[str]:
    """All names of a kind, built-in and registered."""
    return sorted({*BUILTIN[kind], *registered[kind]})


def check(kind: str, name: str, *, where: str) -> ConfigError | None:
    """Returns a ConfigError if ``name`` is not registered, else None. Imports nothing."""
    if name in BUILTIN[kind] or name in registered[kind]:
        return None
    return UnknownName(
        f"no {kind} called {name!r}", where=where, fix=did_you_mean(name, names(kind))
    )


def find(kind: str, name: str, *, where: str = "registry") -> Any:
    """Returns the object registered under ``name``; imports a built-in's module on first use.

    Raises:
        UnknownName: with the nearest names.
    """
    if problem := check(kind, name, where=where):
        raise problem
    if name in registered[kind]:
        return registered[kind][name]
    return load(BUILTIN[kind][name])


def load(text: str) -> Any:
    module, _, attribute = text.partition(":")
    return getattr(importlib.import_module(module), attribute)
