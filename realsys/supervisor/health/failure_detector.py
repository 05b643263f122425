"""Detects lost workers from the contents of the store (pure): for worker_leases.py, and for the
simulation.

A worker is lost if its key has been missing for longer than ``lost_s``. No worker is declared lost while
the store itself is in doubt: it does not answer, has just come back (its leases start again), or many
leases of several hosts ended at once, whether or not their holders have acquired new ones since. After
such trouble decisions wait for ``settle_s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LOST_S = 3.0  # after a key disappeared: srun may be about to report, a worker may be reacquiring it
SETTLE_S = 30.0
AT_ONCE_S = 2.5  # leases renewed at different moments end within ttl / 7.5, seen by polls 1 s apart
MANY = 3


@dataclass(frozen=True, kw_only=True)
class WorkerVerdict:
    """Result of a check. ``frozen`` is why no worker is declared lost, "" if decisions are made."""

    lost: tuple[str, ...] = ()
    frozen: str = ""


@dataclass(kw_only=True)
class FailureDetector:
    """Checks the answers of the store. Times are seconds of one monotonic clock, the reader's.

    Attributes:
        hosts: worker → host, of all workers ever seen.
        gone_since_s: worker → when its key was first missing, of the missing ones.
        anew_since_s: worker → when its key was first seen under a new lease.
    """

    lost_s: float = LOST_S
    settle_s: float = SETTLE_S
    hosts: dict[str, str] = field(default_factory=dict)
    gone_since_s: dict[str, float] = field(default_factory=dict)
    anew_since_s: dict[str, float] = field(default_factory=dict)
    _leases: dict[str, str] = field(default_factory=dict)
    _frozen_until_s: float = float("-inf")
    _frozen_why: str = ""

    def look(
        self,
        present: Mapping[str, str] | None,
        *,
        now_s: float,
        asked_s: float | None = None,
        leases: Mapping[str, str] | None = None,
    ) -> WorkerVerdict:
        """Judges one answer of the store.

        Args:
            present: worker → host of all that hold their key; None when the store did not answer.
            now_s: when it was answered.
            asked_s: when it was asked, if that was earlier: what it shows is no newer than that.
            leases: worker → id of the lease that its key is under, of all present; None: not known.
        """
        if present is None:
            self._freeze("the store does not answer", now_s)
            return WorkerVerdict(frozen=self._frozen_why)
        self.hosts |= present
        for worker, lease_id in (leases or {}).items():
            if self._leases.setdefault(worker, lease_id) != lease_id:
                self._leases[worker], self.anew_since_s[worker] = lease_id, now_s
        for worker in present:
            self.gone_since_s.pop(worker, None)
        for worker in self.hosts.keys() - present.keys():
            self.gone_since_s.setdefault(worker, now_s)
        if trouble := self._mass_loss(now_s):
            self._freeze(trouble, now_s)
        asked_s = now_s if asked_s is None else asked_s
        if asked_s < self._frozen_until_s:
            return WorkerVerdict(frozen=self._frozen_why)
        gone = self.gone_since_s.items()
        return WorkerVerdict(
            lost=tuple(sorted(w for w, since_s in gone if asked_s - since_s > self.lost_s))
        )

    def forget(self, worker: str) -> None:
        """Forgets ``worker``, which has left as intended."""
        self.hosts.pop(worker, None)
        self.gone_since_s.pop(worker, None)
        self.anew_since_s.pop(worker, None)
        self._leases.pop(worker, None)

    def _mass_loss(self, now_s: float) -> str:
        """Returns the reason to freeze if leases of several hosts ended at once, which points to the
        store; a dying node takes those of one host."""
        ended_s = self.anew_since_s | self.gone_since_s
        at_once = [w for w, since_s in ended_s.items() if now_s - since_s <= AT_ONCE_S]
        hosts = {self.hosts[worker] for worker in at_once}
        many = len(at_once) >= MANY or len(at_once) == len(self.hosts)
        if len(hosts) < 2 or not many:
            return ""
        return f"{len(at_once)} leases on {len(hosts)} hosts ended at one moment"

    def _freeze(self, why: str, now_s: float) -> None:
        self._frozen_until_s, self._frozen_why = now_s + self.settle_s, why
