"""Pauses between requests to a server that is busy, until their time is over."""

from __future__ import annotations

import asyncio

FIRST_S, LONGEST_S = 0.2, 5.0


class ServerBusy(Exception):
    """A server may be asked again; ``why`` it did not answer."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class RetryPauses:
    """Pauses that double; made at the first request.

    Args:
        limit_s: in which the last request must begin, seconds.
    Attributes:
        ends_s: when that is over, by the event loop's clock.
    """

    def __init__(self, limit_s: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self.ends_s = self._clock() + limit_s
        self._next_s = FIRST_S

    async def pause(self) -> bool:
        """Waits before the next request. Returns False, at once, if it would come too late."""
        if self._clock() + self._next_s > self.ends_s:
            return False
        await asyncio.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, LONGEST_S)
        return True
