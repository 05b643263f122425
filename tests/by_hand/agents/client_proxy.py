"""A proxy between clients and the agents' endpoint: notes every reply, and spoils those that it is told to.

    client ── ClientProxy ── endpoint

In a thread of its own. What a client gets is what the endpoint wrote, byte for byte, but for the faults.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import aiohttp
from aiohttp import web

ANSWERING = ("/chat/completions", "/responses", "/messages")
_START_S = 30.0
_PASSED_ON = ("content-type", "x-should-retry", "retry-after")
_OWN = ("host", "content-length", "transfer-encoding", "connection", "accept-encoding")
_ID = re.compile(rb'"id": ?"(chatcmpl-[^"]+)"')


_ENDS = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete")  # of streams


class Fault(StrEnum):
    """What becomes of a reply that the endpoint has made."""

    DROP = "drop"  # the connection is closed before its first byte
    STATUS_502 = "502"  # in place of the reply
    CUT = "cut"  # the connection is closed behind its first part


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A reply of the endpoint.

    Attributes:
        texts: of its choices, if all of it came to the proxy.
        is_cut: it broke off while it was being made, or in the middle of its body.
    """

    key: str
    path: str
    question: bytes
    status: int
    id: str
    texts: tuple[str, ...]
    is_cut: bool = False
    fault: Fault | None = None


class ClientProxy:
    """Start it with ``with``. ``faults`` are used up one by one by the requests of a key."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.replies: list[Reply] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> ClientProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(_START_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)

    async def _open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=600)
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "")
        key = key.removeprefix("Bearer ").strip()
        asks = request.method == "POST" and request.path.endswith(ANSWERING)
        fault = self.faults[key].popleft() if asks and self.faults[key] else None
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _OWN}
        got = bytearray()
        status = 0
        async with self._session.request(
            request.method, self._target + request.path_qs, headers=headers, data=body
        ) as upstream:
            status = upstream.status
            try:
                return await self._pass_on(request, upstream, fault, got)
            finally:
                if asks:
                    ids = _ID.search(got)
                    self.replies.append(
                        Reply(
                            key=key,
                            path=request.path,
                            question=body,
                            status=status,
                            id=ids.group(1).decode() if ids else "",
                            texts=() if fault is Fault.CUT else tuple(texts_of(bytes(got))),
                            is_cut=fault is Fault.CUT and not was_sent_whole(bytes(got)),
                            fault=fault,
                        )
                    )

    async def _pass_on(
        self,
        request: web.Request,
        upstream: aiohttp.ClientResponse,
        fault: Fault | None,
        got: bytearray,
    ) -> web.StreamResponse:
        assert request.transport is not None
        headers = {k: v for k, v in upstream.headers.items() if k.lower() in _PASSED_ON}
        if fault in (Fault.DROP, Fault.STATUS_502):
            got += await upstream.read()
            if fault is Fault.STATUS_502:
                return web.Response(status=502, text="bad gateway")
            request.transport.close()
            return web.Response()
        response = web.StreamResponse(status=upstream.status, headers=headers)
        if (length := upstream.content_length) is not None:
            response.content_length = length
        await response.prepare(request)
        async for part in upstream.content.iter_any():
            got += part
            if fault is Fault.CUT:
                await response.write(part[: max(1, len(part) // 2)])
                request.transport.close()
                upstream.close()
                return response
            await response.write(part)
        await response.write_eof()
        return response


def was_sent_whole(body: bytes) -> bool:
    """True for a stream whose end is there, too: it came in one piece. A body is one piece in any case."""
    return not body.lstrip().startswith(b"{") and any(end in body for end in _ENDS)


def texts_of(body: bytes) -> list[str]:
    """Returns the content of each choice of a reply, of any dialect, whole or streamed."""
    text = body.decode()
    if not text.lstrip().startswith("{"):
        return _streamed_texts(_events(text))
    read = json.loads(text)
    if "choices" in read:
        return [c["message"]["content"] or "" for c in read["choices"]]
    if "output" in read:
        parts = [p for o in read["output"] if o["type"] == "message" for p in o["content"]]
        return ["".join(p["text"] for p in parts)]
    return ["".join(b["text"] for b in read.get("content", ()) if b["type"] == "text")]


def _events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("data:") and "[DONE]" not in line:
            yield json.loads(line.removeprefix("data:"))


def _streamed_texts(events: Iterable[dict[str, Any]]) -> list[str]:
    found: dict[int, str] = {0: ""}
    for event in events:
        if event.get("type") == "response.output_text.delta":
            found[0] += event["delta"]
        elif event.get("type") == "content_block_delta":
            found[0] += event["delta"].get("text", "")
        for choice in event.get("choices", ()):
            index = choice["index"]
            found[index] = found.get(index, "") + (choice["delta"].get("content") or "")
    return [found[index] for index in sorted(found)]
