"""Environment ``mcp``: servers of the ``mcp`` package over stdio and HTTP, and some that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import golden
import pytest

from realsys.api.errors import ConfigError, RolloutError, WaitTimeout
from realsys.config.plugin_arguments import argument_problems
from realsys.rollout.environments import mcp_connections, mcp_environment
from realsys.rollout.environments.environment_arguments import MCPArguments
from realsys.rollout.environments.mcp_client import MCPClient, result_of
from realsys.rollout.environments.mcp_connections import opened
from realsys.rollout.environments.mcp_environment import MCPEnvironment, tools_by_name

SCRIPT = Path(__file__).parents[3] / "support" / "mcp_tools.py"
STDIO = f"{sys.executable} {SCRIPT}"
RECORD = {"prompt": "What is 2+3?", "answer": "5"}
Body = Callable[[Callable[..., Awaitable[MCPEnvironment]]], Awaitable[Any]]


def play(body: Body) -> Any:
    """What ``body`` returns; it makes environments, which are reset, and closed at the end."""

    async def episodes() -> Any:
        made: list[MCPEnvironment] = []

        async def make(**args: Any) -> MCPEnvironment:
            environment = MCPEnvironment(**args)
            made.append(environment)
            await environment.reset(RECORD)
            return environment

        try:
            return await body(make)
        finally:
            for environment in made:
                await environment.close()
            await close_shared()

    return asyncio.run(episodes())


async def close_shared() -> None:
    """Ends what the episodes of this event loop share; in a run it ends with the worker's process."""
    sessions = mcp_environment._shared.pop(asyncio.get_running_loop(), {})
    for done in await asyncio.gather(*sessions.values(), return_exceptions=True):
        if isinstance(done, MCPClient):
            await done.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that runs elsewhere."""
    argv = [sys.executable, str(SCRIPT), "http"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
        process.kill()


async def listening(make: Callable[..., Awaitable[MCPEnvironment]], **args: Any) -> MCPEnvironment:
    """An environment, as soon as its server listens."""
    ends_s = time.monotonic() + 240
    while True:
        try:
            return await make(**args)
        except WaitTimeout:  # it is away
            if time.monotonic() > ends_s:
                raise
            await asyncio.sleep(0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_tools_are_listed_and_called_and_the_answer_is_scored(url, transport):
    async def body(make: Any) -> None:
        environment = await listening(make, servers=url if transport == "http" else STDIO)
        functions = {tool["function"]["name"]: tool["function"] for tool in environment.tools()}
        assert sorted(functions) == ["add", "fail", "leave", "process", "wait"]
        assert "two whole numbers" in functions["add"]["description"]
        assert sorted(functions["add"]["parameters"]["properties"]) == ["a", "b"]
        added = await environment.call("add", {"a": 2, "b": 3})
        assert (added.text, added.done, added.reward) == ("5", False, 0.0)
        for name, arguments in (("add", {"a": "x"}), ("fail", {"text": "t"})):
            failed = await environment.call(name, arguments)
            assert "Error executing tool" in failed.text
        scored = await environment.step("5")
        assert (scored.reward, scored.done) == (1.0, True)
        assert scored.info == {"calls": 3.0, "failed_calls": 2.0}
        assert (await environment.step("6")).reward == 0.0
        # A call that takes too long is told to the policy.
        server = url if transport == "http" else STDIO
        environment = await listening(make, servers=server, call_timeout_s=0.5)
        slow = await environment.call("wait", {"seconds": 20})
        golden.check(slow.text)
        assert slow.info["failed_calls"] == 1.0

    play(body)


@pytest.mark.thorough
def test_episodes_share_a_server_unless_each_is_to_have_its_own():
    async def body(make: Any) -> None:
        args = {"servers": [STDIO], "allowed": ("process",), "env": {"MCP_TEST_VALUE": "v"}}
        first, second = await asyncio.gather(make(**args), make(**args))
        own = await make(**args, per_episode=True)
        told = [(await e.call("process", {})).text for e in (first, second, own)]
        assert told[0] == told[1] != told[2]
        assert told[0].endswith(" v")
        await own.close()
        own_pid, shared_pid = int(told[2].split()[0]), int(told[0].split()[0])
        assert not os.path.exists(f"/proc/{own_pid}")
        await first.close()
        assert os.path.exists(f"/proc/{shared_pid}")
        await close_shared()
        assert not os.path.exists(f"/proc/{shared_pid}")

    play(body)


@pytest.mark.thorough
def test_a_server_that_ends_fails_the_question_and_the_next_starts_another():
    async def body(make: Any) -> None:
        first = await make(servers=STDIO)
        with golden.raises(RolloutError):
            await first.call("leave", {})
        second = await make(servers=STDIO)
        assert (await second.call("add", {"a": 1, "b": 1})).text == "2"

    play(body)


def test_a_long_result_is_cut(url):
    async def body(make: Any) -> None:
        environment = await listening(make, servers=url, longest_result=1)
        text = (await environment.call("process", {})).text
        head, _, tail = text.partition("\n")
        assert len(head) == 1
        assert tail.endswith(" more characters]")

    play(body)


@pytest.mark.parametrize("is_stream", [False, True], ids=["JSON", "events"])
def test_a_result_over_the_limit_has_failed_and_the_server_is_asked_again(monkeypatch, is_stream):
    monkeypatch.setattr(mcp_connections, "_MESSAGE_BYTES", 1 << 16)
    kind = "text/event-stream" if is_stream else "application/json"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split()[0])
        asked = json.loads(await reader.readexactly(length))
        size = {"big": 1 << 20, "small": 1 << 15}[asked["params"]["name"]]
        result = {"content": [{"type": "text", "text": "x" * size}]}
        body = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode()
        # Events of one stream may be more than the limit together.
        note = b'data: {"method": "notifications/progress", "x": "%s"}\n\n' % (b"x" * (1 << 15))
        body = note * 3 + b"data: " + body + b"\n\n" if is_stream else body
        writer.write(
            f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode()
        )
        writer.write(body)
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async def calls() -> list[tuple[int, bool]]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection = await opened(f"http://127.0.0.1:{port}/mcp", (), env={})
        client = MCPClient(connection)
        found = [await client.call(name, {}, timeout_s=240) for name in ("big", "small")]
        assert connection.is_open
        await client.close()
        server.close()
        assert found[0].text.startswith("Error:")
        return [(len(result.text), result.failed) for result in found[1:]]

    assert asyncio.run(calls()) == [(1 << 15, False)]


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        ("raise ValueError('why')", RolloutError),
        ("input(); print('hello'); print('[]'); print('{}')", RolloutError),
        ("import time; time.sleep(60)", WaitTimeout),
        (
            'input(); print(\'{"jsonrpc": "2.0", "id": 1, "error": {"message": "no"}}\'); input()',
            RolloutError,
        ),
    ],
)
def test_a_server_that_does_not_start_is_named(tmp_path, code, raised):
    program = tmp_path / "server.py"
    program.write_text(code)

    async def body(make: Any) -> None:
        timeout_s = 0.5 if raised is WaitTimeout else 100
        with golden.raises(raised) as caught:
            await make(servers=f"{sys.executable} {program}", start_timeout_s=timeout_s)
        assert str(program) in caught.value.where

    play(body)


def test_a_server_that_asks_its_client_is_answered(tmp_path):
    program = tmp_path / "server.py"
    program.write_text("""\
import json
def say(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
def hear():
    return json.loads(input())
say(id=hear()["id"], result={})
hear()
asked = hear()
say(id="p", method="ping")
say(id="s", method="sampling/createMessage")
say(method="notifications/message")
answers = [hear(), hear()]
tools = [{"name": str("result" in answers[0])}, {"name": str(answers[1]["error"]["code"])}]
say(id=asked["id"], result={"tools": tools[:1], "nextCursor": "more"})
asked = hear()
say(id=asked["id"], result={"tools": tools[1:] if asked["params"] == {"cursor": "more"} else []})
input()
""")

    async def body(make: Any) -> list[str]:
        environment = await make(servers=f"{sys.executable} {program}")
        return [tool["function"]["name"] for tool in environment.tools()]

    assert play(body) == ["True", "-32601"]


def test_an_address_without_a_server_is_named():
    async def body(make: Any) -> None:
        with golden.raises(WaitTimeout) as caught:
            await make(servers="http://127.0.0.1:1/mcp")
        assert caught.value.where == "MCP server http://127.0.0.1:1/mcp"

    play(body)


@pytest.mark.parametrize(
    ("reply", "raised"),
    [
        ("503 Busy", WaitTimeout),
        ("429 Busy", WaitTimeout),
        ("404 Not Found", RolloutError),
        ("200 OK", RolloutError),  # with no JSON
        ("", WaitTimeout),  # the connection is closed
    ],
)
def test_an_outage_in_a_call_is_told_from_a_refusal_and_not_told_to_the_policy(
    reply: str, raised: type[Exception]
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if reply:
            writer.write(f"HTTP/1.1 {reply}\r\ncontent-length: 1\r\n\r\n?".encode())
            await writer.drain()
        writer.close()

    async def call() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = MCPClient(await opened(f"http://127.0.0.1:{port}/mcp", (), env={}))
        try:
            await client.call("add", {}, timeout_s=240)
        finally:
            await client.close()
            server.close()

    with golden.raises(raised):
        asyncio.run(call())


class Named:
    """A connection that is only a name."""

    is_open = True

    def __init__(self, name: str) -> None:
        self.name = name


def client(name: str, *tools: str) -> MCPClient:
    """A client whose server has these tools."""
    made = MCPClient(Named(name))  # type: ignore[arg-type]
    made.tools = tuple({"name": tool} for tool in tools)
    return made


def test_tools_have_one_server_each():
    one, two = client("one", "a", "b"), client("two", "b", "c")
    assert tools_by_name([one, two], ("a", "c")) == {"a": one, "c": two}
    with golden.raises(ConfigError):
        tools_by_name([one, two], ())
    with golden.raises(ConfigError) as caught:
        tools_by_name([one], ("aa",))
    assert "'a'" in caught.value.fix


@pytest.mark.parametrize(
    ("result", "text", "failed"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "image"}]}, "a\n[image]", False),
        ({"content": [], "structuredContent": {"x": 1}}, '{"x": 1}', False),
        ({"content": [{"type": "text", "text": "a"}], "isError": True}, "a", True),
        (None, "", False),
    ],
)
def test_what_is_shown_of_a_result(result, text, failed):
    shown = result_of(result)
    assert (shown.text, shown.failed) == (text, failed)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"servers": "python tools.py"}, ""),
        ({"servers": ["python tools.py", "https://host/mcp"], "allowed": ["add"]}, ""),
        ({}, "environment mcp has no server"),
        ({"servers": " "}, "environment mcp has no server"),
        ({"servers": "python 'tools.py"}, "can't be split into words"),
        ({"servers": "ftp://host/mcp"}, "the URL is 'ftp://host/mcp'"),
        ({"servers": "x", "call_timeout_s": 0.0}, "call_timeout_s"),
        ({"servers": "x", "server": "y"}, "environment 'mcp' takes no 'server'"),
    ],
)
def test_arguments_are_checked_by_a_plan(args, words):
    found = [str(p) for p in argument_problems("environment", "mcp", args, where="x")]
    assert len(found) == bool(words), found
    assert not words or words in found[0]


def test_a_single_server_may_be_text():
    assert MCPArguments(servers="a b").server_list == ("a b",)
