"""A process that stays and runs many agents' episodes; lines of JSON go in and out.

``HostProcess`` starts it with the first episode, and anew after its end: if it dies, so do its episodes.
One in which code is left that did not end when its episodes were cancelled gets a successor, and ends when
its other episodes have. Where one episode is the cause, because it blocks the others, they are dropped, not
failed.
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
MOST_LEFT = 16  # threads and tasks of cancelled episodes in a process, before it gets a successor
SILENT_S = 30.0  # beyond the time for which an episode may hold up the others, without a line
_END_S = 15.0
_LAST_LINES_S = 5.0
_LINE_BYTES = 64 << 20


class HostProcess:
    """Runs episodes in a process, which is started when the first one comes.

    Args:
        argv: the program; started under a guard, so that it ends with this process.
        name: for errors.
        blocked_s: longest that an episode may hold up the others, which the program itself notices.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        log: Path,
        env: Mapping[str, str],
        cwd: Path,
        blocked_s: float = 60.0,
    ) -> None:
        self._argv, self.name, self._log = list(argv), name, log
        self._env, self._cwd, self._silent_s = dict(env), cwd, blocked_s + SILENT_S
        self._current: HostedEpisodes | None = None
        self._starting: asyncio.Task[HostedEpisodes] | None = None
        self._retired: dict[asyncio.Task[None], HostedEpisodes] = {}

    async def run(self, order: Mapping[str, Any], *, timeout_s: float) -> Mapping[str, Any]:
        """Runs an episode; returns its line, with ``result``, ``unusable`` or ``error``.

        Raises:
            WorkerLost: the process has ended. WaitTimeout: the episode did not end, and was cancelled.
            EpisodeDropped: the process was ended because of another episode.
            ConfigError: the process can't be started.
        """
        return await (await self._usable()).run(order, timeout_s=timeout_s)

    async def close(self) -> None:
        """Ends the process and everything that it has started."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        started = [self._current, *self._retired.values()]
        self._current = None
        await asyncio.gather(*(one.close() for one in started if one is not None))
        await asyncio.gather(*self._retired, return_exceptions=True)

    async def _usable(self) -> HostedEpisodes:
        """Returns the process that new episodes go to. All of them wait for one that starts, so that the
        end of the first does not concern the others."""
        current = self._current
        if current is not None and not current.is_over:
            if current.num_left < MOST_LEFT:
                return current
            logger.warning(
                "host replaced host=%s left=%d why=code of cancelled episodes did not end",
                self.name,
                current.num_left,
            )
            self._retire(current)
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start(), name=f"start of {self.name}")
            self._starting.add_done_callback(_retrieve)
        return await asyncio.shield(self._starting)

    def _retire(self, old: HostedEpisodes) -> None:
        """Ends a process when its episodes have ended, each at its time limit at the latest."""
        self._current = None
        task = asyncio.create_task(old.close_when_idle(), name=f"end of {self.name}")
        self._retired[task] = old
        task.add_done_callback(self._retired.pop)
        task.add_done_callback(_retrieve)

    async def _start(self) -> HostedEpisodes:
        old, self._current = self._current, None
        if old is not None:
            await old.close()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
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
        started = HostedEpisodes(process, name=self.name, log=self._log, silent_s=self._silent_s)
        try:
            await started.ready()
        except BaseException:
            await started.close()
            raise
        self._current = started
        return started


class HostedEpisodes:
    """One start of the process, and the episodes that it runs."""

    def __init__(
        self, process: asyncio.subprocess.Process, *, name: str, log: Path, silent_s: float
    ) -> None:
        self._process, self._name, self._log, self._silent_s = process, name, log, silent_s
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Mapping[str, Any]] = loop.create_future()
        self._waiting: dict[str, asyncio.Future[Mapping[str, Any]]] = {"": self._ready}
        self._cancelled: dict[str, asyncio.TimerHandle] = {}  # that have sent no line since
        self._idle = asyncio.Event()
        self._dropped_why = ""  # the process ends through one episode's fault
        self._ending: asyncio.Task[None] | None = None
        self.num_left = 0  # threads and tasks of cancelled episodes that did not end
        self._reader = asyncio.create_task(self._read(), name=name)

    @property
    def is_over(self) -> bool:
        """Whether it takes no more episodes. Its end is seen by the reader: the exit status comes later."""
        return self._reader.done() or self._ending is not None

    async def ready(self) -> None:
        """Waits until it has imported what it runs.

        Raises:
            ConfigError: it has ended instead, as any other would. WaitTimeout: it takes too long.
        """
        done, _ = await asyncio.wait({self._ready}, timeout=START_S)
        del self._waiting[""]
        if not done:
            raise WaitTimeout(
                f"{self._name} was not ready in {START_S:g} s",
                where=str(self._log),
                fix="see it",
            )
        try:
            self._ready.result()
        except WorkerLost as error:
            raise ConfigError(error.what, where=error.where, fix=error.fix) from error

    async def run(self, order: Mapping[str, Any], *, timeout_s: float) -> Mapping[str, Any]:
        """Runs an episode. Raises as ``HostProcess.run`` does.

        One that is over here, since it was cancelled or took too long, is cancelled there, without waiting.
        """
        if self.is_over:
            raise self._ended()
        id_, loop = str(order["id"]), asyncio.get_running_loop()
        self._waiting[id_] = waiting = loop.create_future()
        self._idle.clear()
        self._send(order)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
            if not done:
                raise WaitTimeout(
                    f"the episode was still running after {timeout_s:g} s",
                    where=self._name,
                    fix="raise task.agent_args.timeout_s, or see where the agent hangs",
                )
            line: Mapping[str, Any] = waiting.result()
            return line
        finally:
            if not waiting.done():
                self._send({"cancel": id_})
                self._cancelled[id_] = loop.call_later(self._silent_s, self._silent, id_)
            else:
                waiting.exception()  # of a process that ended with us: nobody else asks for it
            del self._waiting[id_]
            if not self._waiting:
                self._idle.set()

    async def close_when_idle(self) -> None:
        """Ends the process when the last of its episodes has ended."""
        if self._waiting:
            self._idle.clear()
            await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """Ends the process and everything that it has started."""
        await asyncio.shield(self._begin_end())

    def _begin_end(self) -> asyncio.Task[None]:
        """Returns the task that ends the process, which is one for all that want it to end."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name=f"end of {self._name}")
            self._ending.add_done_callback(_retrieve)
        return self._ending

    async def _end(self) -> None:
        for handle in self._cancelled.values():
            handle.cancel()
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        # It ends with the output, and has the log to cut then; others may still hold the output
        await asyncio.wait({self._reader}, timeout=_LAST_LINES_S)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._fail_all()  # where the reader was cancelled before its first step, too

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            async with limited_log(self._log):
                with suppress(ValueError):  # a line over the limit: as if it had ended
                    while line := await self._process.stdout.readline():
                        self._take(json.loads(line))
        finally:
            self._fail_all()

    def _fail_all(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._ended())

    def _take(self, line: Mapping[str, Any]) -> None:
        if "blocked" in line:
            logger.warning("host blocked host=%s why=%s", self._name, line["error"])
            self._dropped_why = f"another episode of its process blocked it: {line['error']}"
        self.num_left = int(line.get("left", self.num_left))
        id_ = str(line.get("blocked") or line.get("id", ""))
        if (handle := self._cancelled.pop(id_, None)) is not None:
            handle.cancel()
        waiting = self._waiting.get(id_)
        if waiting is not None and not waiting.done():
            waiting.set_result(line)

    def _silent(self, id_: str) -> None:
        """Ends a process that no longer runs its event loop, and does not notice it itself."""
        logger.warning("host does not end an episode host=%s episode=%s", self._name, id_)
        self._dropped_why = f"another episode of its process did not end when cancelled: {id_}"
        self._begin_end()

    def _ended(self) -> RolloutError | WorkerLost:
        """Returns the error of an episode whose process has ended."""
        where, fix = str(self._log), "see its log"
        if self._dropped_why:
            return EpisodeDropped(self._dropped_why, where=where, fix=fix)
        what = f"{self._name} has ended: {last_log_line(self._log)}"
        return WorkerLost(what, where=where, fix=fix)

    def _send(self, order: Mapping[str, Any]) -> None:
        """Writes an order. The program reads in a thread of its own, so that nothing piles up here."""
        assert self._process.stdin is not None
        with suppress(ConnectionError, RuntimeError):  # it has ended: the reader tells
            self._process.stdin.write(json.dumps(order, default=str).encode() + b"\n")


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Marks the error of a task that nobody may wait for any more as seen."""
    if not task.cancelled():
        task.exception()
