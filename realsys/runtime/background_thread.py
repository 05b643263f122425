"""Threads with an owner, which starts and stops them, waits for them, and learns why one failed.

For work that polls (``BackgroundThread``) or serves from an event loop (event_loop_thread.py, apart so that
a heartbeat process need not load asyncio). Threads that end through a queue or a socket belong to their
owners. All are daemons: one that hangs in the store or a file system must not keep its process alive.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

STOP_S = 5.0

logger = logging.getLogger(__name__)


class BackgroundThread:
    """Runs ``work``, which returns soon once ``is_ending``.

    Args:
        on_end: called on the thread when it ends, with what made it fail, or None. Without it a failure is
            for ``threading.excepthook``.
    """

    def __init__(
        self,
        work: Callable[[], None],
        *,
        name: str,
        on_end: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        self._work, self._on_end = work, on_end
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.name = name
        self.failure: BaseException | None = None

    @property
    def is_ending(self) -> bool:
        """Whether the owner wants the thread to end."""
        return self._ending.is_set()

    def pause(self, seconds: float) -> None:
        """Sleeps on the thread; shorter when it is to end."""
        self._ending.wait(seconds)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, *, wait_s: float = STOP_S) -> None:
        """Tells the thread to end and waits that long; one that hangs is left behind."""
        self._ending.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(wait_s)

    def _main(self) -> None:
        if self._on_end is None:
            self._work()
            return
        try:
            self._work()
        except BaseException as error:  # outermost frame of the thread: told to its owner
            while isinstance(error, BaseExceptionGroup):  # of a task group
                error = error.exceptions[0]
            self.failure = error
            logger.exception("thread failed name=%s", self.name)
        finally:
            self._on_end(self.failure)
