"""Do calls to MCP servers end as somebody has it who has not read our client? By hand; five minutes.

    python tests/by_hand/agents/outsider_mcp.py [--only TEXT]  writes results/outsider_mcp.json

Plays outsider/mcp.jsonl (OUTSIDER_CALLS.md) against scripted servers: programs (programs/scripted_mcp.py),
and HTTP in this process. Times of the table are shortened, limits of calls with them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(HERE)]
sys.path.insert(0, str(HERE / "programs"))

from outsider_mcp_programs import (  # noqa: E402
    KEY,
    LIMIT_S,
    SHORT_S,
    Make,
    Wrong,
    called,
    episodes,
    five,
    one_fails,
    or_again,
    play_stdio,
    refused,
    shows,
    stdio,
    want,
)
from outsider_mcp_servers import (  # noqa: E402
    HOOKS,
    Reply,
    Server,
    needs,
    nothing,
    old_post,
    on_call,
    redirects,
    with_status,
)
from outsider_tables import (  # noqa: E402
    Outcome,
    failed,
    main_of,
    not_played,
    passed,
)
from scripted_mcp import ADD, MODERN, answer  # noqa: E402

from realsys.api.errors import RealsysError  # noqa: E402


async def play_http(name: str, revision: str, make: Make) -> None:
    """Plays a case of a server over HTTP."""
    if name.startswith("key/"):
        await play_key(name, revision, make)
        return
    if name in SPECIAL:
        await SPECIAL[name](name, revision, make)
        return
    async with Server(name, revision, HOOKS.get(name, nothing)) as server:
        if name == "status/500_always":  # an outage would be right, says the note
            await or_again(_four_calls(name, make, server))
        elif name.startswith("status/"):
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
            return web.json_response({"jsonrpc": "2.0", "id": message.get("id"), "error": error})
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
        environments = [await make(servers=server.url, per_episode=per_episode) for _ in range(num)]
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


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Keeps what servers print on stderr, up to 100 MB, from the terminal."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


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
            with _without_stderr():
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


if __name__ == "__main__":
    sys.exit(
        main_of(
            __file__,
            __doc__,
            "mcp",
            played,
            what="calls to MCP servers as an outsider wrote them down",
            ends_after_s=1800,
        )
    )
