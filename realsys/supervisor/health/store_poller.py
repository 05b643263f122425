"""Looks at the store from a thread, so that a store that does not answer never holds up who asks.

For the supervisor: it must see its tasks end, and hear of signals, also while etcd is away.
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
    """What a look found; ``value`` is None when the store did not answer."""

    asked_s: float  # on the monotonic clock
    answered_s: float
    value: T | None


class StorePoller(Generic[T]):
    """Calls ``look`` every ``every_s`` between ``start`` and ``stop``; StoreError means no answer.

    All of a process look at the same moments, so that a store in a folder asks its server once for all.

    Args:
        name: of the thread, and of what can't be read.
    """

    def __init__(self, look: Callable[[], T], *, every_s: float, name: str) -> None:
        self._look, self._every_s, self._name = look, every_s, name
        self._lock = threading.Lock()
        self._newest: Poll[T] | None = None
        self._taken_s = time.monotonic()
        self._thread = BackgroundThread(self._run, name=f"look {name}")

    def start(self) -> StorePoller[T]:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread after its look; one that hangs is left behind."""
        self._thread.stop(wait_s=OVERDUE_S)

    def take(self) -> Poll[T] | None:
        """The newest sight, once; one without a value when there was none for too long; else None."""
        with self._lock:
            sight, self._newest = self._newest, None
            now_s = time.monotonic()
            if sight is None and now_s - self._taken_s > self._every_s + OVERDUE_S:
                sight = Poll(now_s, now_s, None)
            if sight is not None:
                self._taken_s = now_s
        return sight

    def _run(self) -> None:
        while not self._thread.is_ending:
            asked_s = time.monotonic()
            try:
                value: T | None = self._look()
            except StoreError as error:
                logger.warning("%s not readable error=%s", self._name, error.what)
                value = None
            except (
                Exception
            ):  # outermost frame: a thread that died would look like a store's outage
                logger.exception("%s not read", self._name)
                value = None
            with self._lock:
                self._newest = Poll(asked_s, time.monotonic(), value)
            self._thread.pause(self._every_s - time.monotonic() % self._every_s)
