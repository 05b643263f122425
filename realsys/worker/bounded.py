"""Calls that may hang or fail in the store or a file system, kept within a time. For heartbeat.py."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from realsys.api.errors import StoreUnavailable

logger = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 0.5


def within(timeout_s: float, task: Callable[[], object]) -> None:
    """Runs ``task`` in a thread and leaves it behind when it hangs. Its errors are logged."""

    def run() -> None:
        try:
            task()
        except Exception:  # outermost frame of the thread
            logger.exception("heartbeat failed")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)


def until_it_answers(task: Callable[[], T], *, timeout_s: float) -> T:
    """Calls ``task`` again while the store is away. Raises its last error after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return task()
        except StoreUnavailable as error:
            if time.monotonic() + RETRY_S > deadline_s:
                raise
            logger.warning("store does not answer error=%s", error.what)
            time.sleep(RETRY_S)
