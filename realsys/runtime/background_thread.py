"""Threads with an owner, who starts them, tells them to end, waits for them, and hears why one failed.

For work that looks again and again (``BackgroundThread``) or serves from an event loop
(``EventLoopThread``); threads that a queue or a socket ends are their owners' own. All are daemons: one
that hangs in the store or a file system must not keep its process alive.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from realsys.api.errors import InternalError

STOP_S = 5.0
READY_S = 10.0

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


class EventLoopThread:
    """Runs one coroutine in an event loop on a thread of its own.

    Args:
        serve: gets a function to call once it serves; ``start`` returns then.
        on_end: as a BackgroundThread's.
    """

    def __init__(
        self,
        serve: Callable[[Callable[[], None]], Coroutine[Any, Any, None]],
        *,
        name: str,
        on_end: Callable[[BaseException | None], None] = lambda failure: None,
    ) -> None:
        self._serve, self._on_end = serve, on_end
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = BackgroundThread(self._run, name=name, on_end=self._over)

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread, if it did not end because it was told to."""
        return self._thread.failure

    def start(self) -> None:
        """Returns once it serves, or has failed.

        Raises:
            InternalError: neither has happened in 10 s.
        """
        self._thread.start()
        if not self._ready.wait(READY_S):
            raise InternalError(f"it did not start in {READY_S:g} s", where=self._thread.name)

    def stop(self) -> None:
        """Cancels the coroutine and waits for the thread."""
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.stop()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        await self._serve(self._ready.set)

    def _over(self, failure: BaseException | None) -> None:
        self._ready.set()
        self._on_end(failure)
