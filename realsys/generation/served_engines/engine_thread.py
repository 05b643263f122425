"""Thread that runs a ``ContinuousEngine``: steps while there is work, commands between two steps.

Uses threads and the engine, no asyncio and no HTTP: embedded.py is its asyncio side.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from realsys.api.errors import WorkerLost
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.engine_requests import GenerationOutput
from realsys.runtime.progress import tick

logger = logging.getLogger(__name__)

_STUCK_WAIT_S = 0.05  # a step that admitted nothing: another event must happen first
_LOAD_EVERY_S = 0.05
_JOIN_S = 10.0

T = TypeVar("T")
Command = Callable[[ContinuousEngine], Any]


@dataclass(frozen=True)
class Load:
    """Current load of the engine."""

    num_running: int = 0
    num_waiting: int = 0
    num_tokens: int = 0


class EngineThread:
    """Owns the engine. ``call`` is thread-safe.

    Args:
        make: makes the engine; called in the thread, so that what it sets up there counts.
        on_outputs: gets what each step gave, in the thread; the engine goes on when it returns.
        on_end: called once, in the thread, when it ends; with the error if there was one.
    """

    def __init__(
        self,
        make: Callable[[], ContinuousEngine],
        *,
        on_outputs: Callable[[list[GenerationOutput]], None],
        on_end: Callable[[WorkerLost | None], None],
    ) -> None:
        self._make, self._on_outputs, self._on_end = make, on_outputs, on_end
        self._commands: queue.SimpleQueue[tuple[Command, Future[Any], bool] | None]
        self._commands = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="generation engine", daemon=True)
        self._closing = threading.Lock()
        self._over: WorkerLost | None = None
        self._load_published_s = 0.0
        self.paused = False  # set by commands
        self.load = Load()

    def start(self) -> None:
        """Makes the engine in the background: the first ``call`` waits for it."""
        self._thread.start()

    def call(self, command: Callable[[ContinuousEngine], T], *, fatal: bool = False) -> Future[T]:
        """Runs ``command`` between two steps.

        Args:
            fatal: if it fails, the engine's state is not to be trusted: the thread ends.
        """
        future: Future[T] = Future()
        with self._closing:  # otherwise a command could arrive after the last check
            if self._over is not None:
                future.set_exception(self._over)
            else:
                self._commands.put((command, future, fatal))
        return future

    def stop(self) -> None:
        """Ends the thread after its current step."""
        self._commands.put(None)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            logger.warning("engine thread did not end in_s=%g", _JOIN_S)

    def _main(self) -> None:
        error: WorkerLost | None = None
        try:
            self._run(self._make())
        except BaseException as failure:  # outermost frame: raised to all waiting callers
            logger.exception("engine ended")
            error = _lost(f"the engine failed: {type(failure).__name__}: {failure}")
        with self._closing:
            self._over = error or _lost("the engine was closed")
            self._fail_pending(self._over)
        self._on_end(error)

    def _run(self, engine: ContinuousEngine) -> None:
        idle_s: float | None = None
        while self._run_commands(engine, idle_s):
            idle_s = self._step(engine)
            self._publish_load(engine, now=idle_s != 0)

    def _step(self, engine: ContinuousEngine) -> float | None:
        """Runs a step; returns how long to wait for a command: 0, a moment, or without limit (None)."""
        if self.paused or not engine.num_running + engine.num_waiting:
            return None
        outputs = engine.step()
        tick()
        if outputs:
            self._on_outputs(outputs)
        return 0.0 if outputs or engine.num_long else _STUCK_WAIT_S

    def _run_commands(self, engine: ContinuousEngine, wait_s: float | None) -> bool:
        """Runs pending commands; False if asked to end."""
        try:
            entry = (
                self._commands.get(timeout=wait_s) if wait_s != 0 else self._commands.get_nowait()
            )
            while entry is not None:
                self._run_one(engine, *entry)
                entry = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _run_one(
        self, engine: ContinuousEngine, command: Command, future: Future[Any], fatal: bool
    ) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = command(engine)
        except Exception as error:  # any error is the caller's
            future.set_exception(error)
            if fatal:
                raise
        else:
            future.set_result(result)

    def _publish_load(self, engine: ContinuousEngine, *, now: bool) -> None:
        if now or time.monotonic() - self._load_published_s > _LOAD_EVERY_S:
            self._load_published_s = time.monotonic()
            self.load = Load(engine.num_running, engine.num_waiting, engine.num_tokens)

    def _fail_pending(self, over: WorkerLost) -> None:
        for _, future, _ in _drain(self._commands):
            if future.set_running_or_notify_cancel():
                future.set_exception(over)


def _drain(
    commands: queue.SimpleQueue[tuple[Command, Future[Any], bool] | None],
) -> Iterable[tuple[Command, Future[Any], bool]]:
    while True:
        try:
            entry = commands.get_nowait()
        except queue.Empty:
            return
        if entry is not None:
            yield entry


def _lost(why: str) -> WorkerLost:
    return WorkerLost(
        why, where="generation engine", fix="see this worker's log; the worker is restarted"
    )
