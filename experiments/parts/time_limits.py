"""Relates the time limits of episodes to one another: of agents, answers, environments, deliveries (pure).

An answer has no limit but one of silence (``schedule.rollout_request_timeout``). What can cut it is the
episode around it, which an agent's ``timeout_s`` ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from realsys.api import registry
from realsys.api.errors import ConfigError
from realsys.api.worker_configs import DELIVERY_SILENCE_S

USUAL_TOKENS_PER_S = 40.0  # of one answer, by a large model with a full batch
SLOW_TOKENS_PER_S = 5.0
_OF_ENVIRONMENT = ("call_timeout_s", "message_timeout_s")


def argument_of(kind: str, name: str, args: Mapping[str, Any], argument: str) -> float | None:
    """Returns a number that a plug-in gets, its default if it is not given; None if it takes none."""
    try:
        fields_of = registry.arguments_class(kind, name)
        given = registry.present_arguments(kind, name, args)
    except ConfigError:  # an unknown name, which other checks report
        return None
    if fields_of is None or not dataclasses.is_dataclass(fields_of):
        return None
    found = {field.name: field.default for field in dataclasses.fields(fields_of)}
    value = given.get(argument, found.get(argument)) if argument in found else None
    return float(value) if isinstance(value, int | float) else None


def delivery_silence_s(episode_s: float | None, *, answer_s: float, max_new_tokens: int) -> float:
    """Returns the time without any delivery after which a run ends: no less than two episodes may take.

    Args:
        episode_s: limit of an episode; None: it has none, and is as long as its answer.
        answer_s: longest silence of an answer.
    """
    longest = max_new_tokens / SLOW_TOKENS_PER_S if episode_s is None else episode_s
    return max(DELIVERY_SILENCE_S, 2 * (longest + answer_s))


def time_limit_warnings(
    agent: str,
    agent_args: Mapping[str, Any],
    env: str,
    env_args: Mapping[str, Any],
    *,
    answer_s: float,
    max_new_tokens: int,
) -> Iterator[str]:
    """Warns of limits that end episodes whose answers still grow, and of those that can't be reached.

    Args:
        answer_s: longest silence of an answer, which is the limit of an environment's calls too.
    """
    episode_s = argument_of("agent", agent, agent_args, "timeout_s")
    needed_s = max_new_tokens / USUAL_TOKENS_PER_S
    if episode_s is not None and episode_s < needed_s:
        yield (
            f"task.agent_args.timeout_s={episode_s:g} ends an episode before one answer of "
            f"gen.max_new_tokens={max_new_tokens} tokens is complete, which takes {needed_s:.0f} s at "
            f"{USUAL_TOKENS_PER_S:g} tokens a second"
        )
    if episode_s is not None and episode_s < answer_s:
        yield (
            f"task.agent_args.timeout_s={episode_s:g} ends an episode before a server that stands still is "
            f"given up, after schedule.rollout_request_timeout={answer_s:g}: set that below it"
        )
    for argument in _OF_ENVIRONMENT:
        call_s = argument_of("environment", env, env_args, argument)
        if call_s is not None and call_s > answer_s:
            yield (
                f"task.env_args.{argument}={call_s:g} is never reached: a call of an environment ends its "
                f"episode after schedule.rollout_request_timeout={answer_s:g}"
            )
