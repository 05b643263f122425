"""Raises the first failure of several tasks as itself, not as a group."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
