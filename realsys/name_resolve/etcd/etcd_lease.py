"""A lease on etcd, granted and expired by the server alone.

For etcd_store.py. No local clock ends it: a server that was unavailable restarts every lease's full
time, so a late renewal may still be in time. When to stop without an answer is the holder's
decision (lease_renewer.py). etcd's leases have whole seconds, and none is shorter than about two
election timeouts.
"""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

from realsys.api.errors import LeaseLost, StoreUnavailable
from realsys.name_resolve.etcd.etcd_client import EtcdClient
from realsys.name_resolve.etcd.etcd_failures import LeaseExists
from realsys.name_resolve.etcd.etcd_keys import from_etcd, is_under_lease, lease_number, lease_text
from realsys.name_resolve.etcd.transaction import delete_keys
from realsys.name_resolve.store import MAX_TXN_OPS
from realsys.name_resolve.store_refusals import lease_lost

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_REVOKE_ROUNDS = 100


class EtcdLease:
    """A Lease of an EtcdStore. It costs only its entry in etcd: thousands share one client."""

    def __init__(self, client: EtcdClient, number: int, ttl_s: int) -> None:
        self._client, self._number, self._ttl_s = client, number, ttl_s
        self._id = lease_text(number)
        # Two more attempts must fit into the TTL after one that got no answer.
        self._timeout_s = min(client.call_timeout_s, max(1.0, ttl_s / 3))

    @property
    def id(self) -> str:
        return self._id

    @property
    def ttl_s(self) -> float:
        return float(self._ttl_s)

    def keep_alive(self) -> None:
        reply = self._client.keep_alive(self._number, timeout_s=self._timeout_s)
        if reply.TTL <= 0:
            what = f"lease {self._id} (ttl {self._ttl_s} s) has ended: it was not renewed in time"
            raise lease_lost(what, where=self._client.where)

    def revoke(self) -> None:
        # Keys are deleted first, by a transaction, so that watchers see DELETE and not EXPIRE.
        for _ in range(MAX_REVOKE_ROUNDS):
            keys = self._client.time_to_live(self._number, keys=True).keys
            if not keys:
                break
            self._delete(keys[:MAX_TXN_OPS])
        try:
            self._client.revoke(self._number)
        except LeaseLost:
            pass

    def _delete(self, keys: Sequence[bytes]) -> None:
        # Excludes keys that another process has just taken over.
        ours = [is_under_lease(key, self._number) for key in keys]
        delete_keys(self._client, [from_etcd(key) for key in keys], ours)


def grant(client: EtcdClient, ttl_s: float) -> EtcdLease:
    """Grants a new lease of at least ``ttl_s`` seconds."""
    number = secrets.randbits(62) + 1
    try:
        return EtcdLease(client, number, client.grant(number, math.ceil(ttl_s)).TTL)
    except LeaseExists:  # granted by an earlier attempt whose reply was lost
        reply = client.time_to_live(number)
        if reply.TTL <= 0:
            raise StoreUnavailable(
                "a lease ended before its grant was answered",
                where=client.where,
                fix="etcd answers too slowly for leases this short",
            ) from None
        return EtcdLease(client, number, reply.grantedTTL)


def renewed_ago_s(client: EtcdClient, lease_id: str) -> float | None:
    """Returns how long ago a lease was renewed, in whole seconds of the server's clock; None if it
    has ended."""
    reply = client.time_to_live(lease_number(lease_id))
    return None if reply.TTL < 0 else float(max(0, reply.grantedTTL - reply.TTL))
