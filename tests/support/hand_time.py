"""Time that goes on only when a test says so, for code whose threads wait for it.

hands = HandTime()
monkeypatch.setattr(module, "time", hands)
monkeypatch.setattr(module, "threading", hands.threading)
hands.passes(3.0)  # whatever is due in three seconds has been done, however busy the machine is
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

PATIENCE_S = 60.0  # of the machine's time
LATE_S = 1e-6  # no wait ends before its time, nor at it


@dataclass(eq=False)
class _Wait:
    due_s: float
    of: object
    is_over: bool = False


class HandTime:
    """Stands for ``time``, and its ``threading`` for that module: threads made with it wait."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._threads: list[threading.Thread] = []
        self._waits: list[_Wait] = []
        self._lock = threading.Condition(threading.RLock())
        hands = self

        class Condition:
            def __enter__(self) -> None:
                hands._lock.__enter__()

            def __exit__(self, *exc_info: object) -> None:
                hands._lock.__exit__(None, None, None)

            def wait(self, timeout_s: float) -> None:
                hands._wait(timeout_s, self)

            def notify_all(self) -> None:
                hands._end(lambda wait: wait.of is self)

        self.threading = SimpleNamespace(
            Condition=Condition,
            Thread=self._thread,
            current_thread=threading.current_thread,
        )

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self._wait(seconds, None)

    def passes(self, seconds: float) -> None:
        """Returns when the threads have done what is due in this time, and wait for more of it."""
        with self._lock:
            ends_s = self.now_s + seconds
            while True:
                self._until_all_wait()
                due_s = min((wait.due_s for wait in self._waits), default=ends_s)
                if due_s > ends_s or not self._waits:
                    self.now_s = ends_s
                    return
                self.now_s = max(self.now_s, due_s + LATE_S)
                self._end(lambda wait: wait.due_s <= self.now_s)

    def jumps(self, seconds: float) -> None:
        """As for a process that stood still meanwhile: its threads have done nothing."""
        with self._lock:
            self._until_all_wait()
            self.now_s += seconds

    def _until_all_wait(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while sum(thread.is_alive() for thread in self._threads) > len(self._waits):
            assert time.monotonic() < deadline_s, "a thread does something else than to wait"
            self._lock.wait(0.002)  # a thread's end is not told

    def _thread(self, **options: Any) -> threading.Thread:
        self._threads.append(threading.Thread(**options))
        return self._threads[-1]

    def _wait(self, seconds: float, of: object) -> None:
        with self._lock:
            wait = _Wait(self.now_s + seconds, of)
            self._waits.append(wait)
            self._lock.notify_all()
            while not wait.is_over:
                self._lock.wait()

    def _end(self, which: Callable[[_Wait], bool]) -> None:
        with self._lock:
            for wait in filter(which, list(self._waits)):
                wait.is_over = True
                self._waits.remove(wait)
            self._lock.notify_all()
