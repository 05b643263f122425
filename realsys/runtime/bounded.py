"""Calls that may hang in the store or a file system, kept within a time. For heartbeat_process.py."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


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
