"""HTTP beneath the SDK's client of MCP servers: what fails on the way is the answer to that one message.

The SDK itself tells of a status only that there was one, and a connection that breaks ends its session,
with the calls of all episodes. So each failure becomes a JSON-RPC error here, with its ``WireFault``.
"""

from __future__ import annotations

import asyncio
import codecs
import functools
import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import httpx2
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from realsys.transport.http_outages import NO_KEY, is_busy

for name in ("httpx2", "mcp"):  # which tell of each request, and of the session's id
    logging.getLogger(name).setLevel(logging.WARNING)

MOST_BYTES = 64 << 20  # of a message from a server
_MARK = "realsys"
_SESSION = "mcp-session-id"
_SHOWN, _MOST_SHOWN_BYTES = 200, 4096  # characters of a body in an error; where they are looked for
_MOST_CONNECTIONS = 100
_NOTHING = (202, 204)  # statuses of what has no response
_CONNECT_S = 10.0
_NOTICE_S = 10.0  # for a message that has no response
_MARGIN_S = 10.0


class WireFault(StrEnum):
    """What became of a message that got no answer in the protocol."""

    UNREACHED = "unreached"  # no connection: it was not sent
    BUSY = "busy"  # 408, 429, 5xx
    BROKEN = "broken"  # it was sent, and the connection ended
    LOST = "lost"  # 404: the server knows the session no more, and did nothing
    DENIED = "denied"  # the key is missing or wrong
    REFUSED = "refused"  # another 4xx
    TOO_LARGE = "too_large"
    NO_MCP = "no_mcp"  # 2xx without a JSON object


def fault_of(data: Any) -> WireFault | None:
    """Returns which fault a JSON-RPC error's ``data`` names; None: the server itself has answered."""
    named = data.get(_MARK) if isinstance(data, Mapping) else None
    return WireFault(named) if named in list(WireFault) else None


def is_old(url: str) -> bool:
    """Returns whether a server at ``url`` speaks the transport of 2024-11-05: its path ends with /sse."""
    return urlsplit(url).path.rstrip("/").endswith("/sse")


@asynccontextmanager
async def http_transport(url: str, *, headers: Mapping[str, str], longest_s: float) -> Any:
    """Opens the SDK's transport to a server at ``url``: the old one, of events, where its path ends with
    ``/sse``, else streamable HTTP.

    Args:
        headers: of all requests, with their values.
        longest_s: that anything waits for an answer; then the connection is given up.
    """
    secrets = secrets_of(headers)
    timeout = httpx2.Timeout(longest_s + _MARGIN_S, connect=_CONNECT_S, pool=None)
    if is_old(url):

        def client_of_stream(**_: Any) -> Any:
            # Between calls nothing need come; each has its own limit
            unread = httpx2.Timeout(longest_s, connect=_CONNECT_S, read=None, pool=None)
            return httpx2.AsyncClient(
                transport=StreamOfAnswers(), headers=dict(headers), timeout=unread
            )

        async with sse_client(url, httpx_client_factory=client_of_stream) as streams:
            yield streams
        return
    async with (
        httpx2.AsyncClient(
            transport=FaultsAsAnswers(secrets), headers=dict(headers), timeout=timeout
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MOST_BYTES) as streams,
    ):
        yield streams


def secrets_of(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the texts of headers' values that nobody is to be shown: whole, and behind the scheme; the
    longest first."""
    values = {part for value in headers.values() for part in (value, value.partition(" ")[2])}
    return tuple(sorted(filter(str.strip, values), key=len, reverse=True))


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """Returns a text with stars in place of the secrets that a server repeats, as they are or in JSON."""
    for secret in secrets:
        for written in {secret, json.dumps(secret)[1:-1]}:
            text = text.replace(written, "***")
    return text


class FaultsAsAnswers(httpx2.AsyncBaseTransport):  # type: ignore[misc]
    """Sends requests; the failures of those that carry a message become its answer.

    Args:
        secrets: texts that no answer may show, should a server repeat them.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        limits = httpx2.Limits(max_connections=_MOST_CONNECTIONS)
        self._wire = httpx2.AsyncHTTPTransport(limits=limits, verify=_trusted())
        self._secrets = tuple(secrets)
        self._notices: set[asyncio.Task[Any]] = set()  # on their way

    async def handle_async_request(self, request: Any) -> Any:
        """Returns the server's response, or one that tells of the fault."""
        if request.method != "POST":
            return _unmarked(await self._wire.handle_async_request(request))
        sent = json.loads(await request.aread())  # one that follows a redirect has not been read
        if sent.get("method") == "notifications/cancelled":  # others wait behind what is sent here
            notice = asyncio.create_task(self._noticed(request), name="cancellation for MCP")
            self._notices.add(notice)
            notice.add_done_callback(self._notices.discard)
            return httpx2.Response(202)
        if "method" not in sent or "id" not in sent:
            return await self._noticed(request)
        try:
            return await self._answered(request, sent["id"])
        except (httpx2.TransportError, httpx2.DecodingError, OSError) as error:
            return _telling(sent["id"], *raised_fault(error))

    async def aclose(self) -> None:
        """Closes the connections."""
        for notice in self._notices:
            notice.cancel()
        await asyncio.gather(*self._notices, return_exceptions=True)
        await self._wire.aclose()

    async def _noticed(self, request: Any) -> Any:
        """Sends a message that has no response; one that does not arrive is no failure. Returns a redirect,
        which the SDK follows.
        """
        try:
            async with asyncio.timeout(_NOTICE_S):
                response = await self._wire.handle_async_request(request)
                await response.aclose()
            if 300 <= response.status_code < 400:
                return httpx2.Response(response.status_code, headers=response.headers)
        except (httpx2.TransportError, OSError, TimeoutError):
            pass
        return httpx2.Response(202)

    async def _answered(self, request: Any, id_: Any) -> Any:
        response = await self._wire.handle_async_request(request)
        status, kind = response.status_code, response.headers.get("content-type", "")
        if 300 <= status < 400 or (status < 300 and kind.lower().startswith("text/event-stream")):
            return _unmarked(response)  # the SDK reads it
        body = await _whole(response)
        if body is None:
            return _telling(id_, WireFault.TOO_LARGE, too_large())
        text = body[:_MOST_SHOWN_BYTES].decode(errors="replace").strip()
        text = without_secrets(text, self._secrets)
        why = f"HTTP {status} {text[:_SHOWN]}".strip()
        if status in _NOTHING:  # is no answer, nor the policy's fault; but the server is there
            return _telling(id_, WireFault.REFUSED, f"HTTP {status}: it answers nothing")
        if status in NO_KEY:
            return _telling(id_, WireFault.DENIED, why)
        if status == 404 and _SESSION in request.headers:
            return _telling(id_, WireFault.LOST, why)
        if is_busy(status):
            return _telling(id_, WireFault.BUSY, why)
        read = _object(body)
        if status >= 400 and not isinstance(read.get("error"), dict):
            return _telling(id_, WireFault.REFUSED, why)
        if status < 400 and not read:
            why = f"HTTP {status} of type {kind.partition(';')[0] or 'none'}: {text[:_SHOWN]}"
            return _telling(id_, WireFault.NO_MCP, why.strip(": "))
        kept = {_SESSION: response.headers[_SESSION]} if _SESSION in response.headers else {}
        headers = {"content-type": "application/json", **kept}
        return httpx2.Response(status, headers=headers, content=body)


class StreamOfAnswers(httpx2.AsyncBaseTransport):  # type: ignore[misc]
    """Sends requests of the old transport. What is refused has no answer on the stream, which ends, too."""

    def __init__(self) -> None:
        self._wire = httpx2.AsyncHTTPTransport(verify=_trusted())
        self._stream: Any = None

    async def handle_async_request(self, request: Any) -> Any:
        """Returns the server's response."""
        if request.method == "GET":
            self._stream = _unmarked(await self._wire.handle_async_request(request))
            return self._stream
        is_taken = False
        try:
            response = await self._wire.handle_async_request(request)
            is_taken = response.status_code < 400
            return response
        finally:
            if not is_taken and self._stream is not None:
                await self._stream.aclose()

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._wire.aclose()


def raised_fault(error: BaseException) -> tuple[WireFault, str]:
    """Returns what became of a message that was not answered, by what was raised, and in words."""
    match error:
        case httpx2.HTTPStatusError():
            status, to = error.response.status_code, error.response.headers.get("location", "")
            fault = WireFault.BUSY if is_busy(status) else WireFault.REFUSED
            fault = WireFault.DENIED if status in NO_KEY else fault
            return fault, f"HTTP {status} {to}".strip()
        case httpx2.ConnectError() | httpx2.ConnectTimeout():
            fault = WireFault.UNREACHED
        case (
            httpx2.UnsupportedProtocol()
            | httpx2.LocalProtocolError()
            | httpx2.DecodingError()
            | httpx2.SSEError()
        ):
            fault = WireFault.NO_MCP
        case _:
            fault = WireFault.BROKEN
    return fault, f"{type(error).__name__}: {error}"


@functools.cache
def _trusted() -> Any:
    """Reads once which certificates are trusted, which takes as long as a hundred requests."""
    return httpx2.create_ssl_context()


def too_large() -> str:
    """Returns what is said of a message over the limit."""
    return f"its message has more than {MOST_BYTES >> 20} MiB"


async def _whole(response: Any) -> bytes | None:
    """Returns what a response has, unpacked; None: it is over the limit."""
    found = bytearray()
    try:
        async for chunk in response.aiter_bytes():
            found += chunk
            if len(found) > MOST_BYTES:
                return None
    finally:
        await response.aclose()
    return bytes(found).removeprefix(codecs.BOM_UTF8)


def _unmarked(response: Any) -> Any:
    """Has a stream of events read as UTF-8, as it always is, without the mark that it may begin with."""
    response.encoding = "utf-8-sig"
    return response


def _object(body: bytes) -> dict[str, Any]:
    """Returns a JSON object; an empty one if there is none."""
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _telling(id_: Any, fault: WireFault, why: str) -> Any:
    error = {"code": -32603, "message": why, "data": {_MARK: fault.value}}
    return httpx2.Response(500, json={"jsonrpc": "2.0", "id": id_, "error": error})
