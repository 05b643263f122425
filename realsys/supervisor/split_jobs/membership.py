"""A component's key ``component/<i>``: registered under a lease, renewed, registered again if the lease
was lost.

Unlike a worker, its holder does not stop itself if the lease is lost: it computes nothing, and a
temporarily unavailable store must not end anything. Others decide whether they still count on it
(components.py, ``Presence``). All writes go through the attempt's fence: a superseded holder can neither
take the key from its successor nor delete it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TypeVar

from realsys.api.errors import StaleAttempt, StoreError
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.lease_renewer import LeaseRenewer
from realsys.name_resolve.lease_validity import TTL_S, LeaseStatus
from realsys.name_resolve.store import Lease, NameResolve, Put, find
from realsys.supervisor.split_jobs.components import ComponentRecord
from realsys.trial.records import dumps, loads

logger = logging.getLogger(__name__)
T = TypeVar("T")


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
    _renewer: LeaseRenewer | None = None
    _left: bool = False

    def hold(self) -> None:
        """Registers unless it is registered, has left, or is superseded; call it regularly.

        Raises StoreError.
        """
        if self._left or (
            self._renewer is not None and self._renewer.lease_status is not LeaseStatus.EXPIRED
        ):
            return
        name = f"component/{self.record.index}"
        renewer = LeaseRenewer(
            self._acquire, name=name, on_change=lambda lease_status, reason: None
        )
        try:
            self._renewer = renewer.start()
        except StaleAttempt as error:
            logger.error(
                "component not registered component=%d reason=%s", self.record.index, error.what
            )
            self._left = True
            return
        logger.info(
            "component registered component=%d job=%s", self.record.index, self.record.job_id
        )

    def _acquire(self) -> Lease:
        lease = self.store.grant(self.ttl_s)
        self.fence.write([Put(self.key, dumps(self.record), lease)])
        return lease

    def announce_end(self, why: str, *, grace_s: float) -> None:
        """Announces that this job is about to end. Raises StoreError, StaleAttempt."""
        record = replace(self.record, leaving=why, leaving_grace_s=grace_s)
        lease = self._renewer.lease if self._renewer is not None else None
        self.fence.write([Put(self.key, dumps(record), lease)])
        self.record = record

    def leave(self) -> None:
        """Deregisters, for good."""
        self._left = True
        if self._renewer is None:
            return
        try:
            self._renewer.stop()
        except StoreError as error:  # it ends by itself
            logger.warning("component not deregistered error=%s", error.what)
        self._renewer = None


def read_key(kind: type[T], store: NameResolve, key: str) -> T | None:
    """Reads the record at ``key``; None if there is none. Raises StoreError, TrialError."""
    entry = find(store, key)
    return None if entry is None else loads(kind, entry.value, where=key)
