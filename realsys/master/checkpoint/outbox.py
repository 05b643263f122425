"""Queue of what the master has to publish, in order, while it may not publish.

An uncertain lease, or an unavailable store, must not stop computing: rows of steps, and checkpoints and
models that are written but not yet renamed into place, wait here and are published in order as soon as
the lease is valid and the store answers. publication.py does the publishing; one item at a time. Nothing
here survives the process: what was not published never happened.
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
    """One item to publish.

    Attributes:
        what: description for logs and errors.
        withdraw: called instead of ``publish`` if a newer item replaces it.
    """

    what: str
    publish: Publish
    withdraw: Callable[[], None] | None = None


@dataclass
class Outbox:
    """Belongs to one event loop.

    Args:
        may_publish: whether our lease is valid; raises LeaseLost if it has expired.
        patience_s: time limit of ``drain``.
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
        """Queues ``publish``, which is called once everything queued before is published.

        It raises StoreUnavailable to be called again. An item with ``withdraw`` replaces the previous
        one with ``withdraw``: of waiting checkpoints, the newest suffices.
        """
        if withdraw is not None:
            self._withdraw()
        self._waiting.append(Waiting(what, publish, withdraw))

    async def flush(self) -> bool:
        """Publishes what may be published now; returns False if something is left."""
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
        """Publishes everything, waiting for the store for up to ``patience_s``.

        Raises:
            WaitTimeout: it was unavailable for longer.
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
        """Publishes waiting items as soon as possible, also during a long step; until cancelled."""
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
