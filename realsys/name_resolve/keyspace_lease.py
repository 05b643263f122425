"""A lease of a KeySpaceStore: renewing it, and detecting that it has ended.

For keyspace_store.py, which creates them. lease_renewer.py renews in time; each store judges the
leases of other processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from realsys.api.errors import LeaseLost
from realsys.name_resolve.keyspace import EndLease, KeySpace, Operation

if TYPE_CHECKING:
    from realsys.name_resolve.keyspace_store import KeySpaceStore


class StoreLease:
    """A Lease of a KeySpaceStore."""

    def __init__(self, store: KeySpaceStore, lease_id: str, ttl_s: float) -> None:
        self._store, self._id, self._ttl_s = store, lease_id, ttl_s
        self._renewed_s = store.clock()

    @property
    def id(self) -> str:
        return self._id

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    def keep_alive(self) -> None:
        sent_s = self._store.clock()
        if sent_s - self._renewed_s > self._ttl_s:
            # Expired even if no other process has noticed yet: one may act on it any moment.
            self._end(expired=True)
            self._raise_lost(f"was not renewed for {sent_s - self._renewed_s:.1f} s")
        self._store.renew(self._id)
        with self._store.lock:
            alive = self._id in self._store.opened().leases
        if not alive:
            self._raise_lost("was ended by another process, which took this one for dead")
        self._renewed_s = sent_s

    def revoke(self) -> None:
        self._end(expired=False)

    def _end(self, *, expired: bool) -> None:
        def decide(space: KeySpace) -> list[Operation]:
            return [EndLease(self._id, expired)] if self._id in space.leases else []

        self._store.write(decide)

    def _raise_lost(self, why: str) -> None:
        raise LeaseLost(
            f"lease {self._id} (ttl {self._ttl_s:g} s) {why}",
            where=self._store.where,
            fix="stop this process's side effects and let it exit; others take it for dead",
        )
