"""Places of a judge's requests: so many run at a time in a process, in line, whichever event loop asks."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_Waiting = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class JudgePlaces:
    """Places that requests of several event loops, in several threads, hold and wait for.

    A semaphore of asyncio belongs to one loop: with two loops by turns it would be made anew each time, and
    nobody would wait for whom another loop has admitted.

    Args:
        number: of requests that hold one at the same time.
    """

    def __init__(self, number: int) -> None:
        self._lock = threading.Lock()
        self._free, self._waiting = number, deque[_Waiting]()

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return len(self._waiting)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Waits in line for a place, and holds it."""
        await self._take()
        try:
            yield
        finally:
            self._give_back()

    async def _take(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free:
                self._free -= 1
                return
            given = loop.create_future()
            self._waiting.append((loop, given))
        try:
            await given
        except asyncio.CancelledError:
            if given.cancelled():
                with self._lock, suppress(ValueError):
                    self._waiting.remove((loop, given))
            else:  # it was just given one
                self._give_back()
            raise

    def _give_back(self) -> None:
        """Hands the place to who waits longest; a loop that has ended does not wait any more."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                loop, given = self._waiting.popleft()
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._give, given)
                return

    def _give(self, given: asyncio.Future[None]) -> None:
        if given.done():  # cancelled meanwhile
            self._give_back()
        else:
            given.set_result(None)
