"""Environment ``mcp``: servers of the ``mcp`` package over stdio and HTTP, and programs that misbehave.

What a status of HTTP means: test_mcp_http.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import golden
import pytest
from mcp_revisions import REVISIONS

from realsys.api.errors import ConfigError, RolloutError, WaitTimeout
from realsys.config import extras
from realsys.config.plugin_arguments import argument_problems
from realsys.rollout.environments import mcp_environment, mcp_process
from realsys.rollout.environments.environment_arguments import MCPArguments
from realsys.rollout.environments.mcp_client import MCPClient
from realsys.rollout.environments.mcp_environment import MCPEnvironment, tools_by_name
from realsys.rollout.environments.mcp_results import result_of

SUPPORT = Path(__file__).parents[3] / "support"
SCRIPT = SUPPORT / "mcp_tools.py"
STDIO = f"{sys.executable} {SCRIPT}"
BY_HAND = f"{sys.executable} -S {SUPPORT / 'mcp_revisions.py'}"
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
        assert sorted(functions) == ["add", "fail", "wait"]
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


def test_episodes_share_a_server_unless_each_is_to_have_its_own():
    async def body(make: Any) -> None:
        server = f"{BY_HAND} 2025-11-25 process"
        args = {"servers": [server], "allowed": ("process",), "env": {"MCP_TEST_VALUE": "v"}}
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


def test_a_server_that_ends_fails_the_question_and_the_next_starts_another():
    async def body(make: Any) -> None:
        server = f"{BY_HAND} 2026-07-28 leave"
        first = await make(servers=server)
        with golden.raises(RolloutError):
            await first.call("leave", {})
        second = await make(servers=server)
        assert (await second.call("add", {"a": 1, "b": 1})).text == "2"

    play(body)


@pytest.mark.parametrize(
    ("text", "id_"),
    [
        ('{"jsonrpc": "2.0", "id": 7, "result": {"x": "%s", "id": 9}}', 7),
        ('{"jsonrpc":"2.0","id":"a-1","result":{"x":"%s"}}', "a-1"),
        ('{"result": {"id": 9, "x": "%s"}, "id": 7, "jsonrpc": "2.0"}', 7),
        ('{"jsonrpc": "2.0", "result": {"x": "%s", "id": 9}}', None),
    ],
)
def test_a_message_over_the_limit_fails_what_it_answers_alone(monkeypatch, text, id_) -> None:
    monkeypatch.setattr(mcp_process, "MOST_LINE_BYTES", 1 << 17)

    async def lines() -> list[bytes]:
        stream = asyncio.StreamReader()
        stream.feed_data(b"\xef\xbb\xbf{}\n" + (text % ("x" * (1 << 18))).encode() + b"\n[]\nend")
        stream.feed_eof()
        return [line async for line in mcp_process.bounded_lines(stream)]

    first, long, *others = asyncio.run(lines())
    assert (first, others) == (b"{}", [b"[]", b"end"])
    assert (json.loads(long)["id"] if long else None) == id_
    assert not long or "error" in json.loads(long)


def test_a_long_result_is_cut():
    async def body(make: Any) -> None:
        environment = await make(servers=f"{BY_HAND} 2025-06-18", longest_result=1)
        text = (await environment.call("add", {"a": 12, "b": 3})).text
        head, _, tail = text.partition("\n")
        assert len(head) == 1
        assert tail.endswith(" more characters]")

    play(body)


@pytest.mark.parametrize("revision", REVISIONS)
def test_three_revisions_of_the_protocol_are_spoken(revision: str) -> None:
    async def body(make: Any) -> None:
        environment = await make(servers=f"{BY_HAND} {revision}")
        (client,) = environment._clients.values()
        assert client.protocol == revision
        assert [tool["function"]["name"] for tool in environment.tools()] == ["add"]
        assert (await environment.call("add", {"a": 2, "b": 3})).text == "5"
        failed = await environment.call("add", {"a": 1, "fail": True})
        assert (failed.text, failed.info) == ("1", {"calls": 2.0, "failed_calls": 1.0})

    play(body)


def test_a_program_that_ends_at_a_request_before_initialize_is_started_for_that(tmp_path):
    program = tmp_path / "server.py"
    program.write_text(f"""\
import json, sys
sys.path.insert(0, {str(SUPPORT)!r})
from mcp_revisions import answer
first = json.loads(input())
if first["method"] != "initialize":
    raise SystemExit("initialize comes first")
while True:
    if (said := answer(first, "2025-06-18")) is not None:
        print(json.dumps(said), flush=True)
    first = json.loads(input())
""")

    async def body(make: Any) -> str:
        environment = await make(servers=f"{sys.executable} -S {program}")
        return (await environment.call("add", {"a": 2, "b": 3})).text

    assert play(body) == "5"


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        ("raise ValueError('why')", RolloutError),
        ("input(); print('hello'); print('[]'); print('{}')", RolloutError),
        ("import time; time.sleep(60)", WaitTimeout),
        (
            "import json\nwhile True: print(json.dumps({'jsonrpc': '2.0', 'id': json.loads(input())['id'], "
            "'error': {'code': 1, 'message': 'no'}}), flush=True)",
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
            await make(servers=f"{sys.executable} -S {program}", start_timeout_s=timeout_s)
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
say(id=hear()["id"], error={"code": -32601, "message": "no such method"})
version = {"protocolVersion": "2025-06-18", "capabilities": {}}
say(id=hear()["id"], result={**version, "serverInfo": {"name": "n", "version": "1"}})
hear()
asked = hear()
say(id="p", method="ping")
say(id="s", method="sampling/createMessage")
say(method="notifications/message", params={"level": "info", "data": "d"})
print("what is no message")
answers = [hear(), hear()]
by_id = {answer["id"]: answer for answer in answers}
names = [f"p {'result' in by_id['p']}", f"s {'error' in by_id['s']}"]
tools = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
say(id=asked["id"], result={"tools": tools[:1], "nextCursor": "more"})
asked = hear()
say(id=asked["id"], result={"tools": tools[1:] if asked["params"]["cursor"] == "more" else []})
input()
""")

    async def body(make: Any) -> list[str]:
        environment = await make(servers=f"{sys.executable} -S {program}")
        return [tool["function"]["name"] for tool in environment.tools()]

    assert play(body) == ["p True", "s True"]


class ToolList:
    """A session of which only the name and the tools are looked at."""

    def __init__(self, name: str, *tools: str) -> None:
        self.name, self.tools = name, [{"name": tool} for tool in tools]


def test_tools_have_one_server_each():
    clients: Any = {"1": ToolList("one", "a", "b"), "2": ToolList("two", "b", "c")}
    assert tools_by_name(clients, ("a", "c")) == {"a": "1", "c": "2"}
    with golden.raises(ConfigError):
        tools_by_name(clients, ())
    with golden.raises(ConfigError) as caught:
        tools_by_name({"1": clients["1"]}, ("aa",))
    assert "'a'" in caught.value.fix


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_servers_are_closed_whichever_fails_to(failing: int) -> None:
    closed = []

    class Closing:
        def __init__(self, number: int) -> None:
            self.number = number

        async def close(self) -> None:
            closed.append(self.number)
            if self.number >= failing:
                raise OSError(self.number)

    environment = MCPEnvironment(servers=["a", "b", "c"], per_episode=True)
    environment._clients = {str(n): Closing(n) for n in range(3)}  # type: ignore[misc]
    with pytest.raises(OSError) as caught:
        asyncio.run(environment.close())
    assert (caught.value.args, closed) == ((failing,), [0, 1, 2])


def test_a_worker_without_the_package_says_which_extra_brings_it(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        MCPEnvironment(servers="a b")
    assert caught.value.fix == "pip install 'realsys[mcp]'"


@pytest.mark.parametrize(
    ("result", "text", "failed"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "image"}]}, "a\n[image]", False),
        ({"content": [{"type": "audio", "data": "QUFB"}]}, "[audio]", False),
        (
            {"content": [{"type": "resource_link", "uri": "file:///l", "name": "n"}]},
            "[resource_link] file:///l",
            False,
        ),
        (
            {"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "it"}}]},
            "it",
            False,
        ),
        (
            {"content": [{"type": "resource", "resource": {"uri": "file:///b", "blob": "QUFB"}}]},
            "[resource] file:///b",
            False,
        ),
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
