"""Environment ``mcp`` over HTTP: redirects, odd answers, the old transport; by a wire of this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from mcp_revisions import answer

from realsys.api.errors import RolloutError, WaitTimeout
from realsys.rollout.environments import mcp_http
from realsys.rollout.environments.mcp_environment import MCPEnvironment
from realsys.rollout.environments.mcp_results import ServerAway

RECORD = {"prompt": "What is 2+3?", "answer": "5"}
KEY = "k-4711"
Handler = Callable[[Any, dict[str, Any]], Awaitable[Any]]


@asynccontextmanager
async def episode(
    monkeypatch: pytest.MonkeyPatch,
    handler: Handler,
    *,
    url: str = "http://server/mcp",
    key: str = KEY,
    scheme: str = "",
    **limits: float,
) -> AsyncIterator[MCPEnvironment]:
    """An episode with a server that is a function, asked with a key."""

    async def answered(request: Any) -> Any:
        return await handler(request, json.loads(await request.aread() or b"{}"))

    monkeypatch.setenv("MCP_TEST_KEY", key)
    monkeypatch.setattr(
        mcp_http.httpx2, "AsyncHTTPTransport", lambda **_: httpx2.MockTransport(answered)
    )
    headers = {"X-Key": f"{scheme}env:MCP_TEST_KEY"}
    environment = MCPEnvironment(servers=url, headers=headers, per_episode=True, **limits)
    try:
        await environment.reset(RECORD)
        yield environment
    finally:
        await environment.close()


def well(message: dict[str, Any]) -> Any:
    """What a server answers to a message."""
    said = answer(message, "2025-06-18")
    return httpx2.Response(202) if said is None else httpx2.Response(200, json=said)


@pytest.mark.parametrize(
    "to", ["/mcp/", "http://server/mcp/", "http://other/mcp", "http://server:8/mcp"]
)
def test_a_redirect_is_followed_with_the_key_at_its_own_origin_only(monkeypatch, to) -> None:
    asked: list[tuple[str, str]] = []

    async def handler(request: Any, message: dict[str, Any]) -> Any:
        if str(request.url) == "http://server/mcp":
            return httpx2.Response(307, headers={"Location": to})
        assert request.headers["X-Key"] == KEY
        asked.append((str(request.url), message.get("method", "")))
        return well(message)

    async def body() -> str:
        async with episode(monkeypatch, handler) as environment:
            return (await environment.call("add", {"a": 2, "b": 3})).text

    if to.endswith("/"):
        assert asyncio.run(body()) == "5"
        assert {url for url, _ in asked} == {"http://server/mcp/"}
        assert "notifications/initialized" in [method for _, method in asked]
    else:
        with pytest.raises(RolloutError) as caught:
            asyncio.run(body())
        assert to in caught.value.what
        assert asked == []


def test_a_page_is_no_server_and_is_named_by_its_type(monkeypatch) -> None:
    async def handler(request: Any, message: dict[str, Any]) -> Any:
        return httpx2.Response(200, html="<html>log in</html>")

    async def body() -> None:
        async with episode(monkeypatch, handler):
            pass

    with pytest.raises(RolloutError, match="text/html"):
        asyncio.run(body())


@pytest.mark.parametrize("method", ["tools/call", "initialize", "tools/list"])
@pytest.mark.parametrize("status", [200, 400, 401, 503])
@pytest.mark.parametrize(("key", "scheme"), [(KEY, ""), (KEY, "Bearer "), ('of "two" words', "")])
def test_a_key_that_a_server_repeats_in_an_error_is_shown_to_nobody(
    monkeypatch, method, status, key, scheme
) -> None:
    async def handler(request: Any, message: dict[str, Any]) -> Any:
        if message.get("method") != method:
            return well(message)
        sent = request.headers["X-Key"]
        error = {"code": -32001, "message": f"quota: {sent}, {key}"}
        return httpx2.Response(status, json={"jsonrpc": "2.0", "id": message["id"], "error": error})

    told: list[str] = []

    async def body() -> None:
        limits = {"call_timeout_s": 0.2, "start_timeout_s": 0.2} if status == 503 else {}
        try:
            opened = episode(monkeypatch, handler, key=key, scheme=scheme, **limits)
            async with opened as environment:
                told.append((await environment.call("add", {"a": 2, "b": 3})).text)
        except (RolloutError, WaitTimeout) as error:
            told.append(str(error))

    asyncio.run(body())
    assert "quota" in told[0]
    assert not [text for text in told if key in text or key.replace('"', '\\"') in text]


MARK = "\ufeff"


def _in_lines(said: Any) -> str:
    rows = json.dumps(said, indent=1).split("\n")
    return MARK + "".join(f"data: {row}\r\n" for row in rows) + "\r\n"


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (lambda said: ("text/event-stream", 200, _in_lines(said)), ("5", 0.0)),
        (lambda said: ("application/json", 200, MARK + json.dumps(said)), ("5", 0.0)),
        (lambda said: ("text/plain", 202, ""), ("", 1.0)),
        (lambda said: ("text/plain", 204, ""), ("", 1.0)),
    ],
    ids=["events with a mark", "JSON with a mark", "accepted", "no content"],
)
def test_what_an_odd_answer_of_a_call_comes_to(monkeypatch, reply, result) -> None:
    async def handler(request: Any, message: dict[str, Any]) -> Any:
        if message.get("method") != "tools/call":
            return well(message)
        kind, status, text = reply(answer(message, "2025-06-18"))
        return httpx2.Response(status, headers={"Content-Type": kind}, content=text.encode())

    async def body() -> None:
        async with episode(monkeypatch, handler) as environment:
            made = await environment.call("add", {"a": 2, "b": 3})
            failed = made.info["failed_calls"]
            assert ("" if failed else made.text, failed) == result

    asyncio.run(body())


class OldServer:
    """A server of the transport of 2024-11-05: answers come on a stream. ``refuses``: a call's status."""

    def __init__(self, *, stream_status: int = 200) -> None:
        self.events: asyncio.Queue[str] = asyncio.Queue()
        self.methods: list[str] = []
        self.refuses, self.stream_status = 0, stream_status

    async def __call__(self, request: Any, message: dict[str, Any]) -> Any:
        assert request.headers["X-Key"] == KEY
        if request.method == "GET":
            kind = {"Content-Type": "text/event-stream"}
            return httpx2.Response(self.stream_status, headers=kind, stream=Events(self.events))
        assert str(request.url) == "http://server/messages?to=1"
        self.methods.append(message["method"])
        if self.refuses and message["method"] == "tools/call":
            return httpx2.Response(self.refuses)
        if (said := answer(message, "2024-11-05")) is not None:
            self.events.put_nowait(json.dumps(said))
        return httpx2.Response(202)


class Events(httpx2.AsyncByteStream):  # type: ignore[misc]
    """A stream of what is put into ``queue``; an empty text, or who closes it, ends it."""

    def __init__(self, queue: asyncio.Queue[str]) -> None:
        self.queue = queue

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"event: endpoint\ndata: /messages?to=1\n\n"
        while text := await self.queue.get():
            yield f"event: message\ndata: {text}\n\n".encode()

    async def aclose(self) -> None:
        self.queue.put_nowait("")


@pytest.mark.parametrize("refuses", [0, 400, 503])
def test_the_old_transport_is_spoken_where_the_url_says_so(monkeypatch, refuses) -> None:
    async def body() -> None:
        server = OldServer()
        async with episode(monkeypatch, server, url="http://server/sse") as environment:
            assert (await environment.call("add", {"a": 2, "b": 3})).text == "5"
            server.refuses = refuses
            if not refuses:
                server.events.put_nowait("")  # the stream ends
            with pytest.raises(ServerAway):
                await environment.call("add", {"a": 2, "b": 3})
        assert "server/discover" not in server.methods

    asyncio.run(body())


@pytest.mark.parametrize("status", [401, 404, 307])
def test_a_refused_stream_is_told_by_its_status(monkeypatch, status) -> None:
    async def body() -> None:
        server = OldServer(stream_status=status)
        async with episode(monkeypatch, server, url="http://server/sse"):
            pass

    with pytest.raises(RolloutError) as caught:
        asyncio.run(body())
    assert str(status) in caught.value.what
