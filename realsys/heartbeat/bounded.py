"""Time limits for calls that may hang in the store or a file system. For heartbeat_process.py."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


def within(timeout_s: float, task: Callable[[], object]) -> None:
    """Runs ``task`` in a thread and abandons it if it hangs. Its errors are logged."""

    def run() -> None:
        try:
            task()
        except Exception:  # outermost frame of the thread
            logger.exception("heartbeat failed")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
