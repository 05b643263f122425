"""Do calls to MCP servers end as somebody has it who has not read our client? By hand; five minutes.

    python tests/by_hand/agents/outsider_mcp.py [--only TEXT]  writes results/outsider_mcp.json

Plays outsider/mcp.jsonl (OUTSIDER_CALLS.md) against scripted servers: programs (programs/scripted_mcp.py),
and HTTP in this process. Times of the table are shortened, limits of calls with them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(HERE)]
sys.path.insert(0, str(HERE / "programs"))

from by_hand import HandCheck  # noqa: E402
from outsider_tables import (  # noqa: E402
    Outcome,
    cases,
    failed,
    not_played,
    of_result,
    passed,
    tell,
)
from scripted_mcp import ADD, MODERN, answer, text_result  # noqa: E402

from realsys.api.errors import RealsysError  # noqa: E402
from realsys.rollout.environments import mcp_environment  # noqa: E402
from realsys.rollout.environments.mcp_environment import MCPEnvironment  # noqa: E402

SCRIPT = HERE / "programs" / "scripted_mcp.py"
RECORD = {"prompt": "What is 2+3?", "answer": "5"}
LIMIT_S = 45.0  # of a case with a revision
START_S, CALL_S = 20.0, 20.0
SHORT_S = 1.5  # limit of a call that is to take longer
KEY = "k-4711"


# ---- the one place that knows the environment ----------------------------------------------------

Make = Callable[..., Awaitable[MCPEnvironment]]


@asynccontextmanager
async def episodes() -> AsyncIterator[Make]:
    """Makes environments, which are reset, and closed at the end with what they share."""
    made: list[MCPEnvironment] = []

    async def make(**args: Any) -> MCPEnvironment:
        limits = {"start_timeout_s": START_S, "call_timeout_s": CALL_S}
        environment = MCPEnvironment(**{**limits, **args})
        made.append(environment)
        await environment.reset(RECORD)
        return environment

    try:
        yield make
    finally:
        for environment in made:
            with suppress(Exception):
                await environment.close()
        shared = getattr(mcp_environment, "_shared", {})
        sessions = shared.pop(asyncio.get_running_loop(), {})
        for done in await asyncio.gather(*sessions.values(), return_exceptions=True):
            if hasattr(done, "close"):
                with suppress(Exception):
                    await done.close()


class Wrong(Exception):
    """A case is otherwise than the table has it."""


async def called(
    environment: MCPEnvironment, name: str = "add", /, **arguments: Any
) -> tuple[str, bool]:
    """Calls a tool; returns what the policy is shown, and whether the call counts as failed."""
    before = _failed(environment)
    observation = await environment.call(name, arguments or {"a": 2, "b": 3})
    after = float(observation.info["failed_calls"])
    return observation.text, after > before


def _failed(environment: MCPEnvironment) -> float:
    return float(environment._info()["failed_calls"])


def want(holds: object, got: object) -> None:
    """Raises Wrong where something does not hold."""
    if not holds:
        raise Wrong(str(got)[:400])


def stdio(case: str, revision: str) -> str:
    """Returns the command line of a scripted server."""
    return shlex.join([sys.executable, str(SCRIPT), case, revision])


# ---- servers over HTTP ---------------------------------------------------------------------------

Reply = web.StreamResponse | None
Hook = Callable[["Server", web.Request, Mapping[str, Any]], Awaitable[Reply]]


async def _nothing(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
    return None


class Server:
    """A scripted server over HTTP; ``hook`` answers in its place unless it returns None."""

    def __init__(
        self, case: str, revision: str, hook: Hook = _nothing, *, sessions: bool = True
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
    await asyncio.sleep(LIMIT_S)
    return web.Response()


async def slow_bytes(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
    """A byte now and then."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    for _ in range(int(LIMIT_S / 0.2)):
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


# ---- cases ---------------------------------------------------------------------------------------


async def five(make: Make, servers: Any, **args: Any) -> MCPEnvironment:
    """Calls add(2, 3), which is 5."""
    environment = await make(servers=servers, **args)
    text, is_failed = await called(environment)
    want(text.strip() == "5" and not is_failed, f"{text[:200]!r}, failed {is_failed}")
    return environment


async def refused(make: Make, servers: Any, *words: str, **args: Any) -> None:
    """Wants the start to be refused in these words, in time."""
    try:
        await make(servers=servers, **args)
    except RealsysError as error:
        told = f"{error.what} {error.where} {error.fix}"
        want(all(word in told for word in words), f"is refused, without {words}: {told}")
        return
    raise Wrong("starts")


async def one_fails(make: Make, servers: Any, *words: str, **args: Any) -> None:
    """Wants a call to fail in these words, and the next one to work where the server is as before."""
    environment = await make(servers=servers, **args)
    text, is_failed = await called(environment)
    want(is_failed, f"{text[:200]!r}, failed {is_failed}")
    want(all(word in text for word in words), text)


async def shows(make: Make, servers: Any, *words: str, longest: int = 10_000) -> str:
    """Wants a result of these words."""
    environment = await make(servers=servers)
    text, is_failed = await called(environment)
    want(not is_failed, f"fails: {text[:200]!r}")
    want(all(word in text for word in words) and len(text) < longest, text)
    return text


async def or_again(body: Awaitable[Any]) -> None:
    """Also takes an error, at which the episode is played again."""
    with suppress(RealsysError):
        await body


async def play_stdio(name: str, revision: str, make: Make) -> None:
    """Plays a case of a program."""
    server = stdio(name, revision)
    match name:
        case "old/unknown_version":
            await refused(make, stdio(name, "2099-01-01"), "2099-01-01")
        case "list/pages":
            environment = await make(servers=server)
            want(len(environment.tools()) == 120, f"{len(environment.tools())} tools")
            want((await called(environment, "t119"))[0] == "5", "the last one can't be called")
        case "list/page_for_ever":
            with suppress(RealsysError):
                environment = await make(servers=server)
                want(len(environment.tools()) < 3, f"{len(environment.tools())} tools")
        case "list/none":
            await refused(make, server, "tool")
        case "list/schema_odd":
            environment = await make(servers=server)
            given = environment.tools()[0]["function"]["parameters"]
            want("$defs" in given and "anyOf" in given["properties"]["n"], given)
        case "list/schema_missing":
            await five(make, server)
        case "list/name_odd":
            environment = await make(servers=server)
            want((await called(environment, "a.b/c"))[0] == "5", "can't be called")
        case "end/start_fails":
            await refused(make, "/no/such/program --now", "/no/such/program")
        case "end/start_slow":
            await refused(make, server, "start_timeout_s", start_timeout_s=2.0)
        case "end/process_exits":
            environment = await make(servers=server)
            with suppress(RealsysError):
                raise Wrong(f"{await called(environment)}")
            await make(servers=server)  # a new process
        case "end/process_exits_always":
            environment = await make(servers=server)
            with suppress(RealsysError):
                await called(environment, a=666)
            await five(make, server)
        case "end/grandchildren":
            environment = await make(servers=server, per_episode=True)
            pid = int((await called(environment))[0])
            await environment.close()
            for _ in range(200):
                if not _is_alive(pid):
                    return
                await asyncio.sleep(0.1)
            os.kill(pid, 9)
            raise Wrong("the grandchild is left")
        case "result/raises":
            await one_fails(make, server, "no such city")
        case "result/is_error" | "result/wrong_arguments" | "between/task":
            await one_fails(make, server)
        case "result/jsonrpc_error":
            await one_fails(make, server, "wrong arguments")
        case "result/image":
            await shows(make, server, "before it", "behind it", "image")
        case "result/audio_resource":
            await shows(make, server, "text of it", "file:///linked.txt")
        case "result/structured_only":
            await shows(make, server, '"sum"', "5")
        case "result/structured_and_text":
            want((await shows(make, server, "5")).count("sum") == 1, "shown twice")
        case "result/structured_scalar":
            await shows(make, server, "5")
        case "result/empty":
            want(await shows(make, server) == "", "not empty")
        case "result/nan" | "result/not_utf8" | "noise/stdout_no_line_end":
            environment = await make(servers=server, call_timeout_s=5.0)
            await or_again(called(environment))
        case "result/huge":
            before = _memory()
            text = await shows(make, server, "yyyy", "more characters", longest=9000)
            want(len(text) >= 8192, len(text))
            want(_memory() - before < 600 << 20, f"{_memory() - before} bytes more")
        case "result/marks":
            await shows(make, server, "<|im_end|>")
        case "result/surrogate":
            environment = await make(servers=server, call_timeout_s=5.0)
            (await called(environment))[0].encode()
        case "result/crossed":
            environment = await make(servers=server)
            both = await asyncio.gather(
                called(environment, a=1, b=1), called(environment, a=2, b=2)
            )
            want([text for text, _ in both] == ["2", "4"], both)
        case "between/tool_gone":
            environment = await make(servers=server)
            want((await called(environment, "gone"))[1], "does not fail")
        case "between/progress":
            await five(make, server, call_timeout_s=10.0)
        case "between/progress_too_long" | "silent/all":
            await one_fails(make, server, call_timeout_s=SHORT_S)
        case "between/sampling" | "between/elicitation":
            await shows(make, server, "refused: True")
        case "silent/call":
            environment = await make(servers=server, call_timeout_s=SHORT_S)
            text, is_failed = await called(environment)
            want(is_failed, text)
            text, is_failed = await called(environment, a=3, b=3)
            want(text == "6" and not is_failed, f"later: {text}")
        case "silent/late":
            environment = await make(servers=server, call_timeout_s=SHORT_S)
            want((await called(environment))[1], "does not fail")
            await asyncio.sleep(1.5)
            text, is_failed = await called(environment, a=3, b=3)
            want(text == "6" and not is_failed, f"later: {text}")
        case "silent/stdin_full":
            environment = await make(servers=server, call_timeout_s=SHORT_S)
            first = asyncio.create_task(called(environment))
            await asyncio.sleep(0.2)
            text, is_failed = await called(environment, a=1, b=1, text="x" * 1_000_000)
            want(is_failed, text)
            await asyncio.wait([first])
        case "two_servers/same_tool":
            await refused(make, [server, stdio(name, "2024-11-05")], "add", "scripted_mcp")
        case "per_episode/state":
            await _states(make, server)
        case "per_episode/leak":
            await _leak(make, server)
        case "env/secret":
            os.environ["REALSYS_TEST_SECRET_KEY"] = KEY
            try:
                text = await shows(make, server)
            finally:
                del os.environ["REALSYS_TEST_SECRET_KEY"]
            want(KEY not in text, "a variable of the run is there")
        case _:
            environment = await five(make, server)
            if name.startswith("between/"):
                want((await called(environment, a=3, b=3))[0] == "6", "the next call is wrong")


async def _states(make: Make, server: str) -> None:
    async def episode() -> list[str]:
        environment = await make(servers=server, per_episode=True)
        return [(await called(environment))[0] for _ in range(3)]

    got = await asyncio.gather(*(episode() for _ in range(8)))
    want(got == [["1", "2", "3"]] * 8, got)


async def _leak(make: Make, server: str) -> None:
    def children() -> int:
        listed = Path("/proc").glob("[0-9]*/cmdline")
        count = 0
        for file in listed:
            with suppress(OSError):
                count += b"per_episode/leak" in file.read_bytes()
        return count

    async def episode(number: int) -> None:
        environment = await make(servers=server, per_episode=True)
        calling = asyncio.create_task(called(environment, a=number % 2, b=1))
        if number % 2:
            await asyncio.sleep(0.1)
            calling.cancel()
        await asyncio.wait([calling])
        await environment.close()

    for begin in range(0, 24, 4):  # the table has 500
        await asyncio.gather(*(episode(begin + i) for i in range(4)))
    for _ in range(100):
        if not children():
            return
        await asyncio.sleep(0.1)
    raise Wrong(f"{children()} processes are left")


def _memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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


async def play_http(name: str, revision: str, make: Make) -> None:
    """Plays a case of a server over HTTP."""
    if name.startswith("key/"):
        await play_key(name, revision, make)
        return
    if name in SPECIAL:
        await SPECIAL[name](name, revision, make)
        return
    async with Server(name, revision, HOOKS.get(name, _nothing)) as server:
        if name.startswith("status/"):
            await _four_calls(name, make, server)
        elif name == "result/huge_http":
            await shows(make, server.url, "yyyy", longest=9000)
        elif name.startswith("silent/"):
            await one_fails(make, server.url, call_timeout_s=SHORT_S)
        elif name == "end/http_mid_call":
            environment = await make(servers=server.url)
            await or_again(called(environment))
            want((await called(environment))[0] == "5", "the next call")
        elif name == "redirect/301":
            with suppress(RealsysError):
                await five(make, server.url)
        elif name == "new/input_required":
            await one_fails(make, server.url)
            want(server.num_calls < 5, f"{server.num_calls} calls")
        else:
            environment = await five(make, server.url, per_episode=True)
            await environment.close()
            if name == "old/session_id":
                want(server.ended == ["s1"], f"DELETE {server.ended}")
            if name == "new/discover":
                _look_at_modern(server)


def _look_at_modern(server: Server) -> None:
    headers = {k.lower(): v for k, v in server.heard[-1][1].items()}
    want(headers.get("mcp-protocol-version") == MODERN, headers)
    want(headers.get("mcp-method") == "tools/call" and headers.get("mcp-name") == "add", headers)


async def _four_calls(name: str, make: Make, server: Server) -> None:
    """Two episodes with two calls each, at the same time; the second call is marked."""
    first, second = await make(servers=server.url), await make(servers=server.url)
    results = await asyncio.gather(
        called(first), called(first, a=2, b=3, mark=1), called(second), called(second)
    )
    want(all(r == ("5", False) for i, r in enumerate(results) if i != 1), results)
    text, is_failed = results[1]
    status = name.partition("/")[2].split("_")[0]
    if name.endswith("_once"):
        ok = (text, is_failed) == ("5", False)
        want(ok or (status in ("500", "502") and "5" in text), results[1])
    else:
        want(is_failed and status in text, results[1])
        want(await called(first) == ("5", False), "the next call")
        want(server.begun <= 1, f"{server.begun} sessions")


async def _sse(name: str, revision: str, make: Make) -> None:
    async with Server(name, revision, old_post, sessions=False) as server:
        url = server.url.removesuffix("/mcp") + "/sse"
        if name == "end/sse_mid_call":
            environment = await make(servers=url, call_timeout_s=5.0)
            await or_again(called(environment))
        else:
            await five(make, url)


async def _unsupported(name: str, revision: str, make: Make) -> None:
    async def hook(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
        asked = request.headers.get("MCP-Protocol-Version")
        if message.get("method") == "initialize" or asked == "2025-11-25" or "id" not in message:
            return None
        error = {
            "code": -32022,
            "message": "Unsupported protocol version",
            "data": {"supported": ["2025-11-25"], "requested": asked},
        }
        said = {"jsonrpc": "2.0", "id": message["id"], "error": error}
        return web.json_response(said, status=400)

    async with Server(name, "2025-11-25", hook) as server:
        await five(make, server.url)


async def _version_header(name: str, revision: str, make: Make) -> None:
    async def hook(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
        given = request.headers.get("MCP-Protocol-Version")
        if message and message.get("method") != "initialize" and given != revision:
            return web.Response(status=400, text="no version")
        return None

    async with Server(name, revision, hook) as server:
        await five(make, server.url)


async def _initialized_slow(name: str, revision: str, make: Make) -> None:
    async def hook(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
        method = message.get("method")
        if method == "notifications/initialized":
            await asyncio.sleep(1.5)
            server.done = True  # type: ignore[attr-defined]
        elif message and method != "initialize" and not getattr(server, "done", False):
            error = {"code": -32600, "message": "not initialized"}
            return web.json_response(
                {"jsonrpc": "2.0", "id": message.get("id"), "error": error}
            )
        return None

    async with Server(name, revision, hook) as server:
        await five(make, server.url)


async def _loop(name: str, revision: str, make: Make) -> None:
    async with Server(name, revision, redirects(307, "/mcp")) as server:
        began_s = time.monotonic()
        await refused(make, server.url)
        want(time.monotonic() - began_s < 20, "takes long")


async def _html(name: str, revision: str, make: Make) -> None:
    async def hook(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
        return web.Response(text="<html>log in</html>", content_type="text/html")

    async with Server(name, revision, hook) as server:
        await refused(make, server.url, "text/html")


async def _accepted(name: str, revision: str, make: Make) -> None:
    async def reply(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
        return web.Response(status=202)

    async with Server(name, revision, on_call(reply)) as server:
        await one_fails(make, server.url, call_timeout_s=5.0)


async def _forgotten(name: str, revision: str, make: Make) -> None:
    per_episode = name.endswith("per_episode")
    async with Server(name, revision) as server:
        num = 3 if name.endswith("shared") else 1
        environments = [
            await make(servers=server.url, per_episode=per_episode) for _ in range(num)
        ]
        await called(environments[0])
        server.sessions.clear()
        if per_episode:
            try:
                got = await called(environments[0])
            except RealsysError:
                return
            raise Wrong(f"goes on: {got}")
        results = await asyncio.gather(*(called(e) for e in environments))
        want(all(r == ("5", False) for r in results), results)
        want(server.begun == 2, f"{server.begun} sessions")


async def _minute(name: str, revision: str, make: Make) -> None:
    async def reply(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
        return web.Response(status=503) if server.num_calls <= 3 else None

    async with Server(name, revision, on_call(reply)) as server:
        environment = await make(servers=server.url)
        for _ in range(4):
            try:
                want(await called(environment) == ("5", False), "the outage is a result")
                return
            except RealsysError:
                continue
        raise Wrong("never well")


async def _restart(name: str, revision: str, make: Make) -> None:
    server = Server(name, revision)
    async with server:
        environment = await make(servers=server.url)
        await called(environment)
    server.sessions.clear()

    async def back() -> None:
        await asyncio.sleep(1.5)
        await server.__aenter__()

    coming = asyncio.create_task(back())
    try:
        for _ in range(5):
            try:
                environment = await five(make, server.url)
                return
            except RealsysError:
                await asyncio.sleep(1)
        raise Wrong("never well")
    finally:
        await coming
        await server.__aexit__()


async def _mixed(name: str, revision: str, make: Make) -> None:
    async def hook(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
        said = answer(message, name, MODERN)
        if message.get("method") != "tools/list" or said is None:
            return None
        said["result"]["tools"] = [{**ADD, "name": "plus"}]
        return web.json_response(said)

    async with Server(name, MODERN, hook) as server:
        environment = await five(make, [stdio(name, "2024-11-05"), server.url])
        want((await called(environment, "plus"))[0] == "5", "the newest one")


async def _one_away(name: str, revision: str, make: Make) -> None:
    async def hook(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
        said = answer(message, name, revision)
        if message.get("method") != "tools/list" or said is None:
            return None
        said["result"]["tools"] = [{**ADD, "name": "plus"}]
        return web.json_response(said)

    async with Server(name, revision) as first:
        async with Server(name, revision, hook) as second:
            environment = await make(servers=[first.url, second.url])
        want((await called(environment))[0] == "5", "the first one")


async def _no_proxy(name: str, revision: str, make: Make) -> None:
    names = ("HTTP_PROXY", "http_proxy")
    kept = {n: os.environ.get(n) for n in (*names, "NO_PROXY", "no_proxy")}
    for n in kept:
        os.environ.pop(n, None)
    for n in names:
        os.environ[n] = "http://127.0.0.1:9"
    try:
        async with Server(name, revision) as server:
            await five(make, server.url)
    finally:
        for n, value in kept.items():
            os.environ.pop(n, None)
            if value is not None:
                os.environ[n] = value


SPECIAL: dict[str, Callable[[str, str, Make], Awaitable[None]]] = {
    "plain/sse/2024-11-05": _sse,
    "end/sse_mid_call": _sse,
    "new/unsupported_version": _unsupported,
    "old/version_header": _version_header,
    "old/initialized_slow": _initialized_slow,
    "redirect/loop": _loop,
    "status/200_html": _html,
    "status/202_to_call": _accepted,
    "status/404_session": _forgotten,
    "status/404_session_shared": _forgotten,
    "status/404_per_episode": _forgotten,
    "status/503_minute": _minute,
    "end/restart": _restart,
    "two_servers/mixed": _mixed,
    "two_servers/one_away": _one_away,
    "local/no_proxy": _no_proxy,
}


async def play_key(name: str, revision: str, make: Make) -> None:
    """Plays a case of a server that wants a key."""
    bearer = {"Authorization": "Bearer env:OUTSIDER_MCP_KEY"}
    hook = needs("Authorization", f"Bearer {KEY}")
    match name:
        case "key/missing":
            async with Server(name, revision, hook) as server:
                await refused(make, server.url, "401", "headers")
        case "key/custom":
            async with Server(name, revision, needs("X-API-Key", KEY)) as server:
                with _with_key():
                    await five(make, server.url, headers={"X-API-Key": "env:OUTSIDER_MCP_KEY"})
        case "key/bearer":
            async with Server(name, revision, hook) as server:
                with _with_key():
                    await five(make, server.url, headers=bearer)
        case "key/wrong_later":
            async with Server(name, revision, with_status(401, always=True)) as server:
                environment = await make(servers=server.url)
                try:
                    text, is_failed = await called(environment, a=2, b=3, mark=1)
                except RealsysError:
                    return
                want(is_failed and "401" in text, text)
        case "key/per_server":
            await _two_keys(name, revision, make)
        case "key/redirect_leaks":
            async with Server(name, revision) as other:
                there = redirects(307, other.url.replace("127.0.0.1", "localhost"))
                async with Server(name, revision, there) as server:
                    with _with_key():
                        await refused(make, server.url, "127.0.0.1", "localhost", headers=bearer)
                want(not any(KEY in str(h) for _, h in other.heard), "the other host has the key")


async def _two_keys(name: str, revision: str, make: Make) -> None:
    async def renamed(server: Server, request: web.Request, message: Mapping[str, Any]) -> Reply:
        said = answer(message, name, revision)
        if message.get("method") != "tools/list" or said is None:
            return None
        said["result"]["tools"] = [{**ADD, "name": "plus"}]
        return web.json_response(said)

    async with Server(name, revision) as first, Server(name, revision, renamed) as second:
        headers = {
            first.url: {"Authorization": "Bearer env:OUTSIDER_MCP_KEY"},
            second.url: {"X-Key": "env:OUTSIDER_MCP_OTHER"},
        }
        with _with_key():
            environment = await five(make, [first.url, second.url], headers=headers)
            want((await called(environment, "plus"))[0] == "5", "the second one")
        want(all(KEY in str(h) and "other-key" not in str(h) for _, h in first.heard), "keys")
        want(all("other-key" in str(h) and KEY not in str(h) for _, h in second.heard), "keys")


@contextmanager
def _with_key() -> Iterator[None]:
    os.environ |= {"OUTSIDER_MCP_KEY": KEY, "OUTSIDER_MCP_OTHER": "other-key"}
    try:
        yield
    finally:
        del os.environ["OUTSIDER_MCP_KEY"], os.environ["OUTSIDER_MCP_OTHER"]


NOT_PLAYED = {
    "result/unknown_tool": "calls of tools that were not offered are the agent's, not the environment's",
    "local/tls": "needs a certificate of an own authority",
}


async def one_revision(case: dict[str, Any], revision: str) -> None:
    """Plays a case with one revision."""
    over_http = case["transport"] in ("streamable_http", "sse") or case["id"] in SPECIAL
    async with episodes() as make:
        play = play_http if over_http else play_stdio
        await asyncio.wait_for(play(case["id"], revision, make), LIMIT_S)


def played(case: dict[str, Any]) -> Outcome:
    """Plays a case with all its revisions, each in an event loop of its own."""
    group = case["id"].split("/")[0]
    if case["id"] in NOT_PLAYED:
        return not_played(case, NOT_PLAYED[case["id"]], group=group)
    wrong: dict[str, str] = {}
    revisions = case["revisions"] if case["id"] != "two_servers/mixed" else [MODERN]
    for revision in revisions:
        try:
            asyncio.run(one_revision(case, revision))
        except Wrong as error:
            wrong[revision] = str(error)
        except TimeoutError:
            wrong[revision] = f"takes more than {LIMIT_S:.0f} s"
        except Exception as error:  # each case is told by itself
            wrong[revision] = f"raises {type(error).__name__}: {error}"[:300]
    if not wrong:
        return passed(case, group=group)
    return failed(case, wrong, group=group)


def main() -> int:
    """Returns 0 if all cases are as the table has them, or judged."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases with this in their id; writes no result")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    check = HandCheck(__file__)
    told = tell("mcp", [played(c) for c in cases("mcp") if options.only in c["id"]])
    if options.only:
        return 0
    return check.write(
        "calls to MCP servers as an outsider wrote them down", told.problems, mcp=of_result(told)
    )


if __name__ == "__main__":
    sys.exit(main())
