"""A component's key ``component/<i>``: taken under a lease, kept, taken again if the lease was lost.

Unlike a worker, its holder does not stop itself when the lease is lost: it computes nothing, and a
store that does not answer for a while must end nothing. Whether the others still count on it is theirs
to say (components.py, ``Presence``). All of it is behind the attempt's fence: who was superseded while it
was cut off neither takes the key from its successor nor deletes it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from realsys.api.errors import KeyNotFound, StaleAttempt, StoreError
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.lease_renewer import LeaseRenewer
from realsys.name_resolve.lease_validity import TTL_S, LeaseStatus
from realsys.name_resolve.store import Lease, NameResolve, Put
from realsys.supervisor.split_jobs.components import ComponentRecord
from realsys.trial.records import dumps, loads

logger = logging.getLogger(__name__)


@dataclass
class Membership:
    """Holds ``record`` under ``key``. Used from one thread.

    Args:
        fence: of the record's attempt; one that may have ended.
    """

    store: NameResolve
    fence: AttemptFence
    key: str
    record: ComponentRecord
    ttl_s: float = TTL_S
    _keeper: LeaseRenewer | None = None
    _left: bool = False

    def hold(self) -> None:
        """Takes the key unless we have it, have left, or are superseded; call it now and then.

        Raises StoreError.
        """
        if self._left or (
            self._keeper is not None and self._keeper.lease_status is not LeaseStatus.EXPIRED
        ):
            return
        name = f"component/{self.record.index}"
        keeper = LeaseRenewer(self._take, name=name, on_change=lambda lease_status, reason: None)
        try:
            self._keeper = keeper.start()
        except StaleAttempt as error:
            logger.error(
                "component not registered component=%d why=%s", self.record.index, error.what
            )
            self._left = True
            return
        logger.info(
            "component registered component=%d job=%s", self.record.index, self.record.job_id
        )

    def _take(self) -> Lease:
        lease = self.store.grant(self.ttl_s)
        self.fence.write([Put(self.key, dumps(self.record), lease)])
        return lease

    def tell_leaving(self, why: str, *, grace_s: float) -> None:
        """Says that this job is about to end. Raises StoreError, StaleAttempt."""
        record = replace(self.record, leaving=why, leaving_grace_s=grace_s)
        lease = self._keeper.lease if self._keeper is not None else None
        self.fence.write([Put(self.key, dumps(record), lease)])
        self.record = record

    def leave(self) -> None:
        """Gives the key back, for good."""
        self._left = True
        if self._keeper is None:
            return
        try:
            self._keeper.stop()
        except StoreError as error:  # it ends by itself
            logger.warning("component key not given back error=%s", error.what)
        self._keeper = None


def read_component(store: NameResolve, key: str) -> ComponentRecord | None:
    """The record at ``key``; None when there is none. Raises StoreError."""
    try:
        return loads(ComponentRecord, store.get(key).value, where=key)
    except KeyNotFound:
        return None
