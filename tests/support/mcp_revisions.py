"""A server of one tool that speaks one revision of the Model Context Protocol, by hand, and no other.

python mcp_revisions.py REVISION [TOOL …]   speaks on stdin and stdout; further tools: process, leave
``RevisionServer``                      over HTTP, within a test's event loop

The tool ``add`` returns the sum of ``a`` and ``b``; with ``"fail": true`` it fails, with
``"odd": true`` its result is none. ``process`` names the process and a variable of its environment,
``leave`` ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

MODERN = "2026-07-28"
REVISIONS = ("2025-06-18", "2025-11-25", MODERN)
TOOL = {
    "name": "add",
    "description": "Adds.",
    "inputSchema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def answer(
    asked: Mapping[str, Any], revision: str, tools: Sequence[str] = ("add",)
) -> dict[str, Any] | None:
    """Returns what such a server answers; None: nothing."""
    if "id" not in asked or "method" not in asked:
        return None
    method, params, is_modern = asked["method"], asked.get("params", {}), revision == MODERN
    more = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"} if is_modern else {}
    server = {"capabilities": {"tools": {}}, "serverInfo": {"name": "sums", "version": "1"}}
    made: dict[str, Any]
    match method:
        case "server/discover" if is_modern:
            made = {"result": {**more, **server, "supportedVersions": [revision]}}
        case "initialize" if not is_modern:
            made = {"result": {**server, "protocolVersion": revision}}
        case "initialize":
            supported = {"supported": [revision], "requested": "?"}
            made = {"error": {"code": -32022, "message": "other revision", "data": supported}}
        case "tools/list":
            made = {"result": {**more, "tools": [{**TOOL, "name": name} for name in tools]}}
        case "tools/call":
            given = params["arguments"]
            text = str(given.get("a", 0) + given.get("b", 0))
            if params["name"] == "process":
                text = f"{os.getpid()} {os.environ.get('MCP_TEST_VALUE', '')}"
            elif params["name"] == "leave":
                os._exit(3)
            content: list[dict[str, Any]] = [{"type": "text", "text": text}]
            if given.get("odd"):
                content = [{"type": "odd"}]
            more.pop("ttlMs", None), more.pop("cacheScope", None)
            made = {"result": {**more, "content": content, "isError": bool(given.get("fail"))}}
        case _:
            made = {"error": {"code": -32601, "message": f"no method {method}"}}
    return {"jsonrpc": "2.0", "id": asked["id"], **made}


Reply = tuple[int, str]  # status and text
OnCall = Callable[[Mapping[str, Any]], Awaitable[Reply | None]]


class RevisionServer:
    """Such a server over HTTP, on a free port of this machine.

    Args:
        on_call: looks at a call's arguments, and answers in the server's place, unless it returns None.
        on_request: the same of every message, from its headers.
    Attributes:
        asked: (method, headers) of all messages.
        sessions: that were begun, and that the server still knows.
        held: method → event, before which none of its messages is answered.
    """

    def __init__(
        self,
        revision: str = "2025-11-25",
        *,
        on_call: OnCall | None = None,
        on_request: Callable[[Mapping[str, str]], Reply | None] = lambda _: None,
    ) -> None:
        self.revision, self.on_call, self.on_request = revision, on_call, on_request
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        self.begun = 0
        self.sessions: set[str] = set()
        self.ended: list[str] = []
        self.held: dict[str, asyncio.Event] = {}

    async def __aenter__(self) -> RevisionServer:
        from aiohttp import web

        app = web.Application()
        app.router.add_route("*", "/mcp", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/mcp"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()

    def methods(self, name: str) -> list[Mapping[str, str]]:
        """Headers of the messages of one method."""
        return [headers for method, headers in self.asked if method == name]

    async def _handle(self, request: Any) -> Any:
        from aiohttp import web

        session = request.headers.get("Mcp-Session-Id", "")
        if request.method == "DELETE":
            self.ended.append(session)
            return web.Response()
        if request.method != "POST":
            return web.Response(status=405)
        message = json.loads(await request.read())
        self.asked.append((message.get("method", ""), request.headers.copy()))
        if (goes_on := self.held.get(message.get("method", ""))) is not None:
            await goes_on.wait()
        reply = self.on_request(request.headers)
        if reply is None and session and session not in self.sessions:
            reply = (404, "no such session")
        if reply is None and message.get("method") == "tools/call" and self.on_call is not None:
            reply = await self.on_call(message["params"]["arguments"])
        if reply is not None:
            if not reply[0]:
                request.transport.abort()
            return web.Response(status=reply[0] or 500, text=reply[1])
        answered = answer(message, self.revision)
        if answered is None:
            return web.Response(status=202)
        headers = {}
        if message["method"] == "initialize" and "result" in answered:
            self.begun += 1
            headers["Mcp-Session-Id"] = f"s{self.begun}"
            self.sessions.add(f"s{self.begun}")
        return web.json_response(answered, headers=headers)


async def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds, of what other tasks of this event loop do."""
    async with asyncio.timeout(240):
        while not holds():
            await asyncio.sleep(0)


if __name__ == "__main__":
    for line in sys.stdin:
        if (said := answer(json.loads(line), sys.argv[1], ["add", *sys.argv[2:]])) is not None:
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
