"""Acquires a lease, renews it in a thread, and reports each change of its status to the owner.

For every process that registers. Two threads: one renews, and acquires the lease again if it was
lost; the other only watches the clock, because a renewal may hang in a file system or network while
the time to stop passes. lease_validity.py defines the statuses; the owner acts on them
(heartbeat/heartbeat_process.py, split_jobs/membership.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Self

from realsys.api.errors import LeaseLost, StaleAttempt, StoreError
from realsys.name_resolve.lease_validity import (
    GIVE_UP_S,
    RENEWALS_PER_TTL,
    LeaseStatus,
    LeaseValidity,
    ProcessPauses,
)
from realsys.name_resolve.store import Lease

logger = logging.getLogger(__name__)

RETRY_S = 0.5
CLOCK_S = 1.0  # interval of reading the clock, to detect that this process was stopped


class LeaseRenewer:
    """Holds a lease between ``start`` and ``stop``.

    Args:
        acquire: grants a lease and puts the owner's keys under it; called again if the store lost it.
            Raises StaleAttempt if the keys no longer belong to the owner.
        name: in thread names, logs and errors, e.g. ``model_worker/3``.
        on_change: gets each new status and its reason, from one of the threads; EXPIRED is the last.
        on_renewed: gets the send time of each acknowledged renewal, and the lease's TTL.
    """

    def __init__(
        self,
        acquire: Callable[[], Lease],
        *,
        name: str,
        on_change: Callable[[LeaseStatus, str], None],
        on_renewed: Callable[[float, float], None] = lambda sent_s, ttl_s: None,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._acquire, self.name = acquire, name
        self._on_change, self._on_renewed = on_change, on_renewed
        self._give_up_s = give_up_s
        self._condition = threading.Condition()
        self._stopping = False
        self._lost = False  # the store has ended it, and no new one is acquired yet
        self._reported = LeaseStatus.VALID
        self._threads = [
            threading.Thread(target=self._renew_loop, name=f"lease-renew {name}", daemon=True),
            threading.Thread(target=self._clock_loop, name=f"lease-clock {name}", daemon=True),
        ]
        self.lease: Lease
        self._validity: LeaseValidity
        self._naps: ProcessPauses

    def start(self) -> Self:
        """Acquires the lease in this thread and renews it from now on. Raises what ``acquire``
        does."""
        sent_s = time.monotonic()
        self.lease = self._acquire()
        self._validity = LeaseValidity(
            self.lease.ttl_s, granted_s=sent_s, give_up_s=self._give_up_s
        )
        self._on_renewed(sent_s, self.lease.ttl_s)
        self._naps = ProcessPauses(time.monotonic(), every_s=CLOCK_S)
        for thread in self._threads:
            thread.start()
        return self

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Ends the threads and revokes the lease. Abandons a hung renewal."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(timeout_s)
        hung = [thread.name for thread in self._threads if thread.is_alive()]
        if hung:
            logger.warning("lease threads abandoned names=%s timeout_s=%g", hung, timeout_s)
        elif not self._lost and self._reported is not LeaseStatus.EXPIRED:
            self.lease.revoke()

    @property
    def lease_status(self) -> LeaseStatus:
        """What the owner may do now."""
        with self._condition:
            return self._current_status(time.monotonic())

    def _renew_loop(self) -> None:
        pause_s = self.lease.ttl_s / RENEWALS_PER_TTL
        while not self._has_ended_after(pause_s):
            sent_s = time.monotonic()
            try:
                self._renew(sent_s)
                pause_s = self.lease.ttl_s / RENEWALS_PER_TTL
            except (LeaseLost, StaleAttempt) as error:
                self._end(error.what)
            except StoreError as error:
                # A failing store does not end the lease; the clock does.
                logger.warning("lease renewal failed name=%s error=%s", self.name, error.what)
                self._validity.last_error = error.what
                pause_s = min(RETRY_S, pause_s)
            except Exception as error:  # without this a dead thread would let the lease expire
                logger.exception("lease renewal failed name=%s", self.name)
                self._end(f"renewing failed: {error!r}")

    def _renew(self, sent_s: float) -> None:
        """Renews once. Raises StoreError to be called again, LeaseLost or StaleAttempt if the lease
        has ended."""
        if not self._lost:
            try:
                self.lease.keep_alive()
            except LeaseLost as error:
                logger.warning("lease lost name=%s reason=%s", self.name, error.what)
                self._lost = True
        if self._lost:
            self._reacquire(sent_s)
        with self._condition:
            self._validity.renewed(sent_s)
            self._condition.notify_all()
        self._on_renewed(sent_s, self.lease.ttl_s)

    def _end(self, reason: str) -> None:
        """Ends the lease regardless of the clock."""
        with self._condition:
            self._validity.end(reason)
            self._condition.notify_all()

    def _reacquire(self, sent_s: float) -> None:
        lease = self._acquire()  # raises StaleAttempt if this process must exit
        with self._condition:
            self.lease, self._lost = lease, False
            self._validity.replaced(lease.ttl_s, granted_s=sent_s)
        logger.warning("lease reacquired name=%s ttl_s=%g", self.name, lease.ttl_s)

    def _clock_loop(self) -> None:
        while True:
            with self._condition:
                now_s = time.monotonic()
                lease_status = self._current_status(now_s)
                left_s = min(self._validity.next_change_s(now_s) or CLOCK_S, CLOCK_S)
                stopping = self._stopping
            if stopping:
                return
            if lease_status is not self._reported:
                self._report(lease_status)
            if lease_status is LeaseStatus.EXPIRED:
                return
            self._has_ended_after(left_s)

    def _current_status(self, now_s: float) -> LeaseStatus:
        """Called with the condition held."""
        self._naps.awake(now_s)
        return self._validity.lease_status(
            now_s, paused_s=self._naps.since(self._validity.renewed_s)
        )

    def _report(self, lease_status: LeaseStatus) -> None:
        self._reported = lease_status
        reason = self._validity.reason
        level = logging.INFO if lease_status is LeaseStatus.VALID else logging.ERROR
        logger.log(level, "lease %s name=%s reason=%s", lease_status, self.name, reason)
        try:
            self._on_change(lease_status, reason)
        except Exception:  # outermost frame of the thread: the owner's error must be seen
            logger.exception("on_change failed name=%s", self.name)

    def _has_ended_after(self, pause_s: float) -> bool:
        """Waits ``pause_s``, or until something changes; returns True if there is nothing to renew."""
        with self._condition:
            if not self._stopping and not self._validity.reason and pause_s > 0:
                self._condition.wait(pause_s)
            return self._stopping or bool(self._validity.reason)
