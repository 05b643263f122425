"""Program of an MCP server as a transport of the SDK's: started here, a line of stdin or stdout a message.

Unlike the SDK's own, it ends with this process, however that ends; reads lines of bounded length; and
knows the last line that the program logged.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from realsys.runtime.child_processes.child_guard import GRACE_S, guarded

MOST_LINE_BYTES = 32 << 20
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
            limit=MOST_LINE_BYTES,
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
            while line := await process.stdout.readline():
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    continue  # programs print what is no message
                await into.send(SessionMessage(message))
        except ValueError:  # a line over the limit, of which the end is not found
            process.terminate()
            self._log_tail = f"its message has more than {MOST_LINE_BYTES >> 20} MiB".encode()
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
