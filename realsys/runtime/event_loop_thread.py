"""An event loop on a thread of its own, with an owner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from realsys.api.errors import InternalError
from realsys.runtime.background_thread import BackgroundThread

READY_S = 10.0


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
