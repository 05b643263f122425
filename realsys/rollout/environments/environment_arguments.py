"""Arguments of environments that are others': servers and packages. A plan checks them without loading any.

No torch, no aiohttp.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from realsys.api.errors import ConfigError
from realsys.api.options import option
from realsys.rollout.environments.header_values import check_headers

MCP_PACKAGES = ("mcp", "httpx2", "anyio")  # the last two come with the first


@dataclass(kw_only=True)
class OwnRewardArguments:
    """What experiments give to every environment, and those with a reward of their own don't look at."""

    reward: str = ""
    reward_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class OpenEnvArguments(OwnRewardArguments):
    """Arguments of ``environment=openenv``.

    Attributes:
        action_field: of the action, that holds the policy's text; empty: the only text field of the
            action's schema, or else the policy answers with the whole action as JSON.
        action: further fields of every action.
        observation_field: of the observation, that the policy is shown; empty: its only text field, or else
            the whole observation as JSON.
        reset_fields: of the record, that the environment is reset with; those it does not have are left
            out.
        offer_tools: the environment's tools are offered; each call is a step.
    """

    url: str = option("", "of the environment's server, e.g. http://127.0.0.1:8000")
    transport: Literal["websocket", "http"] = "websocket"
    action_field: str = ""
    action: Mapping[str, Any] = field(default_factory=dict)
    observation_field: str = ""
    reset_fields: tuple[str, ...] = ("seed", "episode_id")
    offer_tools: bool = False
    message_timeout_s: float = option(60.0, "limit of one message", unit="s", gt=0)
    room_timeout_s: float = option(240.0, "longest wait for a free place", unit="s", gt=0)

    def __post_init__(self) -> None:
        check_url(self.url, "task.env_args.url", ("http", "https", "ws", "wss"))
        if self.offer_tools and self.transport == "http":
            raise ConfigError(
                "over HTTP each request meets a new environment, so tools can't act on one",
                where="task.env_args.transport",
                fix="leave it out, or leave out offer_tools",
            )


@dataclass(kw_only=True)
class GymnasiumArguments(OwnRewardArguments):
    """Arguments of ``environment=gymnasium``.

    Attributes:
        id: registered, by gymnasium itself or by a file of yours given with --import.
        kwargs: of the environment.
        show: what the policy sees: the observation, or what ``render()`` returns as text.
        seed_field: of the record, a whole number; without it the question's text decides.
    """

    id: str = option("", "registered environment, e.g. FrozenLake-v1")
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    show: Literal["observation", "render"] = "observation"
    seed_field: str = "seed"
    max_steps: int = option(64, "most steps of an episode", ge=1)

    def __post_init__(self) -> None:
        if not self.id:
            raise ConfigError(
                "environment gymnasium has no id",
                where="task.env_args.id",
                fix="name a registered one, e.g. task.env_args.id=FrozenLake-v1",
            )


@dataclass(kw_only=True)
class MCPArguments:
    """Arguments of ``environment=mcp``.

    Attributes:
        servers: each a command line, started without a shell, or the URL of a running one.
        allowed: names of the tools that are offered; empty: all.
        headers: of each request to servers at a URL: name → where its value is, ``env:NAME`` or
            ``file:PATH``, behind a scheme or not, never the value. Of several servers: URL → such a table.
        env: further environment variables of the servers that are started.
        per_episode: each episode has servers, or sessions, of its own.
        reward, reward_args: registered reward rules, applied to the final answer.
    """

    servers: str | list[str] = ""
    allowed: tuple[str, ...] = ()
    headers: Mapping[str, Any] = option(
        {}, "of requests to servers at a URL, e.g. {Authorization: Bearer env:MY_KEY}"
    )
    env: Mapping[str, str] = field(default_factory=dict)
    per_episode: bool = False
    start_timeout_s: float = option(60.0, "until a server lists its tools", unit="s", gt=0)
    call_timeout_s: float = option(60.0, "limit of one call", unit="s", gt=0)
    longest_result: int = option(8192, "of a result the policy is shown", unit="characters", ge=1)
    reward: str = "math_verify"
    reward_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.server_list:
            raise ConfigError(
                "environment mcp has no server",
                where="task.env_args.servers",
                fix="give a command line or a URL, e.g. 'task.env_args.servers=python my_tools.py'",
            )
        for server in self.server_list:
            if is_url(server):
                check_url(server, "task.env_args.servers", ("http", "https"))
            else:
                command_words(server)
        self._check_headers()

    def headers_of(self, server: str) -> dict[str, str]:
        """Returns the headers of requests to a server, each with the place of its value."""
        given = self.headers.get(server, {}) if self._has_tables else self.headers
        return {str(name): str(value) for name, value in given.items()}

    @property
    def _has_tables(self) -> bool:
        return any(isinstance(value, Mapping) for value in self.headers.values())

    def _check_headers(self) -> None:
        urls = [server for server in self.server_list if is_url(server)]
        if self.headers and not urls:
            raise ConfigError(
                "no server is at a URL, so no request has headers",
                where="task.env_args.headers",
                fix="leave them out; a program takes its key from its environment",
            )
        if self._has_tables:
            for url, table in self.headers.items():
                if url not in urls or not isinstance(table, Mapping):
                    raise ConfigError(
                        f"headers of {url!r}, which is none of the servers at a URL",
                        where="task.env_args.headers",
                        fix=f"give a table for each of {', '.join(urls)}",
                    )
        elif self.headers and len(urls) > 1:
            raise ConfigError(
                "two servers at URLs would get the same headers, and so each the key of the other",
                where="task.env_args.headers",
                fix=f"give them by URL: {{{urls[0]}: {{Authorization: Bearer env:MY_KEY}}}}",
            )
        for server in urls:
            check_headers(self.headers_of(server))

    @property
    def server_list(self) -> tuple[str, ...]:
        """The servers; a single one may be given as text."""
        given = [self.servers] if isinstance(self.servers, str) else self.servers
        return tuple(server for server in given if server.strip())


def packages_of_environment(name: str) -> tuple[str, ...]:
    """Returns the packages of an extra that an environment needs."""
    return MCP_PACKAGES if name == "mcp" else ()


def is_url(server: str) -> bool:
    """Returns whether an MCP server is at a URL, and not a command."""
    return "://" in server.split()[0]


def command_words(command: str) -> list[str]:
    """Returns the words of a server's command line.

    Raises:
        ConfigError: a quotation mark is not closed.
    """
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"the command {command!r} can't be split into words: {error}",
            where="task.env_args.servers",
            fix="close its quotation marks",
        ) from error


def check_url(url: str, where: str, schemes: tuple[str, ...]) -> None:
    """Raises ConfigError if ``url`` is none of these schemes with a host."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(
            f"the URL is {url!r}" if url else "there is no URL",
            where=where,
            fix=f"give one that begins with {', '.join(f'{s}://' for s in schemes)} and has a host",
        )
