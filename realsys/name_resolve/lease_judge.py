"""How a lease's holder stands, from when it renewed and what the store answered (pure).

For lease_keeper.py, and for the simulation that plays thousands of outages against it. Two dangers pull
apart: a holder that goes on after others took it for dead, and one that ends itself because the store
was away for a moment. So there are two steps. *Suspended*: not renewed for a while, no side effects until
it is. *Over*: stop and exit, for good.

Why that is safe: others count the ttl from when the store *received* a renewal, which is never before
it was sent. A lease can't run out before ``sent + ttl``, and by then its holder has been suspended for a
fifth of the ttl. What a suspended or cut-off holder still writes, the attempt's token fences off.

A lease that has ended is taken anew, in one transaction with the condition that the attempt is still ours
and has not been ended. So a store that lost leases, or stood still for longer than the ttl, ends nobody;
and whoever was declared lost finds the attempt ended, or another one in its place, and exits.
"""

from __future__ import annotations

from enum import StrEnum

TTL_S = 15.0
MANY_WORKERS, MANY_TTL_S = 1000, 30.0  # one small store must carry all renewals
RENEWALS_PER_TTL = (
    7.5  # a store that is back after 10 s must be reached before 0.8 of 15 s are over
)
SUSPEND_AT = 0.8
GIVE_UP_S = 1800.0  # a site's store_patience_seconds, where nothing else is said
NAP_S = 5.0  # longer than meant between two looks at the clock, and it was we who stood still


class LeaseStatus(StrEnum):
    """What the holder may do."""

    HELD = "held"  # everything
    SUSPENDED = "suspended"  # compute, but publish nothing
    OVER = "over"  # exit


class LeaseValidity:
    """Judges one lease. All times are seconds of the holder's monotonic clock.

    Args:
        ttl_s: as the store granted it.
        granted_s: when the request for it was sent.
        give_up_s: over when the store has not acknowledged a renewal for this long. A store that
            answers decides earlier.
    """

    def __init__(self, ttl_s: float, *, granted_s: float, give_up_s: float = GIVE_UP_S) -> None:
        self.ttl_s, self.give_up_s = ttl_s, max(give_up_s, ttl_s)
        self.renewed_s = granted_s
        self.reason = ""
        self.trouble = ""  # what the store, or the way to it, said last

    def renewed(self, sent_s: float) -> None:
        """A renewal that was sent at ``sent_s`` was acknowledged."""
        self.renewed_s, self.trouble = max(self.renewed_s, sent_s), ""

    def replaced(self, ttl_s: float, *, granted_s: float) -> None:
        """A new lease is held in its place."""
        self.ttl_s, self.renewed_s = ttl_s, granted_s

    def end(self, reason: str) -> None:
        """Over, whatever the clock says: another attempt runs, or the key is somebody else's."""
        self.reason = reason

    def standing(self, now_s: float, *, napped_s: float = 0.0) -> LeaseStatus:
        """How the holder stands at ``now_s``.

        Args:
            napped_s: for how long of the time since the last renewal the holder itself stood still
                (``Naps``). It is suspended all the same, but it has not asked in vain.
        """
        unheard_s = now_s - self.renewed_s
        if not self.reason and unheard_s - napped_s > self.give_up_s:
            last = f"; last: {self.trouble}" if self.trouble else ""
            self.reason = f"the store has not answered for {unheard_s - napped_s:.0f} s{last}"
        if self.reason:
            return LeaseStatus.OVER
        return LeaseStatus.HELD if unheard_s < SUSPEND_AT * self.ttl_s else LeaseStatus.SUSPENDED

    def next_change_s(self, now_s: float) -> float:
        """How long the standing stays as it is if nothing is heard."""
        ends = (self.renewed_s + SUSPEND_AT * self.ttl_s, self.renewed_s + self.give_up_s)
        return min((end - now_s for end in ends if end > now_s), default=0.0)


class Naps:
    """When a process stood still by no fault of its own: stopped, or its job suspended by Slurm.

    Whoever looks at the clock says so by ``awake``; the owner sees to it that somebody does each
    ``every_s``. Times are seconds of the monotonic clock, which goes on meanwhile.
    """

    def __init__(self, now_s: float, *, every_s: float) -> None:
        self._awake_s, self._longest_s = now_s, every_s + NAP_S
        self._naps: list[tuple[float, float]] = []  # when it ended, how long it was

    def awake(self, now_s: float) -> None:
        """Somebody looks."""
        gap_s, self._awake_s = now_s - self._awake_s, now_s
        if gap_s > self._longest_s:
            self._naps.append((now_s, gap_s))

    def since(self, at_s: float) -> float:
        """Seconds of naps that ended after ``at_s``; earlier ones are forgotten."""
        self._naps = [nap for nap in self._naps if nap[0] > at_s]
        return sum(min(gap_s, ended_s - at_s) for ended_s, gap_s in self._naps)


def lease_ttl_s(num_workers: int) -> float:
    """The ttl for a trial of this size: renewals of all must stay far below what one store can take
    (docs/reliability.md has the formula)."""
    return TTL_S if num_workers <= MANY_WORKERS else MANY_TTL_S
