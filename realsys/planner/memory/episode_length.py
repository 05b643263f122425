"""How many tokens an agent's episode may have, as far as settings say so (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from realsys.api.experiment import ExperimentConfig
from realsys.models.shape import ModelShape

ONE_ANSWER = "math_single_step"  # the agent whose episodes are a question and an answer
# Most answers of an episode by default, and the tokens assumed for what an environment says to one.
TURNS = {
    "math_multi_turn": (8, 256),
    "tool_use": (16, 256),
    "chat": (8, 1024),
    "harbor": (20, 2048),
}
# Argument of generation servers that says how long a conversation may be, by their kind.
LENGTH_ARGUMENTS = {
    "embedded": "max_tokens",
    "sglang": "context_length",
    "vllm": "max_model_len",
}


class EpisodeLength(NamedTuple):
    """Most tokens of an episode of several turns.

    Attributes:
        setting: that says less; empty: there is none.
        is_bounded: turns or a setting bound it, else the model's positions alone, which few episodes fill.
    """

    tokens: int
    setting: str
    is_bounded: bool


def longest_episode(
    config: ExperimentConfig,
    shapes: Mapping[str, ModelShape],
    *,
    prompt_tokens: int,
    answer_tokens: int,
) -> EpisodeLength | None:
    """Returns how long an episode of several turns may be; None: episodes have one answer, or nothing
    bounds them that is known.

    Args:
        shapes: by role.
        answer_tokens: of one answer.
    """
    if not config.rollout_worker or config.rollout_worker[0].agent == ONE_ANSWER:
        return None
    worker, policy = config.rollout_worker[0], shapes.get("actor")
    limits = [policy.max_positions] if policy is not None else []
    name, is_bounded = "", False
    for server in config.generation_server[:1]:
        name = LENGTH_ARGUMENTS.get(server.backend_type, "")
        declared = _number(server.backend_args.get(name))
        limits.append(declared)
        is_bounded = declared > 0
    if worker.agent in TURNS:
        turns, observed = TURNS[worker.agent]
        args: Mapping[str, Any] = worker.agent_args
        turns = _number(args.get("max_turns")) or turns
        limits.append(prompt_tokens + turns * (answer_tokens + observed))
        is_bounded = True
    known = [n for n in limits if n > 0]
    setting = f"schedule.server_args.{name}" if name else ""
    return EpisodeLength(min(known), setting, is_bounded) if known else None


def _number(value: Any) -> int:
    """Returns a setting that is a whole number; 0: it is none, which is refused elsewhere."""
    return value if isinstance(value, int) else 0
