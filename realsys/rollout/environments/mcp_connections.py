"""Connections to MCP servers: a process of ours over stdin and stdout, or streamable HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from realsys.api.errors import ConfigError, RolloutError, WaitTimeout
from realsys.rollout.environments.mcp_client import (
    PROTOCOL,
    MCPConnection,
    ReplyTooLarge,
    ServerAway,
)
from realsys.runtime.child_processes.child_guard import GRACE_S, guarded
from realsys.transport.http_outages import AWAY, is_away

_MESSAGE_BYTES = 32 << 20  # of one from a server
_TAIL_BYTES = 2000
_NOT_OURS = {"code": -32601, "message": "this client has no such method"}


class StdioConnection:
    """A server that is started here, tied to this process; one line a message. What it logs is ours."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str]) -> None:
        self.name = " ".join(argv)
        self._argv, self._env = list(argv), dict(env)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._errors: asyncio.Task[None] | None = None
        self._log_tail = b""
        self._waiting: dict[Any, asyncio.Future[Mapping[str, Any]]] = {}

    @property
    def is_open(self) -> bool:
        """Whether the server runs."""
        return self._reader is not None and not self._reader.done()

    async def open(self) -> None:
        """Starts the server. Called from the main thread, to which the process is tied."""
        self._process = await asyncio.create_subprocess_exec(
            *guarded(self._argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self._env},
            start_new_session=True,
            limit=_MESSAGE_BYTES,
        )
        self._errors = asyncio.create_task(self._log(self._process), name=f"stderr of {self.name}")
        self._reader = asyncio.create_task(self._read(self._process), name=f"MCP {self.name}")

    async def request(self, message: Mapping[str, Any], *, timeout_s: float) -> Mapping[str, Any]:
        """Sends a request and returns the response with its id."""
        if not self.is_open:
            raise self._gone()
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[message["id"]] = waiting
        try:
            async with asyncio.timeout(timeout_s):
                await self.notify(message)
                response: Mapping[str, Any] = await waiting
                return response
        except TimeoutError as error:
            raise _too_long(self.name, message, timeout_s) from error
        finally:
            self._waiting.pop(message["id"], None)

    async def notify(self, message: Mapping[str, Any]) -> None:
        """Sends a message that has no response."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # it has ended: the reader says so
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()

    async def close(self) -> None:
        """Ends the server and all that it has started."""
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()  # the guard gives it some seconds
            try:
                async with asyncio.timeout(2 * GRACE_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        tasks = [task for task in (self._reader, self._errors) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _log(self, process: asyncio.subprocess.Process) -> None:
        """Passes what the server logs on to this process's own log."""
        assert process.stderr is not None
        while chunk := await process.stderr.read(1 << 16):
            self._log_tail = (self._log_tail + chunk)[-_TAIL_BYTES:]
            os.write(sys.stderr.fileno(), chunk)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                await self._received(line)
        except ValueError:  # a line over the limit, of which the end is not found
            process.terminate()
            self._log_tail = _too_large().encode()
        finally:
            if self._errors is not None:  # which say why
                await asyncio.wait({self._errors}, timeout=1)
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(self._gone())

    async def _received(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return  # servers print what is no message
        if not isinstance(message, dict):
            return
        if "method" in message:
            if "id" in message:
                await self.notify(_reply_to(message))
            return
        waiting = self._waiting.get(message.get("id"))
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _gone(self) -> RolloutError:
        lines = self._log_tail.decode(errors="replace").strip().splitlines()
        return RolloutError(
            "the MCP server has ended" + (f": {lines[-1].strip()[:200]}" if lines else ""),
            where=f"MCP server {self.name}",
            fix="run its command by hand; all that it printed is in the rollout worker's log",
        )


class HttpConnection:
    """A server that runs elsewhere: each message is a POST, answered by JSON or by a stream of events."""

    def __init__(self, url: str) -> None:
        self.name = url
        self._session: aiohttp.ClientSession | None = None
        self._headers = {"Accept": "application/json, text/event-stream"}
        self._is_away = False

    @property
    def is_open(self) -> bool:
        """Whether the server answered last time."""
        return not self._is_away

    async def open(self) -> None:
        """Gets ready."""
        self._session = aiohttp.ClientSession()

    async def request(self, message: Mapping[str, Any], *, timeout_s: float) -> Mapping[str, Any]:
        """Sends a request and returns the response with its id."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.post(
                self.name, json=message, headers=self._headers, timeout=timeout
            ) as response:
                if response.status >= 400:
                    body = (await response.content.read(_TAIL_BYTES)).decode(errors="replace")
                    # One that was started anew knows no session of before.
                    is_new = response.status == 404 and "Mcp-Session-Id" in self._headers
                    raise self._failed(
                        f"HTTP {response.status} {body[:200]}",
                        is_outage=response.status in AWAY or is_new,
                    )
                if session_id := response.headers.get("Mcp-Session-Id"):
                    self._headers |= {
                        "Mcp-Session-Id": session_id,
                        "MCP-Protocol-Version": PROTOCOL,
                    }
                if response.content_type == "text/event-stream":
                    async for read in _events(response.content):
                        if read.get("id") == message["id"] and "method" not in read:
                            return read
                    raise self._failed("its stream ended without the response", is_outage=True)
                read = json.loads(await _whole(response.content))
                if isinstance(read, dict):
                    return read
                raise self._failed("it answered with no JSON object", is_outage=False)
        except _OverLimit as error:
            raise ReplyTooLarge(
                _too_large(), where=f"MCP server {self.name}", fix="let its tools return less"
            ) from error
        except TimeoutError as error:
            raise _too_long(self.name, message, timeout_s) from error
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            raise self._failed(why, is_outage=is_away(error)) from error

    async def notify(self, message: Mapping[str, Any]) -> None:
        """Sends a message that has no response; one that does not arrive is no failure."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=10)
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._session.post(
                self.name, json=message, headers=self._headers, timeout=timeout
            ):
                pass

    async def close(self) -> None:
        """Ends the session."""
        if self._session is None:
            return
        if "Mcp-Session-Id" in self._headers and not self._is_away:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                timeout = aiohttp.ClientTimeout(total=10)
                async with self._session.delete(self.name, headers=self._headers, timeout=timeout):
                    pass
        await self._session.close()

    def _failed(self, reason: str, *, is_outage: bool) -> ServerAway | RolloutError:
        self._is_away = True
        kind = ServerAway if is_outage else RolloutError
        return kind(
            f"the MCP server can't be used: {reason}",
            where=f"MCP server {self.name}",
            fix="start it, or correct task.env_args.servers; rollout workers must reach it",
        )


async def opened(server: str, argv: Sequence[str], *, env: Mapping[str, str]) -> MCPConnection:
    """Opens the connection to ``server``: a URL, or the program ``argv``.

    Raises:
        ConfigError: the program can't be started.
    """
    connection: HttpConnection | StdioConnection
    connection = StdioConnection(argv, env=env) if argv else HttpConnection(server)
    try:
        await connection.open()
    except OSError as error:
        raise ConfigError(
            f"the MCP server can't be started: {error}",
            where=f"MCP server {server}",
            fix="correct task.env_args.servers",
        ) from error
    return connection


class _OverLimit(Exception):
    """A server's message is larger than _MESSAGE_BYTES."""


def _too_large() -> str:
    return f"its message has more than {_MESSAGE_BYTES >> 20} MiB"


async def _whole(stream: aiohttp.StreamReader) -> bytes:
    """Returns what a reply has, unpacked. Raises _OverLimit."""
    found = bytearray()
    async for chunk in stream.iter_any():
        found += chunk
        if len(found) > _MESSAGE_BYTES:
            raise _OverLimit
    return bytes(found)


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON objects of a stream of server-sent events. Raises _OverLimit: one is too large."""
    data: list[str] = []
    pieces: list[bytes] = []  # of the line that has no end yet
    in_pieces = in_data = 0  # bytes, characters
    async for chunk in stream.iter_any():
        pieces.append(chunk)
        in_pieces += len(chunk)
        if b"\n" not in chunk:
            if in_pieces > _MESSAGE_BYTES:
                raise _OverLimit
            continue
        *lines, rest = b"".join(pieces).split(b"\n")
        pieces, in_pieces = [rest], len(rest)
        for line in (raw.rstrip(b"\r").decode(errors="replace") for raw in lines):
            if line.startswith("data:"):
                data.append(line.removeprefix("data:").removeprefix(" "))
                in_data += len(data[-1])
                if in_data > _MESSAGE_BYTES:
                    raise _OverLimit
            elif not line and data:
                read = json.loads("\n".join(data))
                data.clear()
                in_data = 0
                if isinstance(read, dict):
                    yield read


def _reply_to(message: Mapping[str, Any]) -> dict[str, Any]:
    """Answers what a server asks its client: it may ping, and no more."""
    answer = {"result": {}} if message["method"] == "ping" else {"error": _NOT_OURS}
    return {"jsonrpc": "2.0", "id": message["id"], **answer}


def _too_long(name: str, message: Mapping[str, Any], timeout_s: float) -> WaitTimeout:
    return WaitTimeout(
        f"{message['method']} took more than {timeout_s:g} s",
        where=f"MCP server {name}",
        fix="raise task.env_args.start_timeout_s or call_timeout_s, or see the server's log",
    )
