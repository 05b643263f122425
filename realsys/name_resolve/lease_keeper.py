"""Renews a lease from a thread, and tells its owner when it can't any more (self-fencing).

For every process that registers. Two threads: one renews at a third of the ttl; the other only watches
the clock, because a renewal may hang in a file system or a network while the time to stop passes. Time
counts from the moment an acknowledged renewal was *sent*: others count from no earlier, so the holder
stops before they take over. What stopping means is the owner's business (worker/).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Self

from realsys.api.errors import LeaseLost, StoreError
from realsys.name_resolve.store import Lease

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """Keeps ``lease`` alive between ``start`` and ``stop``.

    Args:
        lease: just granted or renewed.
        name: in thread names, logs and errors, e.g. ``model_worker/3``.
        on_lost: called once, from one of the threads, with the reason in a sentence.
        margin_s: stop this long before the ttl is over; a fifth of it unless told.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        name: str,
        on_lost: Callable[[str], None],
        margin_s: float | None = None,
    ) -> None:
        self._lease, self.name, self._on_lost = lease, name, on_lost
        self._fence_after_s = lease.ttl_s - (lease.ttl_s / 5 if margin_s is None else margin_s)
        self._renew_every_s = lease.ttl_s / 3
        self._retry_every_s = min(0.5, lease.ttl_s / 10)
        self._condition = threading.Condition()
        self._stopping = False
        self.last_renewed_s = time.monotonic()  # when the last acknowledged renewal was sent
        self.lost_reason: str | None = None
        self._threads = [
            threading.Thread(target=self._renew_loop, name=f"lease-renew {name}", daemon=True),
            threading.Thread(target=self._fence_loop, name=f"lease-fence {name}", daemon=True),
        ]

    def start(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self, *, revoke: bool = True, timeout_s: float = 5.0) -> None:
        """Ends the threads, and the lease unless ``revoke`` is off. A hung renewal is left behind."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(timeout_s)
        hung = [thread.name for thread in self._threads if thread.is_alive()]
        if hung:
            logger.warning("lease threads left behind names=%s timeout_s=%g", hung, timeout_s)
        elif revoke and self.lost_reason is None:
            self._lease.revoke()

    def check(self) -> None:
        """Raises LeaseLost if the lease is lost: ask before each side effect that matters."""
        if self.lost_reason is not None:
            raise LeaseLost(
                self.lost_reason,
                where=self.name,
                fix="stop side effects and exit; the supervisor decides what comes next",
            )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _renew_loop(self) -> None:
        pause_s = self._renew_every_s
        while not self._is_over(pause_s):
            sent_s = time.monotonic()
            try:
                self._lease.keep_alive()
            except LeaseLost as error:
                self._lose(error.what)
            except StoreError as error:
                # The store's trouble is not ours yet: try on until the fence falls.
                logger.warning("lease renewal failed name=%s error=%s", self.name, error.what)
                pause_s = self._retry_every_s
            except Exception as error:  # a thread that died silently would let the lease run out
                logger.exception("lease renewal failed name=%s", self.name)
                self._lose(f"renewing failed: {error!r}")
            else:
                pause_s = self._renew_every_s
                with self._condition:
                    self.last_renewed_s = sent_s
                    self._condition.notify_all()

    def _fence_loop(self) -> None:
        while True:
            with self._condition:
                left_s = self.last_renewed_s + self._fence_after_s - time.monotonic()
            if left_s <= 0:
                self._lose(
                    f"the lease could not be renewed for {self._fence_after_s:.1f} s "
                    f"(ttl {self._lease.ttl_s:g} s)"
                )
            if self._is_over(left_s):
                return

    def _is_over(self, pause_s: float) -> bool:
        """Waits ``pause_s``, or less if something happened; True when the thread must end."""
        with self._condition:
            if not self._stopping and self.lost_reason is None and pause_s > 0:
                self._condition.wait(pause_s)
            return self._stopping or self.lost_reason is not None

    def _lose(self, reason: str) -> None:
        with self._condition:
            if self._stopping or self.lost_reason is not None:
                return
            self.lost_reason = reason
            self._condition.notify_all()
        logger.error("lease lost name=%s reason=%s", self.name, reason)
        try:
            self._on_lost(reason)
        except Exception:  # outermost frame of the thread: the owner's error must be seen
            logger.exception("on_lost failed name=%s", self.name)
