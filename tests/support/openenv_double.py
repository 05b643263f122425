"""A server that speaks OpenEnv's protocol as openenv-core 0.3 does, with faults to order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web

TEXT_SCHEMA = {
    "properties": {"message": {"type": "string"}, "metadata": {}},
    "required": ["message"],
}
GRID_SCHEMA = {
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}, "metadata": {}},
    "required": ["x", "y"],
}


def observed(observation: Mapping[str, Any], reward: Any = None, *, done: bool = False) -> Any:
    """A message with an observation."""
    data = {"observation": dict(observation), "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str) -> Any:
    """A message that refuses."""
    return {"type": "error", "data": {"message": "because", "code": code}}


class OpenEnvDouble:
    """Answers the messages of every session by script; ``received`` has what all of them sent.

    Args:
        replies: to messages of a session in turn: objects, texts as they are, None: none ever.
            Over HTTP a number is a status.
        full: this many sessions are refused for want of a place, before anything is read.
        busy: statuses of the first requests, of whatever kind.
    """

    def __init__(
        self,
        *replies: Any,
        schema: Mapping[str, Any] = TEXT_SCHEMA,
        full: int = 0,
        busy: Sequence[int] = (),
    ) -> None:
        self._replies, self._schema, self.full = replies, schema, full
        self.busy = list(busy)
        self.received: list[Any] = []
        self.sessions = 0
        self.open = 0

    async def __aenter__(self) -> OpenEnvDouble:
        app = web.Application(middlewares=[self._busy])
        app.add_routes(
            [
                web.get("/ws", self._session),
                web.get("/schema", self._schemas),
                web.post("/reset", self._request),
                web.post("/step", self._request),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _busy(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.busy:
            return web.Response(status=self.busy.pop(0), text="not yet")
        answered: web.StreamResponse = await handler(request)
        return answered

    async def _schemas(self, _: web.Request) -> web.Response:
        return web.json_response({"action": self._schema, "observation": {}, "state": {}})

    async def _request(self, request: web.Request) -> web.Response:
        self.received.append((request.path, await request.json()))
        reply = self._replies[len(self.received) - 1]
        if isinstance(reply, int):
            return web.Response(status=reply, text="because")
        if reply.get("type") == "error":
            return web.json_response({"detail": reply["data"]}, status=422)
        return web.json_response(reply["data"])

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sessions += 1
        self.open += 1
        try:
            if self.full:
                self.full -= 1
                await socket.send_json(error("CAPACITY_REACHED"))
                return socket
            await self._talk(socket, self._replies)
        finally:
            self.open -= 1
            await socket.close()
        return socket

    async def _talk(self, socket: web.WebSocketResponse, replies: Sequence[Any]) -> None:
        left = list(replies)
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                return
            read = json.loads(message.data)
            self.received.append(read)
            if read["type"] == "close" or not left:
                return
            reply = left.pop(0)
            if reply is not None:
                await socket.send_str(reply if isinstance(reply, str) else json.dumps(reply))
