"""Environment that is tools of MCP servers and a question: calls go to the servers, the answer to a rule.

A worker's episodes share a server's process or session, unless each is to have its own. Servers that are
started end with the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from realsys.api.agent import Answer, Environment, Observation
from realsys.api.errors import ConfigError, did_you_mean
from realsys.config.extras import missing_packages
from realsys.rollout.environments.environment_arguments import (
    MCP_PACKAGES,
    MCPArguments,
    command_words,
    is_url,
)
from realsys.rollout.environments.header_values import header_values
from realsys.rollout.environments.mcp_results import SessionLost, function_of
from realsys.rollout.environments.scoring import AnswerScoring, info_of
from realsys.runtime.first_error import all_of

if TYPE_CHECKING:
    from realsys.rollout.environments.mcp_client import MCPClient

_Key = tuple[str, str]
# Sessions that the episodes of an event loop share. They end with the process.
_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, asyncio.Task[MCPClient]]]
_shared = WeakKeyDictionary()
_retired: set[asyncio.Task[None]] = set()  # sessions that end with the last of their episodes


@dataclass(kw_only=True)
class MCPEnvironment(MCPArguments, Environment):
    """``environment=mcp``: an answer without a call is the final one, and is scored by the reward rule."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for problem in missing_packages(MCP_PACKAGES, where="environment mcp"):
            raise problem
        # Here, once a worker: it takes most of a second, for which episodes would stand still
        from realsys.rollout.environments.mcp_client import MCPClient

        self._make = MCPClient
        self._scoring = AnswerScoring(self.reward, self.reward_args)
        self._clients: dict[str, MCPClient] = {}  # by server
        self._by_tool: dict[str, str] = {}  # tool → server
        self._functions: tuple[dict[str, Any], ...] = ()
        self._calls = self._failed = 0

    async def reset(self, record: Mapping[str, Any]) -> None:
        self._scoring.begin(record)
        for server in self.server_list:
            self._clients[server] = await self._client(server)
        self._by_tool = tools_by_name(self._clients, self.allowed)
        self._functions = tuple(
            function_of(tool)
            for client in self._clients.values()
            for tool in client.tools
            if tool["name"] in self._by_tool
        )

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._functions

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        self._calls += 1
        server = self._by_tool[name]
        client = self._clients[server]
        try:
            result = await client.call(name, arguments, timeout_s=self.call_timeout_s)
        except SessionLost:
            if self.per_episode:  # what the episode did there is lost, too
                raise
            client = await self._anew(server, client)
            result = await client.call(name, arguments, timeout_s=self.call_timeout_s)
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
        clients, self._clients = list(self._clients.values()), {}
        if not self.per_episode:
            for client in clients:
                client.remove_user()
            return
        await all_of(client.close() for client in clients)

    def _info(self) -> dict[str, float]:
        return {"calls": float(self._calls), "failed_calls": float(self._failed)}

    async def _client(self, server: str) -> MCPClient:
        """Returns a session with a server: an own one, or that of all, which is begun anew if it has ended
        or was lost; those who use it still may go on.
        """
        if self.per_episode:
            return await self._started(server)
        sessions = _shared.setdefault(asyncio.get_running_loop(), {})
        key = (server, repr((sorted(self.env.items()), sorted(self.headers_of(server).items()))))
        task = sessions.get(key)
        if task is None or _has_ended(task):
            if task is not None and not task.cancelled() and task.exception() is None:
                _retire(task.result())
            task = asyncio.create_task(self._started(server), name=f"MCP server {server}")
            sessions[key] = task
        client = await asyncio.shield(task)
        client.add_user()
        return client

    async def _anew(self, server: str, lost: MCPClient) -> MCPClient:
        """Returns the session that takes the place of one that was lost, maybe to several calls at once."""
        client = await self._client(server)
        if self._clients[server] is lost:
            self._clients[server] = client
            lost.remove_user()
        else:
            client.remove_user()
        return client

    async def _started(self, server: str) -> MCPClient:
        client = self._make(
            server,
            argv=[] if is_url(server) else command_words(server),
            env=self.env,
            headers=header_values(self.headers_of(server)),
            longest_s=max(self.start_timeout_s, self.call_timeout_s),
        )
        await client.start(timeout_s=self.start_timeout_s)
        return client


def tools_by_name(clients: Mapping[str, MCPClient], allowed: Sequence[str]) -> dict[str, str]:
    """Returns which server has each tool that is offered.

    Args:
        clients: by server.
    Raises:
        ConfigError: two servers have a tool of one name, or no server has an allowed one.
    """
    found: dict[str, str] = {}
    for server, client in clients.items():
        for tool in client.tools:
            name = str(tool["name"])
            if allowed and name not in allowed:
                continue
            if name in found:
                raise ConfigError(
                    f"two MCP servers have a tool {name!r}",
                    where=f"{clients[found[name]].name}; {client.name}",
                    fix="leave one server out",
                )
            found[name] = server
    listed = [str(tool["name"]) for client in clients.values() for tool in client.tools]
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
    return task.cancelled() or task.exception() is not None or not task.result().is_open


def _retire(client: MCPClient) -> None:
    """Ends a session as soon as no episode uses it."""
    if (task := client.retire()) is not None and not task.done():
        _retired.add(task)
        task.add_done_callback(_retired.discard)
