"""The first failure of several tasks, as itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def first_error() -> AsyncIterator[None]:
    """Around a task group: raises the group's first error without the groups that it comes in."""
    try:
        yield
    except BaseExceptionGroup as failures:
        error: BaseException = failures
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
