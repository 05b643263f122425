"""A session with one MCP server, by the package ``mcp``: its tools, and calls of them within a time.

What the protocol is (its revisions, its two transports) is the package's affair; what a failure means to an
episode is ours::

    the tool failed, took too long, or returned too much; HTTP 4xx   ─▶ a failed result of that call
    HTTP 408, 429, 5xx; no connection                   ─▶ asked again, with pauses, in the call's time
    its time is over, or the connection broke           ─▶ ServerAway: the episode is played again
    the server knows the session no more (404)          ─▶ SessionLost: a new one is begun
    its program has ended; another key is wanted; what it speaks is no MCP   ─▶ RolloutError
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx2
from mcp import MCPError
from mcp.client import Client
from mcp.types import Implementation
from pydantic import ValidationError

from realsys import __version__
from realsys.api.errors import ConfigError, RolloutError, WaitTimeout
from realsys.rollout.environments.mcp_http import (
    WireFault,
    fault_of,
    http_transport,
    is_old,
    raised_fault,
    secrets_of,
    too_large,
    without_secrets,
)
from realsys.rollout.environments.mcp_process import ServerProcess
from realsys.rollout.environments.mcp_results import (
    ServerAway,
    SessionLost,
    ToolResult,
    failed,
    result_of,
)
from realsys.transport.retry_pauses import RetryPauses, ServerBusy

logger = logging.getLogger(__name__)

_MOST_PAGES = 100  # of a list of tools
_CLOSING_S = 20.0  # a program is given half of it to end
_CLOSED = (
    -32000
)  # the SDK's code where a connection is gone; servers use it for their own errors, too
_CLOSED_TEXTS = ("Connection closed", "SSE stream")


class MCPClient:
    """A session with one server.

    Args:
        server: a URL, or how its program is called in messages.
        argv: the program; none: the server is at a URL.
        env: further environment variables of the program.
        headers: of requests to a URL, with their values.
        longest_s: that anything waits for an answer.
    Attributes:
        tools: as the server lists them.
        protocol: revision that both speak.
    """

    def __init__(
        self,
        server: str,
        *,
        argv: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        longest_s: float = 60.0,
    ) -> None:
        self.name = " ".join(argv) or server
        self.tools: tuple[Mapping[str, Any], ...] = ()
        self.protocol = ""
        self._server, self._argv, self._env = server, list(argv), dict(env or {})
        self._headers, self._longest_s = dict(headers or {}), longest_s
        self._secrets = secrets_of(self._headers)
        self._session: Any = None  # the SDK's client, while it is there
        self._process: ServerProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._is_doubtful = self._is_retired = False
        self._users = 0

    @property
    def is_open(self) -> bool:
        """Whether another episode may use it: its program runs, its server was there the last time."""
        is_there = self._session is not None and not self._has_ended
        return is_there and not self._is_doubtful and not self._closing.is_set()

    @property
    def _has_ended(self) -> bool:
        return self._process is not None and self._process.has_ended

    async def start(self, *, timeout_s: float) -> None:
        """Begins the session and lists the tools.

        Raises:
            ConfigError: the program can't be started.
            RolloutError, WaitTimeout: the server refuses, is gone, or takes too long.
        """
        pauses, busy = RetryPauses(timeout_s), ""
        mode = "legacy" if not self._argv and is_old(self._server) else "auto"
        while True:
            try:
                await self._begin(mode, pauses.ends_s, timeout_s)
                return
            except ServerBusy as error:
                busy = error.why
            except WaitTimeout as error:
                if busy and not isinstance(error, ServerAway):
                    raise self._away(busy) from error
                raise
            except RolloutError:
                # Programs of older revisions may end at a request before `initialize`
                if not self._has_ended:
                    raise
                await self._begin("legacy", pauses.ends_s, timeout_s)
                return
            if not await pauses.pause():
                raise self._away(busy)

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> ToolResult:
        """Calls a tool. One that takes too long or returns too much has failed, and so has a call that
        the server refuses.

        Raises:
            SessionLost: nothing was done; a new session can be asked.
            ServerAway, RolloutError: the server is away, or has ended.
        """
        self.add_user()
        try:
            return await self._called_in_time(name, arguments, timeout_s)
        finally:
            self.remove_user()

    def add_user(self) -> None:
        """Notes an episode, or a call, that uses the session, until it leaves."""
        self._users += 1

    def remove_user(self) -> None:
        """Notes that it is used no more; the last one ends a session that is retired."""
        self._users -= 1
        if self._is_retired and self._users <= 0:
            self._closing.set()

    def retire(self) -> asyncio.Task[None] | None:
        """Ends the session as soon as no episode uses it; returns the task that ends with it."""
        self._is_retired = True
        if self._users <= 0:
            self._closing.set()
        return self._task

    async def close(self) -> None:
        """Ends the session now, and the program."""
        self._closing.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_CLOSING_S)
            self._task.cancel()
            await asyncio.wait({self._task})

    # ---- the session -----------------------------------------------------------------------------

    async def _begin(self, mode: str, ends_s: float, timeout_s: float) -> None:
        """Begins the session in a task of its own, as the SDK wants to be left by who entered it."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(mode, ready), name=f"MCP {self.name}")
        self._task.add_done_callback(self._ended)
        try:
            async with asyncio.timeout_at(ends_s):
                await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException as error:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not isinstance(error, TimeoutError):
                raise
            raise WaitTimeout(
                f"it did not list its tools in {timeout_s:g} s",
                where=f"MCP server {self.name}",
                fix="raise task.env_args.start_timeout_s, or see the server's log",
            ) from error
        if not ready.done():
            await asyncio.wait({self._task})
            why = None if self._task.cancelled() else self._task.exception()
            raise self._refusal(why) from why

    async def _run(self, mode: str, ready: asyncio.Future[None]) -> None:
        """Holds the session until it is to be closed, or its program has ended."""
        us = Implementation(name="realsys", version=__version__)
        transport = self._transport()
        async with Client(transport, cache=None, mode=mode, client_info=us) as session:
            self.protocol = session.protocol_version
            self.tools = await _listed(session)
            self._session = session
            try:
                ready.set_result(None)
                await self._closing.wait()
            finally:
                self._session = None

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Notes why the session ended, if it was not to end."""
        if not task.cancelled() and (error := task.exception()) is not None:
            why = self._masked(repr(error))
            logger.info("session of MCP server ended server=%s why=%s", self.name, why)

    def _transport(self) -> Any:
        if not self._argv:
            longest_s = self._longest_s
            return http_transport(self._server, headers=self._headers, longest_s=longest_s)
        self._process = ServerProcess(self._argv, env=self._env)
        return self._process

    async def _called_in_time(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> ToolResult:
        """Calls a tool until it is answered."""
        pauses, busy = RetryPauses(timeout_s), ""
        while True:
            try:
                async with asyncio.timeout_at(pauses.ends_s):
                    return await self._called(name, arguments)
            except ServerBusy as error:
                busy = error.why
            except TimeoutError as error:
                if busy:
                    raise self._away(busy) from error
                return failed(f"the tool took more than {timeout_s:g} s")
            if not await pauses.pause():
                raise self._away(busy)

    async def _called(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Calls a tool once. Raises ServerBusy: it may be called again."""
        if self._session is None or self._has_ended:
            raise self._gone()
        try:
            result = await self._session.call_tool(name, dict(arguments))
        except MCPError as error:
            return self._failed(error)
        except ValidationError as error:
            return failed(
                self._masked(f"the tool's result can't be read: {error.errors()[0]['msg']}")
            )
        except RuntimeError as error:  # not as the tool's own schema has it, or it asks for input
            return failed(self._masked(str(error)))
        made = result_of(result.model_dump(by_alias=True, mode="json", exclude_none=True))
        return replace(made, text=self._masked(made.text)) if made.failed else made

    def _masked(self, text: str) -> str:
        """Returns a server's text without the keys that it may repeat."""
        return without_secrets(text, self._secrets)

    def _failed(self, error: MCPError) -> ToolResult:
        """Returns or raises what a call's error in the protocol means."""
        why = self._masked(str(error.message))
        match fault_of(error.data):
            case WireFault.UNREACHED | WireFault.BUSY:
                raise ServerBusy(why) from error
            case WireFault.BROKEN:
                raise self._away(why) from error
            case WireFault.LOST:
                self._is_doubtful = True
                raise SessionLost(
                    f"the MCP server knows the session no more: {why}",
                    where=f"MCP server {self.name}",
                    fix="see whether it was started anew; the episode is played again",
                ) from error
            case WireFault.DENIED | WireFault.NO_MCP:
                raise self._unusable(why) from error
            case WireFault.REFUSED | WireFault.TOO_LARGE:
                return failed(why)
        if error.code == _CLOSED and why.startswith(_CLOSED_TEXTS):
            if "failed" in why:  # an event over the limit
                return failed(too_large())
            if self._argv:
                raise self._gone() from error
            raise self._away(why) from error
        return failed(why[:500])

    # ---- errors ----------------------------------------------------------------------------------

    def _refusal(self, error: BaseException | None) -> Exception:
        """Returns what is raised where the session did not begin."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, OSError):
            return ConfigError(
                f"the MCP server can't be started: {error}",
                where=f"MCP server {self.name}",
                fix="correct task.env_args.servers",
            )
        if self._has_ended:
            return self._gone()
        if isinstance(error, MCPError):
            return self._refusal_of(fault_of(error.data), self._masked(str(error.message))[:500])
        if isinstance(error, httpx2.HTTPError):
            fault, why = raised_fault(error)
            return self._refusal_of(fault, self._masked(why))
        return RolloutError(
            self._masked(f"no session with the MCP server: {type(error).__name__}: {error}")[:500],
            where=f"MCP server {self.name}",
            fix="see whether it serves tools by the Model Context Protocol",
        )

    def _refusal_of(self, fault: WireFault | None, why: str) -> Exception:
        if fault is WireFault.BUSY:
            return ServerBusy(why)
        if fault in (WireFault.UNREACHED, WireFault.BROKEN):
            return self._away(why)
        if fault is not None:
            return self._unusable(why)
        return RolloutError(
            f"the MCP server refused a session: {why}",
            where=f"MCP server {self.name}",
            fix="see whether it serves tools by the Model Context Protocol",
        )

    def _away(self, why: str) -> ServerAway:
        self._is_doubtful = True  # the next episode begins a session of its own
        return ServerAway(f"the MCP server can't be used: {why}", **self._place())

    def _unusable(self, why: str) -> RolloutError:
        return RolloutError(f"the MCP server can't be used: {why}", **self._place())

    def _place(self) -> dict[str, str]:
        return {
            "where": f"MCP server {self.name}",
            "fix": "start it, or correct task.env_args: servers, headers; rollout workers must reach it",
        }

    def _gone(self) -> Exception:
        last = self._process.last_line() if self._process is not None else ""
        if not self._argv:
            return self._away("its session has ended")
        return RolloutError(
            "the MCP server has ended" + (f": {last}" if last else ""),
            where=f"MCP server {self.name}",
            fix="run its command by hand; all that it printed is in the rollout worker's log",
        )


async def _listed(session: Any) -> tuple[Mapping[str, Any], ...]:
    """Lists the tools of a server."""
    tools: list[Mapping[str, Any]] = []
    cursor: str | None = None
    for _ in range(_MOST_PAGES):
        page = await session.list_tools(cursor=cursor)
        tools += [t.model_dump(by_alias=True, mode="json", exclude_none=True) for t in page.tools]
        if not (cursor := page.next_cursor):
            break
    return tuple(tools)
