"""Agents' servers of NeMo Gym that answer by script, for outsider_gyms.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

LONGEST_S = 120.0  # that a server is silent

Script = Callable[["Gym", web.Request, int], Awaitable[web.StreamResponse]]


class Gym:
    """An agent's server that answers ``/run`` by a script, which gets the number of the request."""

    def __init__(self, script: Script, path: str = "/run") -> None:
        self._script, self._path = script, path
        self.policy_url, self.num, self.port = "", 0, 0
        self.asked: list[tuple[int, str]] = []

    async def start(self) -> None:
        """Listens, again where it listened before."""
        app = web.Application()
        app.add_routes([web.post("/run", self._run), web.post("/run/", self._run)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Ends, and refuses connections."""
        await self._runner.cleanup()

    async def ask(self, request: web.Request, *, metadata: bool = True) -> None:
        """Asks the policy as Gym's model server does."""
        params = (await request.json())["responses_create_params"]
        if not metadata:
            params = {k: v for k, v in params.items() if k != "metadata"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{self.policy_url}/responses", json=params) as answer,
        ):
            self.asked.append((answer.status, await answer.text()))

    async def _run(self, request: web.Request) -> web.StreamResponse:
        self.num += 1
        return await self._script(self, request, self.num)


def status_script(status: int, *, times: int = 10**9, ask: bool = True, **headers: str) -> Script:
    """Answers with a status so many times, then well."""

    async def script(gym: Gym, request: web.Request, number: int) -> web.StreamResponse:
        if number <= times:
            if ask:
                await gym.ask(request)
            body = json.dumps({"error": f"this is wrong, {status}"})
            return web.Response(status=status, text=body, headers=headers)
        return await well(gym, request, number)

    return script


def body_script(body: str | bytes, *, times: int = 10**9, **more: Any) -> Script:
    """Asks the policy and answers with a body so many times, then well."""

    async def script(gym: Gym, request: web.Request, number: int) -> web.StreamResponse:
        if number > times:
            return await well(gym, request, number)
        await gym.ask(request)
        raw = body.encode() if isinstance(body, str) else body
        return web.Response(body=raw, **{"content_type": "application/json", **more})

    return script


async def well(gym: Gym, request: web.Request, number: int) -> web.StreamResponse:
    """Asks the policy, rewards it with 1."""
    del number
    await gym.ask(request)
    return web.json_response({"reward": 1.0, "response": {}})


async def half(gym: Gym, request: web.Request, number: int) -> web.StreamResponse:
    """Closes the connection within the first answer's JSON."""
    if number > 1:
        return await well(gym, request, number)
    await gym.ask(request)
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b'{"reward": 1')
    assert request.transport is not None
    request.transport.close()
    return response


async def hanging(gym: Gym, request: web.Request, number: int) -> web.StreamResponse:
    """Asks, and never answers."""
    del number
    await gym.ask(request)
    await asyncio.sleep(LONGEST_S)
    return web.Response()


async def unasking(gym: Gym, request: web.Request, number: int) -> web.StreamResponse:
    """Rewards what the policy never said."""
    del gym, request, number
    return web.json_response({"reward": 1.0})


async def forgetful(gym: Gym, request: web.Request, number: int) -> web.StreamResponse:
    """Drops the metadata of the policy's request, and fails as Gym does when its model server does."""
    del number
    await gym.ask(request, metadata=False)
    return web.Response(status=500, text=gym.asked[-1][1])


async def redirecting(gym: Gym, request: web.Request, number: int) -> web.StreamResponse:
    """Redirects to the same path with a slash."""
    if request.path == "/run":
        raise web.HTTPTemporaryRedirect("/run/")
    return await well(gym, request, number)


async def zipped(gym: Gym, request: web.Request, number: int) -> web.StreamResponse:
    """Answers well, compressed."""
    response = await well(gym, request, number)
    assert isinstance(response, web.Response)
    response.enable_compression(web.ContentCoding.gzip)
    return response


class Late:
    """Asks the policy once more after ``/run`` has been answered."""

    def __init__(self) -> None:
        self.status = 0
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, gym: Gym, request: web.Request, number: int) -> web.StreamResponse:
        """Answers, and asks later."""
        response = await well(gym, request, number)
        params = (await request.json())["responses_create_params"]
        self._task = asyncio.create_task(self._ask(gym.policy_url, params))
        return response

    async def _ask(self, url: str, params: Any) -> None:
        await asyncio.sleep(0.5)
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{url}/responses", json=params) as answer,
        ):
            self.status = answer.status

    async def ended(self) -> None:
        """Waits for the late request."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=20)
