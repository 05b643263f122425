"""Validity of a lease from its holder's point of view, by renewal times and the store's answers
(pure).

For lease_renewer.py, and for the simulation that plays thousands of outages against it. Two risks
conflict: a holder that continues after others took it for dead, and one that exits because the
store was unavailable for a moment. So there are two stages. *Uncertain*: not renewed for a while,
no side effects until it is. *Expired*: stop and exit, for good.

Why this is safe: others count the TTL from when the store *received* a renewal, which is never
before it was sent. So a lease can't expire before ``sent + ttl``, and by then its holder has been
uncertain for a fifth of the TTL. Anything an uncertain or cut-off holder still writes is rejected
by the attempt's fence.

A lease that has ended is acquired again, in one transaction with the condition that the attempt is
still ours and has not been ended. So a store that lost leases, or stopped for longer than the TTL,
ends no worker; and a worker that was declared lost finds its attempt ended or replaced, and exits.
"""

from __future__ import annotations

from enum import StrEnum

TTL_S = 15.0
MANY_WORKERS, MANY_TTL_S = 1000, 30.0  # one small store must handle all renewals
# A store that is back after 10 s must be reached before 0.8 of 15 s have passed.
RENEWALS_PER_TTL = 7.5
SUSPEND_AT = 0.8
GIVE_UP_S = 1800.0  # default of a site's store_patience_seconds
PAUSE_S = 5.0  # if two readings of the clock are this much further apart, this process was stopped


class LeaseStatus(StrEnum):
    """What a lease's holder may do."""

    VALID = "valid"  # everything
    UNCERTAIN = "uncertain"  # compute, but publish nothing
    EXPIRED = "expired"  # exit


class LeaseValidity:
    """Judges one lease. All times are seconds of the holder's monotonic clock.

    Args:
        ttl_s: as the store granted it.
        granted_s: when the request for it was sent.
        give_up_s: expired once the store has not acknowledged a renewal for this long. A store that
            answers decides earlier.
    """

    def __init__(self, ttl_s: float, *, granted_s: float, give_up_s: float = GIVE_UP_S) -> None:
        self.ttl_s, self.give_up_s = ttl_s, max(give_up_s, ttl_s)
        self.renewed_s = granted_s
        self.reason = ""
        self.last_error = ""  # the last error of the store or of the connection to it

    def renewed(self, sent_s: float) -> None:
        """Records that a renewal sent at ``sent_s`` was acknowledged."""
        self.renewed_s, self.last_error = max(self.renewed_s, sent_s), ""

    def replaced(self, ttl_s: float, *, granted_s: float) -> None:
        """Records that a new lease has replaced the old one."""
        self.ttl_s, self.renewed_s = ttl_s, granted_s

    def end(self, reason: str) -> None:
        """Ends it regardless of the clock: another attempt runs, or another process owns the key."""
        self.reason = reason

    def lease_status(self, now_s: float, *, paused_s: float = 0.0) -> LeaseStatus:
        """Returns the status at ``now_s``.

        Args:
            paused_s: how much of the time since the last renewal the holder itself was stopped
                (``ProcessPauses``). It makes the lease uncertain too, but is not counted as silence
                of the store.
        """
        unheard_s = now_s - self.renewed_s
        if not self.reason and unheard_s - paused_s > self.give_up_s:
            last = f"; last: {self.last_error}" if self.last_error else ""
            self.reason = f"the store has not answered for {unheard_s - paused_s:.0f} s{last}"
        if self.reason:
            return LeaseStatus.EXPIRED
        return LeaseStatus.VALID if unheard_s < SUSPEND_AT * self.ttl_s else LeaseStatus.UNCERTAIN

    def next_change_s(self, now_s: float) -> float:
        """Returns how long the status stays the same if nothing is received."""
        ends = (self.renewed_s + SUSPEND_AT * self.ttl_s, self.renewed_s + self.give_up_s)
        return min((end - now_s for end in ends if end > now_s), default=0.0)


class ProcessPauses:
    """When this process was stopped from outside: by a signal, or because Slurm suspended its job.

    Each reading of the clock is recorded by ``awake``; the owner makes sure that there is one every
    ``every_s``. Times are seconds of the monotonic clock, which keeps running meanwhile.
    """

    def __init__(self, now_s: float, *, every_s: float) -> None:
        self._awake_s, self._longest_s = now_s, every_s + PAUSE_S
        self._naps: list[tuple[float, float]] = []  # when it ended, how long it was

    def awake(self, now_s: float) -> None:
        """Records a reading of the clock."""
        gap_s, self._awake_s = now_s - self._awake_s, now_s
        if gap_s > self._longest_s:
            self._naps.append((now_s, gap_s))

    def since(self, at_s: float) -> float:
        """Returns the seconds of pauses that ended after ``at_s``; earlier ones are forgotten."""
        self._naps = [nap for nap in self._naps if nap[0] > at_s]
        return sum(min(gap_s, ended_s - at_s) for ended_s, gap_s in self._naps)


def lease_ttl_s(num_workers: int) -> float:
    """Returns the TTL for a trial of this size: the renewals of all workers must stay far below
    what one store handles (formula in docs/reliability.md)."""
    return TTL_S if num_workers <= MANY_WORKERS else MANY_TTL_S
