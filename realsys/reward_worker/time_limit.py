"""A time limit on a call that doesn't count the time in which the call waits for reward workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

_limit: ContextVar[asyncio.Timeout | None] = ContextVar("limit", default=None)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """As ``asyncio.timeout``, without the time spent in ``not_counted``."""
    async with asyncio.timeout(seconds) as limit:
        token = _limit.set(limit)
        try:
            yield limit
        finally:
            _limit.reset(token)


@contextmanager
def not_counted() -> Iterator[None]:
    """Stops the time limit around this task while the block runs."""
    limit = _limit.get()
    ends_s = limit.when() if limit is not None else None
    if limit is None or ends_s is None or limit.expired():
        yield
        return
    clock = asyncio.get_running_loop().time
    left_s = ends_s - clock()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(clock() + left_s)
