"""Polls the store in a thread, so that an unavailable store never blocks the caller.

For the supervisor: it must notice the end of tasks, and signals, also while etcd is away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from realsys.api.errors import StoreError
from realsys.runtime.background_thread import BackgroundThread

logger = logging.getLogger(__name__)
T = TypeVar("T")

OVERDUE_S = 3.0


@dataclass(frozen=True)
class Poll(Generic[T]):
    """Result of one poll; ``value`` is None if the store did not answer."""

    asked_s: float  # on the monotonic clock
    answered_s: float
    value: T | None


class StorePoller(Generic[T]):
    """Calls ``read`` every ``every_s`` between ``start`` and ``stop``; StoreError means no answer.

    All pollers of a process run at the same moments, so that a folder store asks its server once for all.

    Args:
        name: of the thread, and of the value in log lines.
    """

    def __init__(self, read: Callable[[], T], *, every_s: float, name: str) -> None:
        self._read, self._every_s, self._name = read, every_s, name
        self._lock = threading.Lock()
        self._newest: Poll[T] | None = None
        self._returned_s = time.monotonic()
        self._thread = BackgroundThread(self._run, name=f"poll {name}")

    def start(self) -> StorePoller[T]:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread after its current poll; abandons one that hangs."""
        self._thread.stop(wait_s=OVERDUE_S)

    def latest(self) -> Poll[T] | None:
        """Returns the newest poll, once; one without a value if there was none for too long; else None."""
        with self._lock:
            poll, self._newest = self._newest, None
            now_s = time.monotonic()
            if poll is None and now_s - self._returned_s > self._every_s + OVERDUE_S:
                poll = Poll(now_s, now_s, None)
            if poll is not None:
                self._returned_s = now_s
        return poll

    def _run(self) -> None:
        while not self._thread.is_ending:
            asked_s = time.monotonic()
            try:
                value: T | None = self._read()
            except StoreError as error:
                logger.warning("reading failed what=%s error=%s", self._name, error.what)
                value = None
            except (
                Exception
            ):  # outermost frame: a dead thread would look like an outage of the store
                logger.exception("reading failed what=%s", self._name)
                value = None
            with self._lock:
                self._newest = Poll(asked_s, time.monotonic(), value)
            self._thread.pause(self._every_s - time.monotonic() % self._every_s)
