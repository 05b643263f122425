"""A process that stays and runs many agents' episodes; lines of JSON go in and out.

If it dies, so do its episodes, and the next one starts it anew. Where one episode is the cause, because it
blocks the others or does not end when it should, the others are dropped, not failed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from realsys.api.errors import ConfigError, RolloutError, WaitTimeout, WorkerLost
from realsys.rollout.runners.episode_outcome import EpisodeDropped
from realsys.runtime.child_processes.child_guard import guarded
from realsys.runtime.child_processes.log_limit import limited_log
from realsys.trial.last_lines import last_log_line

logger = logging.getLogger(__name__)

START_S = 300.0  # imports of agents' libraries on a slow file system
CANCEL_S = 5.0
_END_S = 15.0
_LAST_LINES_S = 5.0
_LINE_BYTES = 64 << 20


class HostProcess:
    """Starts the program when the first episode comes.

    Args:
        argv: the program; started under a guard, so that it ends with this process.
        name: for errors.
    """

    def __init__(
        self, argv: Sequence[str], *, name: str, log: Path, env: Mapping[str, str], cwd: Path
    ) -> None:
        self._argv, self.name, self._log = list(argv), name, log
        self._env, self._cwd = dict(env), cwd
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[Mapping[str, Any]]] = {}
        self._starting = asyncio.Lock()
        self._dropped_why = ""  # the process ends through one episode's fault

    async def run(self, order: Mapping[str, Any], *, timeout_s: float) -> Mapping[str, Any]:
        """Runs an episode; returns its line, with ``result`` or ``error``.

        Raises:
            WorkerLost: the process has ended. WaitTimeout: the episode did not end, and was cancelled.
            EpisodeDropped: the process was ended because of another episode.
        """
        await self._ensure()
        id_ = str(order["id"])
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[id_] = waiting
        try:
            await self._send(order)
            done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
            if done:
                line: Mapping[str, Any] = waiting.result()
                return line
            await self._cancel(id_, waiting)
            raise WaitTimeout(
                f"the episode was still running after {timeout_s:g} s",
                where=self.name,
                fix="raise task.agent_args.timeout_s, or see where the agent hangs",
            )
        except asyncio.CancelledError:
            await self._cancel(id_, waiting)
            raise
        finally:
            self._waiting.pop(id_, None)
            if waiting.done():
                waiting.exception()  # of a process that ended with us: nobody else asks for it

    async def close(self) -> None:
        """Ends the process and everything that it has started."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(_END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._reader is not None:
            # It ends with the output, and has the log to cut then; others may still hold the output
            await asyncio.wait({self._reader}, timeout=_LAST_LINES_S)
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _ensure(self) -> None:
        async with self._starting:
            # Its end is seen by the reader first: the exit status comes later
            if self._reader is not None and not self._reader.done():
                return
            await self.close()
            self._dropped_why = ""
            self._log.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *guarded(self._argv),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=descriptor,
                    env={**os.environ, **self._env},
                    cwd=self._cwd,
                    start_new_session=True,
                    limit=_LINE_BYTES,
                )
            finally:
                os.close(descriptor)
            ready = asyncio.get_running_loop().create_future()
            self._waiting[""] = ready
            self._reader = asyncio.create_task(self._read(self._process), name=self.name)
            done, _ = await asyncio.wait({ready}, timeout=START_S)
            self._waiting.pop("", None)
            if not done:
                raise WaitTimeout(
                    f"{self.name} was not ready in {START_S:g} s",
                    where=str(self._log),
                    fix="see it",
                )
            try:
                ready.result()
            except WorkerLost as error:  # it can't even start: no other try would
                raise ConfigError(error.what, where=error.where, fix=error.fix) from error

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            async with limited_log(self._log):
                with suppress(ValueError):  # a line over the limit: as if it had ended
                    while line := await process.stdout.readline():
                        self._take(json.loads(line))
        finally:  # also where one episode has had the process ended: the others wait here, too
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(self._ended())

    def _take(self, line: Mapping[str, Any]) -> None:
        if "blocked" in line:
            logger.warning("host blocked host=%s why=%s", self.name, line["error"])
            self._dropped_why = f"another episode of its process blocked it: {line['error']}"
        waiting = self._waiting.get(str(line.get("blocked") or line.get("id", "")))
        if waiting is not None and not waiting.done():
            waiting.set_result(line)

    def _ended(self) -> RolloutError | WorkerLost:
        """Returns the error of an episode whose process has ended."""
        where, fix = str(self._log), "see its log"
        if self._dropped_why:
            return EpisodeDropped(self._dropped_why, where=where, fix=fix)
        what = f"{self.name} has ended: {last_log_line(self._log)}"
        return WorkerLost(what, where=where, fix=fix)

    async def _send(self, order: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # the reader tells
            self._process.stdin.write(json.dumps(order, default=str).encode() + b"\n")
            await self._process.stdin.drain()

    async def _cancel(self, id_: str, waiting: asyncio.Future[Any]) -> None:
        """Ends an episode; a process that does not obey is ended."""
        if self._process is None or self._process.returncode is not None:
            return
        await self._send({"cancel": id_})
        done, _ = await asyncio.wait({waiting}, timeout=CANCEL_S)
        if not done:
            logger.warning("host does not end an episode host=%s episode=%s", self.name, id_)
            self._dropped_why = f"another episode of its process did not end when cancelled: {id_}"
            await self.close()
        elif waiting.exception() is not None:
            logger.info("host ended with its episode host=%s episode=%s", self.name, id_)
