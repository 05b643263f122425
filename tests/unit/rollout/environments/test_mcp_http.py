"""Environment ``mcp`` over HTTP: revisions, keys, what a status of one call means to it and to others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import golden
import pytest
from mcp_revisions import MODERN, REVISIONS, RevisionServer, until

from realsys.api.errors import ConfigError, RolloutError, WaitTimeout
from realsys.config.plugin_arguments import argument_problems
from realsys.rollout.environments import mcp_environment, mcp_http
from realsys.rollout.environments.environment_arguments import MCPArguments
from realsys.rollout.environments.mcp_client import MCPClient
from realsys.rollout.environments.mcp_environment import MCPEnvironment
from realsys.rollout.environments.mcp_results import ServerAway
from realsys.transport import retry_pauses

RECORD = {"prompt": "What is 2+3?", "answer": "5"}
Make = Callable[..., Awaitable[MCPEnvironment]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_pauses, "FIRST_S", 0.001)


@asynccontextmanager
async def episodes() -> AsyncIterator[Make]:
    """Makes environments, which are reset, and closed at the end with what they share."""
    made: list[MCPEnvironment] = []

    async def make(**args: Any) -> MCPEnvironment:
        made.append(MCPEnvironment(**args))
        await made[-1].reset(RECORD)
        return made[-1]

    try:
        yield make
    finally:
        for environment in made:
            await environment.close()
        sessions = mcp_environment._shared.pop(asyncio.get_running_loop(), {})
        for done in await asyncio.gather(*sessions.values(), return_exceptions=True):
            if isinstance(done, MCPClient):
                await done.close()


async def sum_of(environment: MCPEnvironment, **arguments: Any) -> str:
    return (await environment.call("add", {"a": 2, "b": 3, **arguments})).text


@pytest.mark.parametrize("revision", REVISIONS)
def test_three_revisions_of_the_protocol_are_spoken(revision: str) -> None:
    async def body() -> None:
        async with RevisionServer(revision) as server, episodes() as make:
            environment = await make(servers=server.url)
            (client,) = environment._clients.values()
            assert client.protocol == revision
            assert [tool["function"]["name"] for tool in environment.tools()] == ["add"]
            assert await sum_of(environment) == "5"
            failed = await environment.call("add", {"a": 1, "fail": True})
            assert (failed.text, failed.info) == ("1", {"calls": 2.0, "failed_calls": 1.0})
            odd = await environment.call("add", {"odd": True})
            assert (odd.text.startswith("Error:"), odd.info["failed_calls"]) == (True, 2.0)
            calls = server.methods("tools/call")
            assert {headers["Mcp-Protocol-Version"] for headers in calls} == {revision}
            has_session = {"Mcp-Session-Id" in headers for headers in calls}
            assert has_session == {revision != MODERN}
            assert server.begun == (revision != MODERN)
        assert server.ended == ([] if revision == MODERN else ["s1"])

    asyncio.run(body())


# ---- keys ------------------------------------------------------------------------------------------


def test_keys_are_sent_with_each_request_and_each_to_its_own_server(tmp_path, monkeypatch) -> None:
    key = tmp_path / "key"
    key.write_text("of-file\n")
    key.chmod(0o600)
    monkeypatch.setenv("MCP_TEST_KEY", "of-variable")

    def needs(name: str, value: str) -> Any:
        return lambda headers: (
            None if headers.get(name) == value else (401, f"what is {headers.get(name)}?")
        )

    async def body() -> None:
        first = RevisionServer(on_request=needs("Authorization", "Bearer of-variable"))
        second = RevisionServer(MODERN, on_request=needs("X-Key", "of-file"))
        async with first, second, episodes() as make:
            bearer = {"Authorization": "Bearer env:MCP_TEST_KEY"}
            environment = await make(servers=first.url, headers=bearer)
            assert await sum_of(environment) == "5"
            tables = {first.url: bearer, second.url: {"X-Key": f"file:{key}"}}
            for url in (first.url, second.url):
                # Two servers of one tool: the refusal comes after both have let us in
                assert MCPArguments(servers=[first.url, second.url], headers=tables).headers_of(url)
            with golden.raises(ConfigError):
                await make(servers=[first.url, second.url], headers=tables)
            assert all("X-Key" not in headers for _, headers in first.asked)
            assert all("Authorization" not in headers for _, headers in second.asked)
            for headers in ({}, {"Authorization": "Token env:MCP_TEST_KEY"}):
                with golden.raises(RolloutError):
                    await make(servers=first.url, headers=headers)

    asyncio.run(body())


def test_a_key_that_is_not_there_or_that_others_can_read_is_refused(tmp_path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    key.chmod(0o644)
    several = tmp_path / "several"
    several.write_text("one\ntwo")
    several.chmod(0o600)

    async def start(source: str) -> None:
        environment = MCPEnvironment(servers="http://127.0.0.1:1/mcp", headers={"X-Key": source})
        await environment.reset(RECORD)

    for source in ("env:MCP_TEST_NO_KEY", f"file:{key}", f"file:{several}", "file:/no/such"):
        with golden.raises(ConfigError) as caught:
            asyncio.run(start(source))
        assert caught.value.where == "task.env_args.headers.X-Key"


URL = "https://host/mcp"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"servers": URL, "headers": {"Authorization": "Bearer env:MY_KEY"}}, ""),
        ({"servers": URL, "headers": {"api-key": "file:~/.keys/search"}}, ""),
        ({"servers": [URL, "a b"], "headers": {"X-Key": "env:MY_KEY"}}, ""),
        ({"servers": URL, "headers": {"X-Key": "sk-1234"}}, "X-Key"),
        ({"servers": URL, "headers": {"X-Key": "env:"}}, "X-Key"),
        ({"servers": URL, "headers": {"X-Key": "env:$MY_KEY"}}, "MY_KEY"),
        ({"servers": URL, "headers": {"X Key": "env:MY_KEY"}}, "X Key"),
        ({"servers": "a b", "headers": {"X-Key": "env:MY_KEY"}}, "URL"),
        ({"servers": [URL, "http://b"], "headers": {"X-Key": "env:MY_KEY"}}, "servers"),
        ({"servers": URL, "headers": {"http://b": {"X-Key": "env:MY_KEY"}}}, "http://b"),
    ],
)
def test_headers_are_checked_by_a_plan_which_shows_no_value(args, words) -> None:
    found = [str(p) for p in argument_problems("environment", "mcp", args, where="x")]
    assert len(found) == bool(words), found
    assert not words or words in found[0]
    assert "sk-1234" not in str(found)


# ---- what one call's status means ------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 403, 404, 405, 413, 422])
def test_a_refused_call_has_failed_and_no_other_call_with_it(status: int) -> None:
    async def body() -> None:
        goes_on, waiting = asyncio.Event(), 0

        async def on_call(arguments: Mapping[str, Any]) -> tuple[int, str] | None:
            nonlocal waiting
            if arguments.get("slow"):
                waiting += 1
                await goes_on.wait()
            return (status, "bad") if arguments.get("bad") else None

        # A 404 of a revision without sessions is a refusal as any other
        revision = MODERN if status == 404 else "2025-11-25"
        async with RevisionServer(revision, on_call=on_call) as server, episodes() as make:
            one, other = await make(servers=server.url), await make(servers=server.url)
            slow = [asyncio.create_task(sum_of(one, slow=True)) for _ in range(4)]
            await until(lambda: waiting == 4)
            refused = await other.call("add", {"bad": True})
            assert "bad" in refused.text
            assert refused.info["failed_calls"] == 1.0
            later = await make(servers=server.url)
            goes_on.set()
            assert await asyncio.gather(*slow, sum_of(one), sum_of(later)) == ["5"] * 6
            assert server.begun == (revision != MODERN)

    asyncio.run(body())


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again_and_is_away_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    async def body() -> None:
        calls = 0

        async def on_call(arguments: Mapping[str, Any]) -> tuple[int, str] | None:
            nonlocal calls
            calls += 1
            return (status, "busy") if arguments.get("always") or calls < 3 else None

        async with RevisionServer(on_call=on_call) as server, episodes() as make:
            environment = await make(servers=server.url)
            assert await sum_of(environment) == "5"
            assert calls == 3
            monkeypatch.setattr(retry_pauses, "FIRST_S", 1e9)  # after which the time is over
            with pytest.raises(ServerAway, match=f"HTTP {status} busy"):
                await environment.call("add", {"always": True})
            assert await sum_of(environment) == "5"

    asyncio.run(body())


def test_a_busy_server_is_asked_again_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        left = 3

        def on_request(_: Mapping[str, str]) -> tuple[int, str] | None:
            nonlocal left
            left -= 1
            return (503, "busy") if left >= 0 else None

        async with RevisionServer(on_request=on_request) as server, episodes() as make:
            assert await sum_of(await make(servers=server.url)) == "5"
            left = 10**9
            monkeypatch.setattr(retry_pauses, "FIRST_S", 1e9)
            with pytest.raises(ServerAway, match="HTTP 503 busy"):
                await make(servers=server.url, per_episode=True)

    asyncio.run(body())


def test_a_broken_connection_is_an_outage_and_the_next_episode_begins_a_session() -> None:
    async def body() -> None:
        goes_on, waiting = asyncio.Event(), 0

        async def on_call(arguments: Mapping[str, Any]) -> tuple[int, str] | None:
            nonlocal waiting
            if arguments.get("slow"):
                waiting += 1
                await goes_on.wait()
            return (0, "") if arguments.get("cut") else None

        async with RevisionServer(on_call=on_call) as server, episodes() as make:
            one, other = await make(servers=server.url), await make(servers=server.url)
            slow = asyncio.create_task(sum_of(one, slow=True))
            await until(lambda: waiting == 1)
            with pytest.raises(ServerAway):
                await other.call("add", {"cut": True})
            later = await make(servers=server.url)
            assert server.begun == 2
            goes_on.set()
            assert [await slow, await sum_of(one), await sum_of(later)] == ["5"] * 3
            assert server.ended == []
            await other.close()
            await one.close()  # the last that uses the first session
            await until(lambda: server.ended == ["s1"])
            assert await sum_of(later) == "5"

    asyncio.run(body())


@pytest.mark.parametrize("is_own", [False, True], ids=["shared", "own"])
def test_a_lost_session_is_begun_anew_without_closing_the_old_one_under_others(is_own) -> None:
    async def body() -> None:
        goes_on, waiting = asyncio.Event(), 0

        async def on_call(arguments: Mapping[str, Any]) -> tuple[int, str] | None:
            nonlocal waiting
            if arguments.get("slow"):
                waiting += 1
                await goes_on.wait()
            return None

        async with RevisionServer(on_call=on_call) as server, episodes() as make:
            args = {"servers": server.url, "per_episode": is_own}
            one, other = await make(**args), await make(**args)
            slow = [asyncio.create_task(sum_of(e, slow=True)) for e in (one, other)]
            await until(lambda: waiting == 2)
            server.sessions.clear()  # as one that was started anew
            begun = server.begun
            if is_own:  # what the episode did in it is lost
                with pytest.raises(WaitTimeout):
                    await sum_of(one)
            else:
                assert await asyncio.gather(*(sum_of(e) for e in (one, other))) == ["5", "5"]
                assert server.begun == begun + 1
            goes_on.set()
            assert await asyncio.gather(*slow) == ["5", "5"]
            assert await sum_of(await make(**args)) == "5"
            assert server.begun == begun + 1

    asyncio.run(body())


def test_a_call_that_takes_too_long_holds_up_no_other_though_nobody_hears_of_its_end() -> None:
    async def body() -> None:
        goes_on = asyncio.Event()

        async def on_call(arguments: Mapping[str, Any]) -> None:
            if arguments.get("slow"):
                await goes_on.wait()

        async with RevisionServer(on_call=on_call) as server, episodes() as make:
            server.held["notifications/cancelled"] = goes_on
            environment = await make(servers=server.url)
            environment.call_timeout_s = 0.05  # not of the start
            late = await environment.call("add", {"slow": True})
            assert late.info["failed_calls"] == 1.0
            other = await make(servers=server.url)
            await until(lambda: bool(server.methods("notifications/cancelled")))
            assert await sum_of(other) == "5"
            goes_on.set()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("reply", "raised"),
    [((401, "no"), RolloutError), ((200, "no JSON"), RolloutError), ((200, "[1]"), RolloutError)],
)
def test_what_no_policy_is_to_blame_for_is_not_told_to_it(reply, raised) -> None:
    async def body() -> None:
        async def on_call(_: Mapping[str, Any]) -> tuple[int, str]:
            return reply  # type: ignore[no-any-return]

        async with RevisionServer(on_call=on_call) as server, episodes() as make:
            environment = await make(servers=server.url)
            with golden.raises(raised):
                await sum_of(environment)

    asyncio.run(body())


def test_an_address_without_a_server_is_named() -> None:
    async def body() -> None:
        async with episodes() as make:
            with golden.raises(WaitTimeout) as caught:
                await make(servers="http://127.0.0.1:1/mcp")
            assert caught.value.where == "MCP server http://127.0.0.1:1/mcp"

    asyncio.run(body())


@pytest.mark.parametrize("is_stream", [False, True], ids=["JSON", "events"])
def test_a_result_over_the_limit_has_failed_and_a_stream_that_ends_is_an_outage(
    monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    monkeypatch.setattr(mcp_http, "MOST_BYTES", 1 << 16)

    async def body() -> None:
        from aiohttp import web

        server = RevisionServer()
        handle = server._handle

        async def handled(request: web.Request) -> web.StreamResponse:
            asked = json.loads(await request.read() or b"{}")
            if asked.get("method") != "tools/call":
                return await handle(request)  # type: ignore[no-any-return]
            size = {"big": 1 << 20, "small": 1 << 15, "none": 0}[
                asked["params"]["arguments"]["how"]
            ]
            result = {"content": [{"type": "text", "text": "x" * size}]}
            text = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result})
            kind = "text/event-stream" if is_stream else "application/json"
            response = web.StreamResponse(headers={"Content-Type": kind})
            await response.prepare(request)
            with suppress(ConnectionError):
                if is_stream:
                    # Events of one stream may be more than the limit together
                    params = {"progressToken": "t", "progress": 1, "message": "x" * (1 << 15)}
                    note = {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}
                    for _ in range(3):
                        await response.write(f"data: {json.dumps(note)}\n\n".encode())
                    text = f"data: {text}\n\n" if size else ""
                await response.write(text.encode() if size else b"")
            return response

        server._handle = handled  # type: ignore[method-assign]
        async with server, episodes() as make:
            environment = await make(servers=server.url)
            big, small = [await environment.call("add", {"how": how}) for how in ("big", "small")]
            assert big.text.startswith("Error:")
            assert (len(small.text), small.info["failed_calls"]) == (8192 + 24, 1.0)
            with pytest.raises(ServerAway if is_stream else RolloutError):
                await environment.call("add", {"how": "none"})
            assert server.begun == 1

    asyncio.run(body())
