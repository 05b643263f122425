"""Program of an MCP server as a transport of the SDK's: started here, a line of stdin or stdout a message.

Unlike the SDK's own, it ends with this process, however that ends; reads lines of bounded length, so that
a longer one fails the call that it answers alone; and knows the last line that the program logged.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from realsys.runtime.child_processes.child_guard import GRACE_S, guarded

MOST_LINE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 16
_KEPT_BYTES = 512  # of each end of a longer line, where its id is looked for
_ID = rb'"id"\s*:\s*(\d+|"[^"\\]{1,100}")\s*'
_ID_BEFORE = re.compile(_ID + rb"[,}]")
_ID_AT_END = re.compile(_ID + rb'(?:,\s*"jsonrpc"\s*:\s*"2.0"\s*)?\}\s*$')
_TAIL_BYTES = 2000


class ServerProcess:
    """A server that is started when it is entered, and ended when it is left; both by one task, on the
    main thread, to which the program is tied. What it logs goes to this process's own log.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str]) -> None:
        self._argv, self._env = list(argv), dict(env)
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[Any] = []
        self._log_tail = b""
        self._is_left = False
        self.has_ended = False  # by itself

    async def __aenter__(self) -> tuple[Any, Any]:
        """Starts the program; returns what the SDK reads from and writes into.

        Raises:
            OSError: it can't be started.
        """
        self._process = process = await asyncio.create_subprocess_exec(
            *guarded(self._argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self._env},
            start_new_session=True,
        )
        into, received = anyio.create_memory_object_stream[Any](0)
        to_send, outgoing = anyio.create_memory_object_stream[Any](0)
        self._streams = [into, received, to_send, outgoing]
        name = " ".join(self._argv)
        logging = asyncio.create_task(self._log(process), name=f"stderr of {name}")
        self._tasks = [
            logging,
            asyncio.create_task(self._read(process, into, logging), name=f"stdout of {name}"),
            asyncio.create_task(self._write(process, outgoing), name=f"stdin of {name}"),
        ]
        return received, to_send

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends the program and all that it has started."""
        self._is_left, process = True, self._process
        assert process is not None
        try:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.terminate()  # the guard gives it some seconds
                try:
                    async with asyncio.timeout(2 * GRACE_S):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            for stream in self._streams:
                stream.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def last_line(self) -> str:
        """Returns the last line that the program logged; empty: none."""
        lines = self._log_tail.decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:200] if lines else ""

    async def _log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(1 << 16):
            self._log_tail = (self._log_tail + chunk)[-_TAIL_BYTES:]
            os.write(sys.stderr.fileno(), chunk)

    async def _read(
        self, process: asyncio.subprocess.Process, into: Any, logging: asyncio.Task[None]
    ) -> None:
        """Hands on what the program says; when it says no more, the session ends."""
        assert process.stdout is not None
        try:
            async for line in bounded_lines(process.stdout):
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    continue  # programs print what is no message
                await into.send(SessionMessage(message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # the session is over
        await asyncio.wait({logging}, timeout=1)  # which says why
        self.has_ended = not self._is_left
        into.close()

    async def _write(self, process: asyncio.subprocess.Process, outgoing: Any) -> None:
        assert process.stdin is not None
        async for sent in outgoing:
            line = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
            with suppress(ConnectionError):  # it has ended: the reader says so
                process.stdin.write(line.encode() + b"\n")
                await process.stdin.drain()


async def bounded_lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yields the lines that a program prints. Of one over ``MOST_LINE_BYTES`` only the ends are kept: an
    error for the message that it answers comes in its place, or an empty line if it says no id.
    """
    kept, head, is_long = bytearray(), b"", False
    is_first = True
    while chunk := await stream.read(_CHUNK_BYTES):
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            kept += part
            line = too_long(head, bytes(kept)) if is_long else bytes(kept)
            kept, is_long = bytearray(), False
            yield line.removeprefix(codecs.BOM_UTF8) if is_first else line
            is_first = False
        kept += rest
        if is_long:
            del kept[:-_KEPT_BYTES]
        elif len(kept) > MOST_LINE_BYTES:
            head, is_long = bytes(kept[:_KEPT_BYTES]), True
            kept = bytearray(kept[-_KEPT_BYTES:])
    if kept:  # without its end
        yield too_long(head, bytes(kept)) if is_long else bytes(kept)


def too_long(head: bytes, tail: bytes) -> bytes:
    """Returns the error that stands for a message over the limit, by its two ends; empty: it has no id."""
    # A result may hold an "id" of its own
    found = _ID_BEFORE.search(head.partition(b'"result"')[0]) or _ID_AT_END.search(
        tail[-_KEPT_BYTES:]
    )
    if found is None:
        return b""
    why = f"its message has more than {MOST_LINE_BYTES >> 20} MiB"
    error = {"code": -32603, "message": why}
    return json.dumps({"jsonrpc": "2.0", "id": json.loads(found[1]), "error": error}).encode()
