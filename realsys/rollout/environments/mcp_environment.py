"""Environment that is tools of MCP servers and a question: calls go to the servers, the answer to a rule.

A worker's episodes share a server's process or session, unless each is to have its own. Servers that are
started end with the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from realsys.api.agent import Answer, Environment, Observation
from realsys.api.errors import ConfigError, did_you_mean
from realsys.rollout.environments.environment_arguments import MCPArguments, command_words, is_url
from realsys.rollout.environments.mcp_client import MCPClient, function_of
from realsys.rollout.environments.mcp_connections import opened
from realsys.rollout.environments.scoring import AnswerScoring, info_of

_Key = tuple[str, tuple[tuple[str, str], ...]]
# Sessions that the episodes of an event loop share. They end with the process.
_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, asyncio.Task[MCPClient]]]
_shared = WeakKeyDictionary()


@dataclass(kw_only=True)
class MCPEnvironment(MCPArguments, Environment):
    """``environment=mcp``: an answer without a call is the final one, and is scored by the reward rule."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._scoring = AnswerScoring(self.reward, self.reward_args)
        self._own: list[MCPClient] = []
        self._by_tool: dict[str, MCPClient] = {}
        self._functions: tuple[dict[str, Any], ...] = ()
        self._calls = self._failed = 0

    async def reset(self, record: Mapping[str, Any]) -> None:
        self._scoring.begin(record)
        clients = [await self._client(server) for server in self.server_list]
        self._by_tool = tools_by_name(clients, self.allowed)
        self._functions = tuple(
            function_of(tool)
            for client in clients
            for tool in client.tools
            if tool["name"] in self._by_tool
        )

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._functions

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        self._calls += 1
        result = await self._by_tool[name].call(name, arguments, timeout_s=self.call_timeout_s)
        self._failed += result.failed
        text = result.text
        if len(text) > self.longest_result:
            left_out = len(text) - self.longest_result
            text = f"{text[: self.longest_result]}\n[{left_out} more characters]"
        return Observation(text=text, done=False, info=self._info())

    def sampled(self, answer: Answer) -> None:
        self._scoring.sampled(answer)

    async def step(self, action: str) -> Observation:
        score = await self._scoring.score(action)
        return Observation(reward=score.value, info={**self._info(), **info_of(score)})

    async def close(self) -> None:
        for client in self._own:
            await client.close()

    def _info(self) -> dict[str, float]:
        return {"calls": float(self._calls), "failed_calls": float(self._failed)}

    async def _client(self, server: str) -> MCPClient:
        if self.per_episode:
            return await self._started(server, self._own)
        sessions = _shared.setdefault(asyncio.get_running_loop(), {})
        key = (server, tuple(sorted(self.env.items())))
        task = sessions.get(key)
        if task is None or _has_ended(task):
            if task is not None and not task.cancelled() and task.exception() is None:
                sessions.pop(key)
                await task.result().close()
                return await self._client(server)
            task = asyncio.create_task(self._started(server, []), name=f"MCP server {server}")
            sessions[key] = task
        return await asyncio.shield(task)

    async def _started(self, server: str, to_close: list[MCPClient]) -> MCPClient:
        argv = [] if is_url(server) else command_words(server)
        client = MCPClient(await opened(server, argv, env=self.env))
        to_close.append(client)
        try:
            await client.start(timeout_s=self.start_timeout_s)
        except BaseException:
            to_close.remove(client)
            await client.close()
            raise
        return client


def tools_by_name(clients: Sequence[MCPClient], allowed: Sequence[str]) -> dict[str, MCPClient]:
    """Returns who serves each tool that is offered.

    Raises:
        ConfigError: two servers have a tool of one name, or no server has an allowed one.
    """
    found: dict[str, MCPClient] = {}
    for client in clients:
        for tool in client.tools:
            name = str(tool["name"])
            if allowed and name not in allowed:
                continue
            if name in found:
                raise ConfigError(
                    f"two MCP servers have a tool {name!r}",
                    where=f"{found[name].connection.name}; {client.connection.name}",
                    fix="leave one server out",
                )
            found[name] = client
    listed = [str(tool["name"]) for client in clients for tool in client.tools]
    for name in allowed:
        if name not in found:
            raise ConfigError(
                f"no MCP server has a tool {name!r}",
                where="task.env_args.allowed",
                fix=did_you_mean(name, listed),
            )
    return found


def _has_ended(task: asyncio.Task[MCPClient]) -> bool:
    if not task.done():
        return False
    failed = task.cancelled() or task.exception() is not None
    return failed or not task.result().connection.is_open
