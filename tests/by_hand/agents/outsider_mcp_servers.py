"""Servers of the Model Context Protocol over HTTP with faults to order, for outsider_mcp.py.

A hook answers a request in the server's place, unless it returns None.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from scripted_mcp import MODERN, answer

LONGEST_S = 45.0  # that a server is silent

Reply = web.StreamResponse | None
Hook = Callable[["Server", web.Request, Mapping[str, Any]], Awaitable[Reply]]


async def nothing(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
    """Leaves a request to the server."""
    return None


class Server:
    """A scripted server over HTTP; ``hook`` answers in its place unless it returns None."""

    def __init__(
        self, case: str, revision: str, hook: Hook = nothing, *, sessions: bool = True
    ) -> None:
        self.case, self.revision, self.hook = case, revision, hook
        self.sessions: set[str] = set()
        self._has_sessions = sessions and revision != MODERN
        self.begun, self.port, self.num_calls = 0, 0, 0
        self.heard: list[tuple[str, dict[str, str]]] = []
        self.ended: list[str] = []
        self.streams: list[asyncio.Queue[str | None]] = []

    async def __aenter__(self) -> Server:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/sse", self._old_stream)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self.streams:
            stream.put_nowait(None)
        await self._runner.cleanup()

    def methods(self) -> list[str]:
        """The methods of all messages."""
        return [method for method, _ in self.heard]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "DELETE":
            self.ended.append(request.headers.get("Mcp-Session-Id", ""))
            return web.Response(status=405 if self.case == "old/delete_405" else 200)
        if request.method == "GET":
            reply = await self.hook(self, request, {})
            return reply if reply is not None else web.Response(status=405)
        message = json.loads(await request.read())
        self.heard.append((str(message.get("method")), dict(request.headers)))
        if message.get("method") == "tools/call":
            self.num_calls += 1
        if (reply := await self.hook(self, request, message)) is not None:
            return reply
        session = request.headers.get("Mcp-Session-Id", "")
        if self._has_sessions and message.get("method") != "initialize":
            if not session:
                return web.Response(status=400, text="Bad Request: Server not initialized")
            if session not in self.sessions:
                return web.Response(status=404, text="no such session")
        return self.well(message)

    def well(self, message: Mapping[str, Any]) -> web.Response:
        """Answers as a server should."""
        said = answer(message, self.case, self.revision)
        if said is None:
            return web.Response(status=202)
        headers = {}
        if message["method"] == "initialize" and "result" in said and self._has_sessions:
            self.begun += 1
            headers["Mcp-Session-Id"] = f"s{self.begun}"
            self.sessions.add(f"s{self.begun}")
        return web.Response(
            body=json.dumps(said).encode(), headers=headers, content_type="application/json"
        )

    async def _old_stream(self, request: web.Request) -> web.StreamResponse:
        """The transport of before: a stream, and an address for messages."""
        if request.method != "GET":
            return web.Response(status=405)
        stream: asyncio.Queue[str | None] = asyncio.Queue()
        self.streams.append(stream)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        number = len(self.streams) - 1
        await response.write(f"event: endpoint\ndata: /messages?to={number}\n\n".encode())
        while (text := await stream.get()) is not None:
            await response.write(f"event: message\ndata: {text}\n\n".encode())
        assert request.transport is not None
        request.transport.close()
        return response


async def old_post(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
    """Answers on the stream; in one case closes it."""
    if request.path != "/messages":
        return web.Response(status=404)
    stream = server.streams[int(request.query["to"])]
    if server.case == "end/sse_mid_call" and message.get("method") == "tools/call":
        stream.put_nowait(None)
    elif (said := answer(message, server.case, server.revision)) is not None:
        stream.put_nowait(json.dumps(said))
    return web.Response(status=202, text="Accepted")


def on_call(reply: Callable[[Server, web.Request, Mapping[str, Any]], Awaitable[Reply]]) -> Hook:
    """Returns a hook for calls of tools alone."""

    async def hook(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
        if message.get("method") != "tools/call":
            return None
        return await reply(server, request, message)

    return hook


def _said(server: Server, message: Mapping[str, Any]) -> str:
    return json.dumps(answer(message, server.case, server.revision))


def _stream_of(text: str) -> web.Response:
    return web.Response(body=text.encode(), content_type="text/event-stream")


async def as_stream(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
    """Progress, then the response."""
    token = (message["params"].get("_meta") or {}).get("progressToken", 1)
    progress = [
        json.dumps(
            {
                "jsonrpc": "2.0",
                "method": "notifications/progress",
                "params": {"progressToken": token, "progress": i},
            }
        )
        for i in (1, 2)
    ]
    lines = [": a comment", *(f"event: message\ndata: {p}\n" for p in progress)]
    return _stream_of("\n".join([*lines, f"event: message\ndata: {_said(server, message)}\n\n"]))


async def lines_three(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
    """Data over three lines, CRLF, a byte order mark."""
    said = answer(message, server.case, server.revision)
    data = json.dumps(said, indent=1).split("\n")
    rows = [data[0], " ".join(data[1:-1]), data[-1]]
    return _stream_of("\ufeff" + "".join(f"data: {row}\r\n" for row in rows) + "\r\n")


async def in_array(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
    """A notification and the response in one array."""
    note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info"}}
    note["params"]["data"] = "x"  # type: ignore[index]
    return web.json_response([note, json.loads(_said(server, message))])


async def huge_stream(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
    """50 MB in an event."""
    return _stream_of(f"event: message\ndata: {_said(server, message)}\n\n")


async def half_body(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
    """Closes the connection in the first call's body."""
    if server.num_calls > 1:
        return None
    response = web.StreamResponse(
        headers={"Content-Type": "application/json", "Content-Length": "500"}
    )
    await response.prepare(request)
    await response.write(b'{"jsonrpc": "2.0", "res')
    assert request.transport is not None
    request.transport.close()
    return response


async def resumed(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
    """Closes a call's stream behind an event with an id; GET with that id has the result."""
    if request.method == "GET":
        if "Last-Event-ID" not in request.headers:
            return web.Response(status=405)
        kept = getattr(server, "kept", "")
        return _stream_of(f"id: e2\nevent: message\ndata: {kept}\n\n")
    if message.get("method") != "tools/call":
        return None
    server.kept = _said(server, message)  # type: ignore[attr-defined]
    return _stream_of("id: e1\nretry: 100\ndata: \n\n")


async def never(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
    """Sends nothing."""
    await asyncio.sleep(LONGEST_S)
    return web.Response()


async def slow_bytes(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
    """A byte now and then."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    for _ in range(int(LONGEST_S / 0.2)):
        await response.write(b" ")
        await asyncio.sleep(0.2)
    return response


def with_status(status: int, *, always: bool = False, **headers: str) -> Hook:
    """Gives the second call a status, once or whenever its arguments come."""

    async def reply(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
        is_it = message["params"]["arguments"].get("mark") == 1
        if is_it and (always or not getattr(server, "done", False)):
            server.done = True  # type: ignore[attr-defined]
            return web.json_response({"error": "too large"}, status=status, headers=headers)
        return None

    return on_call(reply)


def needs(name: str, value: str) -> Hook:
    """Answers 401 without a header."""

    async def hook(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
        if request.headers.get(name) == value:
            return None
        return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})

    return hook


def redirects(status: int, to: str) -> Hook:
    """Redirects from /mcp."""

    async def hook(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
        if request.path == "/mcp":
            return web.Response(status=status, headers={"Location": to})
        return None

    return hook


HOOKS: dict[str, Hook] = {
    "http/answer_as_stream": on_call(as_stream),
    "http/stream_without_ids": on_call(lines_three),
    "old/batch": on_call(in_array),
    "redirect/same_host": redirects(307, "/mcp/"),
    "redirect/301": redirects(301, "/mcp/"),
    "status/429_once": with_status(429, **{"Retry-After": "1"}),
    **{f"status/{s}_once": with_status(s) for s in (500, 502, 503)},
    **{f"status/{s}": with_status(s, always=True) for s in (400, 403, 413, 422)},
    "status/500_always": with_status(500, always=True),
    "result/huge_http": on_call(huge_stream),
    "end/http_mid_call": on_call(half_body),
    "end/stream_resumes": resumed,
    "silent/call_http": on_call(never),
    "silent/slow_bytes": on_call(slow_bytes),
}
