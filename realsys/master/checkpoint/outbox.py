"""What the master has ready for others to see, in order, while it may not show it.

A lease in doubt, or a store that is away, must not stop computing: rows of steps, checkpoints and models
that are written but not named yet wait here, and are published in their order as soon as the lease is
held and the store answers. What is published, and what guards it, is publication.py's; only one thing is
published at a time. Nothing here survives the process: what was not published never happened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from realsys.api.errors import StoreUnavailable, WaitTimeout

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
Publish = Callable[[], Awaitable[object]]


@dataclass(eq=False)
class Waiting:
    """One thing to be published.

    Attributes:
        what: for people.
        withdraw: called instead of ``publish`` when something newer takes its place.
    """

    what: str
    publish: Publish
    withdraw: Callable[[], None] | None = None


@dataclass
class Outbox:
    """Belongs to one event loop.

    Args:
        may_publish: whether our lease is held; raises LeaseLost when it is over.
        patience_s: for ``drain``.
    """

    may_publish: Callable[[], bool]
    patience_s: float
    _waiting: deque[Waiting] = field(default_factory=deque)
    _publishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _since_s: float | None = None  # when it began to wait, on the monotonic clock
    _trouble: str = ""
    _failure: Exception | None = None  # of ``run``, for the next caller

    def __len__(self) -> int:
        return len(self._waiting)

    def put(
        self, what: str, publish: Publish, *, withdraw: Callable[[], None] | None = None
    ) -> None:
        """``publish`` comes when all that was put before is published.

        It raises StoreUnavailable to be called again. One with ``withdraw`` takes the place of the one
        before it that has one: of checkpoints that wait, the newest is enough.
        """
        if withdraw is not None:
            self._withdraw()
        self._waiting.append(Waiting(what, publish, withdraw))

    async def flush(self) -> bool:
        """Publishes what may be published now; False when something is left."""
        async with self._publishing:
            if self._failure is not None:
                raise self._failure
            while self._waiting:
                if not self.may_publish():
                    self._note("our lease is in doubt")
                    return False
                try:
                    await self._waiting[0].publish()
                except StoreUnavailable as error:
                    self._note(error.what)
                    return False
                self._waiting.popleft()
            if self._since_s is not None:
                waited_s = time.monotonic() - self._since_s
                logger.info("published what had waited seconds=%.1f", waited_s)
            self._since_s = None
            return True

    async def drain(self) -> None:
        """Publishes all, however long the store is away within our patience.

        Raises:
            WaitTimeout: it was away for longer.
        """
        deadline_s = time.monotonic() + self.patience_s
        while not await self.flush():
            if time.monotonic() > deadline_s:
                more = f" and {len(self) - 1} more" if len(self) > 1 else ""
                raise WaitTimeout(
                    f"{self._waiting[0].what}{more} could not be published for "
                    f"{self.patience_s:g} s: {self._trouble}",
                    where="the master",
                    fix="look whether the name-resolution store answers (realsys doctor), then resume",
                )
            await asyncio.sleep(LOOK_EVERY_S)

    async def run(self) -> None:
        """Publishes what waits as soon as it may, also in the middle of a long step; until cancelled."""
        while self._failure is None:
            await asyncio.sleep(LOOK_EVERY_S)
            if not self._waiting or self._publishing.locked():
                continue
            try:
                await self.flush()
            except Exception as error:  # told by whoever publishes next: the loop that owns us
                self._failure = error

    def _withdraw(self) -> None:
        # What is being published right now is none of these: publishing holds the lock and the head.
        busy = self._waiting[0] if self._publishing.locked() and self._waiting else None
        for old in [w for w in self._waiting if w.withdraw is not None and w is not busy]:
            self._waiting.remove(old)
            assert old.withdraw is not None
            old.withdraw()

    def _note(self, trouble: str) -> None:
        self._trouble = trouble
        if self._since_s is None:
            self._since_s = time.monotonic()
            logger.warning(
                "going on without publishing why=%s first=%s", trouble, self._waiting[0].what
            )
