"""A third-party server (SGLang, vLLM) as a child process: start, wait until it serves, end.

It is not restarted here when it ends: then this worker can't serve, and the supervisor restarts the worker.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from realsys.api.errors import RealsysError, WaitTimeout, WorkerLost
from realsys.runtime.progress import tick

START_TIMEOUT_S = 600.0  # a large model from a slow file system
_POLL_S = 0.25
_END_S = 15.0
_TAIL_BYTES = 64 * 1024
_MAX_LINE_CHARS = 400
# Formats in which Python programs and argparse report their failure, after prefixes of loggers and vLLM.
_REASON = re.compile(r"(?:^|[\s)\]])((?:[A-Za-z_][\w.]*(?:Error|Exception)|error): \S.*)$")
_POINTER = "root cause"  # lines that only point elsewhere

# Starts a child so that it ends with this process (set by the generation server's build).
Guard = Callable[[Sequence[str]], list[str]]


class ChildServer:
    """One child process; within one event loop.

    Args:
        argv: program and arguments; no secret in them.
        name: for errors, e.g. ``SGLang of generation_server/0``.
        log: file to which its output is appended, readable by this user only.
        env: environment variables in addition to this process's.
        guard: makes the command that is actually started.
    """

    def __init__(
        self, argv: Sequence[str], *, name: str, log: Path, env: Mapping[str, str], guard: Guard
    ) -> None:
        self._argv, self.name, self._log, self._env = list(argv), name, log, dict(env)
        self._guard = guard
        self._process: subprocess.Popen[bytes] | None = None

    async def start(
        self, healthy: Callable[[], Awaitable[bool]], *, timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """Starts the process and waits until it is healthy.

        Raises:
            WorkerLost: it ended. WaitTimeout: it was not healthy in time. Both quote its last output.
        """
        self._spawn()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            self.check()
            with suppress(RealsysError):  # not written yet
                if await healthy():
                    return
            if loop.time() > deadline_s:
                raise WaitTimeout(
                    f"{self.name} was not healthy in {timeout_s:g} s; last output: {self._last_log_line()}",
                    where=str(self._log),
                    fix="raise schedule.server_args.start_timeout_s if it is only slow",
                )
            tick()  # the child is a separate process, and there is a deadline
            await asyncio.sleep(_POLL_S)

    def check(self) -> None:
        """Raises WorkerLost if the process has ended."""
        if self._process is None:
            raise WorkerLost(f"{self.name} was not started", where=str(self._log), fix="start it")
        code = self._process.poll()
        if code is not None:
            raise WorkerLost(
                f"{self.name} ended with status {code}: {self._last_log_line()}",
                where=str(self._log),
                fix=f"see its log; it was started by {self._argv[0]} with schedule.server_args",
            )

    def _last_log_line(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"(its log can't be read: {error})"
        return failure_line(text.splitlines()) or "(nothing)"

    async def close(self) -> None:
        """Ends the process and all its descendants."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()  # the guard allows it some seconds
        for _ in range(int(_END_S / _POLL_S)):
            if process.poll() is not None:
                return
            await asyncio.sleep(_POLL_S)
        process.kill()
        await asyncio.get_running_loop().run_in_executor(None, process.wait)

    def _spawn(self) -> None:
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # From the main thread, which runs the event loop: the child is tied to the starting thread.
            self._process = subprocess.Popen(
                self._guard(self._argv),
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                start_new_session=True,  # a Ctrl-C in the terminal is handled by this process
            )
        except OSError as error:
            raise WorkerLost(
                f"{self.name} can't be started: {error}", where=self._argv[0], fix="install it"
            ) from None
        finally:
            os.close(descriptor)


def failure_line(lines: Sequence[str]) -> str:
    """Returns the log line that explains why a program ended: the last error, or the last line.

    >>> last_words(["Traceback …", "(EngineCore pid=7) ValueError: no such dtype",
    ...             "(APIServer pid=6) RuntimeError: it failed. See root cause above."])
    'ValueError: no such dtype'
    """
    reasons = [m[1] for line in lines if (m := _REASON.search(line)) and _POINTER not in line]
    spoken = reasons or [line.strip() for line in lines if line.strip()]
    return spoken[-1][:_MAX_LINE_CHARS] if spoken else ""


def options(args: Mapping[str, Any]) -> list[str]:
    """Converts arguments to command-line options; False and None are left out.

    >>> options({"max_x": 3, "flag": True, "of": ["a", "b"]})
    ['--max-x', '3', '--flag', '--of', 'a', 'b']
    """
    words: list[str] = []
    for name, value in args.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]
    return words
