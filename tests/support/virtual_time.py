"""An event loop in virtual time: waits cost nothing, and a busy machine changes nothing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualTime(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next thing that is due instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__(_NoWait(self))
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s


class _NoWait(selectors.SelectSelector):
    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits for somebody and nothing is due"
        self.loop.now_s += max(timeout, 0.0)
        return super().select(0)


def run_virtually(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs ``coroutine`` as ``asyncio.run`` does, in virtual time; without sockets, threads, processes."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(coroutine)
