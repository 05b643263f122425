"""Client of one MCP server: initialize, tools/list, tools/call, over a connection (mcp_connections.py).

Model Context Protocol, https://modelcontextprotocol.io/specification; JSON-RPC 2.0.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from realsys.api.errors import RolloutError, WaitTimeout

PROTOCOL = "2025-06-18"
_MOST_PAGES = 100  # of a list of tools


class ReplyTooLarge(RolloutError):
    """A server's reply is larger than what is read; the server can be asked again."""


class ServerAway(WaitTimeout):
    """A server can't be reached, or is overloaded: the policy can do nothing about it."""


class MCPConnection(Protocol):
    """Carries messages to one server."""

    @property
    def name(self) -> str: ...

    @property
    def is_open(self) -> bool: ...

    async def request(self, message: Mapping[str, Any], *, timeout_s: float) -> Mapping[str, Any]:
        """Sends a request and returns the response with its id.

        Raises:
            WaitTimeout: none came in time. ReplyTooLarge: it is not read to its end.
            ServerAway, RolloutError: the server is away; it has ended, or speaks no MCP.
        """
        ...

    async def notify(self, message: Mapping[str, Any]) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What a call came to. ``failed``: the tool, or the server on its behalf, says so in ``text``."""

    text: str
    failed: bool = False


class MCPClient:
    """A session with one server."""

    def __init__(self, connection: MCPConnection) -> None:
        self.connection = connection
        self.tools: tuple[Mapping[str, Any], ...] = ()  # as the server lists them
        self._ids = itertools.count(1)

    async def start(self, *, timeout_s: float) -> None:
        """Begins the session and lists the tools.

        Raises:
            RolloutError, WaitTimeout: the server refuses, is gone, or takes too long.
        """
        client = {"name": "realsys", "version": "1"}
        hello = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}
        await self._result("initialize", hello, timeout_s)
        await self.connection.notify({"jsonrpc": "2.0", "method": "notifications/initialized"})
        tools: list[Mapping[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(_MOST_PAGES):
            page = await self._result("tools/list", cursor, timeout_s)
            tools += page.get("tools") or ()
            if not page.get("nextCursor"):
                break
            cursor = {"cursor": page["nextCursor"]}
        self.tools = tuple(tools)

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> ToolResult:
        """Calls a tool. One that takes too long or returns too much has failed, and so has a call that
        the server refuses.

        Raises:
            ServerAway, RolloutError: the server is away, or has ended.
        """
        params = {"name": name, "arguments": dict(arguments)}
        message = self._message("tools/call", params)
        try:
            response = await self.connection.request(message, timeout_s=timeout_s)
        except ReplyTooLarge as error:
            return ToolResult(text=f"Error: {error.what}", failed=True)
        except ServerAway:
            raise
        except WaitTimeout:
            reason = {"requestId": message["id"], "reason": "it took too long"}
            cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": reason}
            await self.connection.notify(cancelled)
            return ToolResult(text=f"Error: the tool took more than {timeout_s:g} s", failed=True)
        if "error" in response:
            return ToolResult(text=f"Error: {_error_text(response)}", failed=True)
        return result_of(response.get("result"))

    async def close(self) -> None:
        """Ends the session."""
        await self.connection.close()

    async def _result(
        self, method: str, params: Mapping[str, Any], timeout_s: float
    ) -> Mapping[str, Any]:
        response = await self.connection.request(self._message(method, params), timeout_s=timeout_s)
        result = response.get("result")
        if "error" in response or not isinstance(result, Mapping):
            raise RolloutError(
                f"the MCP server refused {method}: {_error_text(response)}",
                where=f"MCP server {self.connection.name}",
                fix="see whether it serves tools by the Model Context Protocol",
            )
        return result

    def _message(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": dict(params)}


# ---- Values (pure) ---------------------------------------------------------------------------------


def result_of(result: Any) -> ToolResult:
    """Returns the texts of a result's content; other content by its kind, structured content as JSON."""
    fields = result if isinstance(result, Mapping) else {}
    parts = [
        str(part["text"]) if part.get("type") == "text" else f"[{part.get('type')}]"
        for part in fields.get("content") or ()
        if isinstance(part, Mapping)
    ]
    if not parts and fields.get("structuredContent") is not None:
        parts = [json.dumps(fields["structuredContent"], ensure_ascii=False)]
    return ToolResult(text="\n".join(parts), failed=bool(fields.get("isError")))


def function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a listed tool in the form of Chat Completions."""
    function = {
        "name": str(tool["name"]),
        "description": str(tool.get("description") or ""),
        "parameters": tool.get("inputSchema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _error_text(response: Mapping[str, Any]) -> str:
    error = response.get("error")
    if isinstance(error, Mapping):
        return str(error.get("message") or error)[:500]
    return str(error or response)[:500]
