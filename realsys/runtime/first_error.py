"""Several tasks together: the first failure as itself, not as a group; the first that ends; all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

logger = logging.getLogger(__name__)


@asynccontextmanager
async def first_error() -> AsyncIterator[None]:
    """Wraps a task group: raises its first error without the exception groups around it."""
    try:
        yield
    except BaseExceptionGroup as failures:
        error: BaseException = failures
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def first_of(waits: dict[str, Coroutine[Any, Any, Any]]) -> None:
    """Waits until one of them ends; raises what it raised. The others are cancelled."""
    tasks = [asyncio.create_task(wait, name=name) for name, wait in waits.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        logger.info("leaving because=%s", task.get_name())
        task.result()


async def all_of(waits: Iterable[Awaitable[Any]]) -> None:
    """Waits for all of them, whichever fails; then raises the first one's error."""
    for ended in await asyncio.gather(*waits, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
