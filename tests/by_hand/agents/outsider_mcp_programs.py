"""MCP environments that the outsider's cases are played with, and the cases of programs.

For outsider_mcp.py. ``episodes`` and ``called`` are the one place that knows the environment.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from realsys.api.errors import RealsysError
from realsys.rollout.environments import mcp_environment
from realsys.rollout.environments.mcp_environment import MCPEnvironment

SCRIPT = Path(__file__).resolve().parent / "programs" / "scripted_mcp.py"
RECORD = {"prompt": "What is 2+3?", "answer": "5"}
LIMIT_S = 45.0  # of a case with a revision
START_S, CALL_S = 20.0, 20.0
SHORT_S = 1.5  # limit of a call that is to take longer
KEY = "k-4711"

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
