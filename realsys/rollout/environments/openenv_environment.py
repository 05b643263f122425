"""Environment that is an OpenEnv server (openenv-core): a session an episode, all in text.

https://github.com/meta-pytorch/OpenEnv; tried with openenv-core 0.3.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.api.agent import Environment, Observation
from realsys.api.errors import RolloutError
from realsys.rollout.environments.environment_arguments import OpenEnvArguments
from realsys.rollout.environments.openenv_messages import (
    LIST_TOOLS,
    ActionShape,
    WrongAction,
    call_action,
    result_text,
    shape_of,
    text_of,
    tools_of,
)
from realsys.rollout.environments.openenv_session import OpenEnvError, OpenEnvSession, StepReply

_WRONG = "VALIDATION_ERROR"


@dataclass(kw_only=True)
class OpenEnvEnvironment(OpenEnvArguments, Environment):
    """``environment=openenv``: the rewards are the server's.

    With tools, an answer without a call ends the episode, unless ``action_field`` says where it goes.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._session = OpenEnvSession(self)
        self._shape: ActionShape | None = None
        self._opening = ""
        self._tools: tuple[dict[str, Any], ...] = ()
        self._steps = self._wrong = 0

    async def reset(self, record: Mapping[str, Any]) -> None:
        data = {name: record[name] for name in self.reset_fields if record.get(name) is not None}
        reply = await self._session.reset(data)
        if reply.done:
            raise RolloutError(
                "the episode is over at its reset, so the policy has nothing to answer",
                where=f"OpenEnv server {self.url}",
                fix="see what the server does with the record's fields in task.env_args.reset_fields",
            )
        self._opening = text_of(reply.observation, self.observation_field)
        if self.offer_tools:
            self._tools = tools_of((await self._session.step(LIST_TOOLS)).observation)
        if self.action_field:
            self._shape = ActionShape(text_field=self.action_field, constant=self.action)
        elif not self.offer_tools:
            schema = (await self._session.schema()).get("action")
            self._shape = shape_of(schema if isinstance(schema, Mapping) else {}, self.action)

    def opening(self) -> str:
        return self._opening

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        self._steps += 1
        try:
            reply = await self._session.step(call_action(name, arguments))
        except OpenEnvError as error:
            if error.code != _WRONG and not error.status:
                raise
            return self._refused(f"Error: {error.what}")
        text, failed = result_text(reply.observation)
        self._wrong += failed
        return self._observed(reply, text)

    async def step(self, action: str) -> Observation:
        if self._shape is None:  # an answer ends an episode of calls
            return self._refused("", done=True)
        self._steps += 1
        try:
            reply = await self._session.step(self._shape.action_of(action))
        except WrongAction as error:
            return self._refused(f"Error: {error}")
        except OpenEnvError as error:
            if not error.status and (error.code != _WRONG or self._shape.text_field):
                raise
            return self._refused(f"Error: {error.what}")  # what the policy wrote
        return self._observed(reply, text_of(reply.observation, self.observation_field))

    async def close(self) -> None:
        await self._session.close()

    def _refused(self, text: str, *, done: bool = False) -> Observation:
        self._wrong += bool(text)
        return Observation(text=text, done=done, info=self._info())

    def _observed(self, reply: StepReply, text: str) -> Observation:
        return Observation(text=text, reward=reply.reward, done=reply.done, info=self._info())

    def _info(self) -> dict[str, float]:
        return {"steps": float(self._steps), "wrong_actions": float(self._wrong)}
