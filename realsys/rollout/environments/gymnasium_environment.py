"""Environment that is a gymnasium environment in this process: texts for actions and observations.

https://gymnasium.farama.org; its calls block, so each runs in a thread.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realsys.api.agent import Environment, Observation
from realsys.api.errors import ConfigError, did_you_mean
from realsys.rewards.scores import checked_score
from realsys.rollout.environments.environment_arguments import GymnasiumArguments

_WHERE = "environment gymnasium"
_NUMBER = re.compile(r"-?\d+")
_COLOUR = re.compile(r"\x1b\[(?:([1-9][\d;]*+)|0?)m")


class NoAction(ValueError):
    """What the policy wrote is no action; carries what to write instead."""


@dataclass(kw_only=True)
class GymnasiumEnvironment(GymnasiumArguments, Environment):
    """``environment=gymnasium``: rewards are the environment's; what is no action is told, and no step.

    Raises:
        ConfigError: gymnasium is not installed, does not know the environment, or can't make it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._gymnasium = _gymnasium()
        if self.id not in self._gymnasium.registry and ":" not in self.id:
            raise ConfigError(
                f"gymnasium knows no environment {self.id!r}",
                where="task.env_args.id",
                fix=f"register it in a file that you give with --import; or "
                f"{did_you_mean(self.id, self._gymnasium.registry)}",
            )
        self._env: Any = None
        self._calling = False
        self._opening = ""
        self._steps = self._wrong = 0

    async def reset(self, record: Mapping[str, Any]) -> None:
        self._env = await asyncio.to_thread(self._made)
        observation, _ = await self._in_thread(
            self._env.reset, seed=seed_of(record, self.seed_field)
        )
        self._opening = await self._shown(observation)

    def opening(self) -> str:
        return self._opening

    async def step(self, action: str) -> Observation:
        try:
            chosen = action_of(action, self._env.action_space)
        except NoAction as error:
            self._wrong += 1
            return Observation(text=f"Error: {error}", done=False, info=self._info())
        self._steps += 1
        observation, reward, terminated, truncated, _ = await self._in_thread(
            self._env.step, chosen
        )
        done = bool(terminated or truncated) or self._steps >= self.max_steps
        text = "" if done else await self._shown(observation)
        number = checked_score(reward, source=f"environment {self.id!r}")
        return Observation(text=text, reward=number, done=done, info=self._info())

    async def close(self) -> None:
        if (
            self._env is not None and not self._calling
        ):  # else a call hangs, and is left to its thread
            await asyncio.to_thread(self._env.close)

    def _made(self) -> Any:
        kwargs = dict(self.kwargs)
        if self.show == "render":
            kwargs.setdefault("render_mode", "ansi")
        try:
            return self._gymnasium.make(self.id, **kwargs)
        except Exception as error:  # a user's environment may raise anything
            raise ConfigError(
                f"gymnasium can't make {self.id!r}: {type(error).__name__}: {error}",
                where="task.env_args",
                fix="correct task.env_args.kwargs, or install what it needs",
            ) from error

    async def _in_thread(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        self._calling = True
        made = await asyncio.to_thread(call, *args, **kwargs)
        self._calling = False  # stays where the wait was cut off
        return made

    async def _shown(self, observation: Any) -> str:
        if self.show == "render":
            return without_colours(str(await self._in_thread(self._env.render)))
        return text_of_observation(observation)

    def _info(self) -> dict[str, float]:
        return {"steps": float(self._steps), "wrong_actions": float(self._wrong)}


# ---- Texts and spaces (pure) -----------------------------------------------------------------------


def seed_of(record: Mapping[str, Any], seed_field: str) -> int:
    """Returns the seed of a record: its own, or one that the question's text decides.

    All episodes of a question begin alike, since their rewards are compared.
    """
    given = record.get(seed_field)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    return zlib.crc32(json.dumps(record.get("prompt"), default=str).encode())


def without_colours(text: str) -> str:
    """Returns a drawing for terminals with brackets in place of colours, which mark where one is."""
    made: list[str] = []
    begin, opened = 0, -1  # where in ``made`` the bracket of an open colour goes
    for found in _COLOUR.finditer(text):
        if not found[1] and opened >= 0:
            made[opened] = "["
            made += [text[begin : found.start()], "]"]
            begin, opened = found.end(), -1
        elif found[1] and opened < 0:
            made += [text[begin : found.start()], found[0]]
            begin, opened = found.end(), len(made) - 1
    return "".join([*made, text[begin:]])


def text_of_observation(observation: Any) -> str:
    """Returns a text as it is, anything else as JSON."""
    if isinstance(observation, str):
        return observation
    return json.dumps(_plain(observation), ensure_ascii=False, default=str)


def action_of(text: str, space: Any) -> Any:
    """Returns the action that a text is, in a gymnasium space.

    A space of texts takes the text; ``Discrete`` the last whole number in it; any other the text as JSON.

    Raises:
        NoAction: it is none of the space.
    """
    kind = type(space).__name__
    if kind == "Text":
        return text
    if kind == "Discrete":
        low, high = int(space.start), int(space.start + space.n) - 1
        numbers = _NUMBER.findall(text)
        if not numbers or len(numbers[-1]) > 18 or not low <= int(numbers[-1]) <= high:
            raise NoAction(f"answer with a whole number from {low} to {high}")
        return int(numbers[-1])
    try:
        made = space.from_jsonable([json.loads(text)])[0]
        is_in = space.contains(made)
    except Exception as error:  # spaces raise what they like on values that are not of theirs
        raise NoAction(f"answer with JSON, a value of {space}") from error
    if not is_in:
        raise NoAction(f"answer with JSON, a value of {space}")
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _gymnasium() -> Any:
    try:
        return importlib.import_module("gymnasium")
    except ImportError as error:
        raise ConfigError(
            f"gymnasium can't be imported: {error}",
            where=_WHERE,
            fix="install it beside realsys, on the nodes of the rollout workers: pip install gymnasium",
        ) from error
