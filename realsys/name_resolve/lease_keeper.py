"""Takes a lease, renews it from a thread, and tells its owner each change of standing.

For every process that registers. Two threads: one renews, and takes the lease anew when it has ended; the
other only watches the clock, because a renewal may hang in a file system or a network while the time to
stop passes. What the standings mean is lease_judge.py's, what follows from them is the owner's business
(heartbeat/heartbeat_process.py, split_jobs/membership.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Self

from realsys.api.errors import LeaseLost, StaleAttempt, StoreError
from realsys.name_resolve.lease_judge import (
    GIVE_UP_S,
    RENEWALS_PER_TTL,
    LeaseStatus,
    LeaseValidity,
    Naps,
)
from realsys.name_resolve.store import Lease

logger = logging.getLogger(__name__)

RETRY_S = 0.5
CLOCK_S = 1.0  # the clock is looked at so often, to know when this process stood still


class LeaseRenewer:
    """Holds a lease between ``start`` and ``stop``.

    Args:
        take: grants a lease and puts the owner's keys under it; called again when the store lost it.
            Raises StaleAttempt when the keys are not the owner's any more.
        name: in thread names, logs and errors, e.g. ``model_worker/3``.
        on_change: gets each new standing and its reason, from one of the threads; OVER is the last one.
        on_renewed: gets when an acknowledged renewal was sent, and the lease's ttl.
    """

    def __init__(
        self,
        take: Callable[[], Lease],
        *,
        name: str,
        on_change: Callable[[LeaseStatus, str], None],
        on_renewed: Callable[[float, float], None] = lambda sent_s, ttl_s: None,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._take, self.name, self._on_change, self._on_renewed = take, name, on_change, on_renewed
        self._give_up_s = give_up_s
        self._condition = threading.Condition()
        self._stopping = False
        self._gone = False  # the store has ended it, and there is no new one yet
        self._told = LeaseStatus.HELD
        self._threads = [
            threading.Thread(target=self._renew_loop, name=f"lease-renew {name}", daemon=True),
            threading.Thread(target=self._clock_loop, name=f"lease-clock {name}", daemon=True),
        ]
        self.lease: Lease
        self._judge: LeaseValidity
        self._naps: Naps

    def start(self) -> Self:
        """Takes the lease in this thread and keeps it from now on. Raises what ``take`` does."""
        sent_s = time.monotonic()
        self.lease = self._take()
        self._judge = LeaseValidity(self.lease.ttl_s, granted_s=sent_s, give_up_s=self._give_up_s)
        self._on_renewed(sent_s, self.lease.ttl_s)
        self._naps = Naps(time.monotonic(), every_s=CLOCK_S)
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
        elif revoke and not self._gone and self._told is not LeaseStatus.OVER:
            self.lease.revoke()

    @property
    def standing(self) -> LeaseStatus:
        """What the owner may do now."""
        with self._condition:
            return self._judged(time.monotonic())

    @property
    def reason(self) -> str:
        """Why it is over; "" before."""
        return self._judge.reason

    @property
    def renewed_s(self) -> float:
        """When the newest acknowledged renewal was sent, on the monotonic clock."""
        return self._judge.renewed_s

    def end(self, reason: str) -> None:
        """Over, for a reason that the owner knows: another attempt runs."""
        with self._condition:
            self._judge.end(reason)
            self._condition.notify_all()

    def check(self) -> None:
        """Raises LeaseLost if it is over: ask before each side effect that matters."""
        if self.standing is LeaseStatus.OVER:
            raise LeaseLost(
                self.reason,
                where=self.name,
                fix="stop side effects and exit; the supervisor decides what comes next",
            )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _renew_loop(self) -> None:
        pause_s = self.lease.ttl_s / RENEWALS_PER_TTL
        while not self._has_ended_after(pause_s):
            sent_s = time.monotonic()
            try:
                self._renew(sent_s)
                pause_s = self.lease.ttl_s / RENEWALS_PER_TTL
            except (LeaseLost, StaleAttempt) as error:
                self.end(error.what)
            except StoreError as error:
                # The store's trouble is not ours yet: the clock says when it is.
                logger.warning("lease renewal failed name=%s error=%s", self.name, error.what)
                self._judge.trouble = error.what
                pause_s = min(RETRY_S, pause_s)
            except Exception as error:  # a thread that died silently would let the lease run out
                logger.exception("lease renewal failed name=%s", self.name)
                self.end(f"renewing failed: {error!r}")

    def _renew(self, sent_s: float) -> None:
        """Once. Raises StoreError to be called again, LeaseLost or StaleAttempt when it is over."""
        if not self._gone:
            try:
                self.lease.keep_alive()
            except LeaseLost as error:
                logger.warning("lease lost name=%s why=%s", self.name, error.what)
                self._gone = True
        if self._gone:
            self._take_anew(sent_s)
        with self._condition:
            self._judge.renewed(sent_s)
            self._condition.notify_all()
        self._on_renewed(sent_s, self.lease.ttl_s)

    def _take_anew(self, sent_s: float) -> None:
        lease = self._take()  # raises StaleAttempt when we must go
        with self._condition:
            self.lease, self._gone = lease, False
            self._judge.replaced(lease.ttl_s, granted_s=sent_s)
        logger.warning("lease taken anew name=%s ttl_s=%g", self.name, lease.ttl_s)

    def _clock_loop(self) -> None:
        while True:
            with self._condition:
                now_s = time.monotonic()
                standing = self._judged(now_s)
                left_s = min(self._judge.next_change_s(now_s) or CLOCK_S, CLOCK_S)
                stopping = self._stopping
            if stopping:
                return
            if standing is not self._told:
                self._tell(standing)
            if standing is LeaseStatus.OVER:
                return
            self._has_ended_after(left_s)

    def _judged(self, now_s: float) -> LeaseStatus:
        """Called with the condition held."""
        self._naps.awake(now_s)
        return self._judge.standing(now_s, napped_s=self._naps.since(self._judge.renewed_s))

    def _tell(self, standing: LeaseStatus) -> None:
        self._told = standing
        level = logging.INFO if standing is LeaseStatus.HELD else logging.ERROR
        logger.log(level, "lease %s name=%s reason=%s", standing, self.name, self.reason)
        try:
            self._on_change(standing, self.reason)
        except Exception:  # outermost frame of the thread: the owner's error must be seen
            logger.exception("on_change failed name=%s", self.name)

    def _has_ended_after(self, pause_s: float) -> bool:
        """Waits ``pause_s``, or less if something happened; True when there is nothing to renew."""
        with self._condition:
            if not self._stopping and not self._judge.reason and pause_s > 0:
                self._condition.wait(pause_s)
            return self._stopping or bool(self._judge.reason)
