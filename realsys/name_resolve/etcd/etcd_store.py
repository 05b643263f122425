"""The name-resolution store on etcd: NameResolve built from etcd's transactions, leases and
watches.

The server decides everything: there is no local copy of the contents and no local clock. Each call
has the client's deadline; while etcd is unavailable it raises StoreUnavailable, and works again as
soon as etcd is back. Thread-safe; thousands of leases share one connection. Open it after a fork.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from realsys.api.errors import LeaseLost, StoreUnavailable, WaitTimeout
from realsys.name_resolve import store_refusals
from realsys.name_resolve.etcd import etcd_keys, protocol
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.name_resolve.etcd.channels import Unsure
from realsys.name_resolve.etcd.etcd_client import CALL_TIMEOUT_S, EtcdClient
from realsys.name_resolve.etcd.etcd_failures import LeaseExists
from realsys.name_resolve.etcd.etcd_watch import EtcdWatch
from realsys.name_resolve.etcd.listing import entries_of, entries_under, revisions_under
from realsys.name_resolve.etcd.transaction import Transaction, TransactionOutcome, delete_keys
from realsys.name_resolve.store import (
    MAX_TXN_OPS,
    Compare,
    Entry,
    EventKind,
    Lease,
    Put,
    canonical,
    check_clearable,
    check_prefixes,
    check_value,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_REVOKE_ROUNDS = 100
LOOK_EVERY_S = 1.0  # how often ``wait`` checks its time limit


class EtcdStore:
    """A NameResolve on etcd. ``open`` returns one that answers; ``close`` also closes the client."""

    def __init__(self, client: EtcdClient) -> None:
        self._client, self.where = client, client.where
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()
        self._readable: str | None = None  # a key with read permission, for revision()
        self._closed = False

    @classmethod
    def open(cls, access: EtcdAccess, *, call_timeout_s: float = CALL_TIMEOUT_S) -> Self:
        """Opens the store. Raises StoreUnavailable if no server answers, StoreError if the login is
        refused."""
        store = cls(EtcdClient(access, call_timeout_s=call_timeout_s))
        # All workers of a node connect at the same time while they load their libraries.
        deadline_s = time.monotonic() + 2 * call_timeout_s
        try:
            store.client.read([], deadline_s=deadline_s)  # reads no key: needs no permission
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        self._closed = True
        for watch in list(self._watches):
            watch.end(store_refusals.closed(where=self.where))
        self._client.close()

    @property
    def client(self) -> EtcdClient:
        """The client of an open store. Raises StoreError once it is closed."""
        if self._closed:
            raise store_refusals.closed(where=self.where)
        return self._client

    def revision(self) -> int:
        if self._readable is None:
            # No readable key is known yet, and most keys may be forbidden. A lagging member may answer
            # this read; the result is never below the newest revision seen.
            self.client.read([])
            return self.client.newest_revision
        reply = self.client.range(etcd_keys.to_etcd(self._readable), count_only=True)
        return int(reply.header.revision)

    def add(
        self, key: str, value: bytes, *, lease: Lease | None = None, replace: bool = False
    ) -> int:
        key, value = canonical(key), check_value(key, value)
        absent = [] if replace else [etcd_keys.compare(Compare.absent(key))]
        holder = [] if replace else [etcd_keys.read_operation(etcd_keys.to_etcd(key))]
        outcome = self._run(conditions=absent, puts=[Put(key, value, lease)], otherwise=holder)
        self._readable = key
        if outcome.happened:
            return outcome.revision
        assert outcome.responses is not None, "a refused transaction has its reply"
        raise store_refusals.taken(
            etcd_keys.entry(outcome.responses[0].response_range.kvs[0]), where=self.where
        )

    def get(self, key: str) -> Entry:
        key = canonical(key)
        found = self.client.range(etcd_keys.to_etcd(key)).kvs
        self._readable = key
        if not found:
            raise store_refusals.not_there(key, where=self.where)
        return etcd_keys.entry(found[0])

    def get_subtree(self, prefix: str) -> list[Entry]:
        prefix = canonical(prefix)
        entries, _ = entries_under(self.client, [prefix])
        self._readable = prefix
        return entries

    def find_subtree(self, prefix: str) -> list[str]:
        prefix = canonical(prefix)
        found, _ = revisions_under(self.client, [prefix])
        self._readable = prefix
        return sorted(found)

    def delete(self, key: str, *, missing_ok: bool = False) -> None:
        key = canonical(key)
        outcome = delete_keys(self.client, [key], [etcd_keys.exists(key)])
        if not outcome.happened and not missing_ok:
            raise store_refusals.not_there_to_delete(key, where=self.where)

    def clear_subtree(self, prefix: str) -> int:
        prefix = check_clearable(prefix)
        if not self.find_subtree(prefix):
            return 0
        ranges = [(etcd_keys.to_etcd(prefix), b""), etcd_keys.below(prefix)]
        outcome = self._run(ranges=ranges, deletes_of=[prefix])
        if outcome.responses is None:  # the reply was lost: count what was there before
            before, _ = revisions_under(self.client, [prefix], revision=outcome.revision - 1)
            deleted = len(before)
        else:
            deleted = sum(r.response_delete_range.deleted for r in outcome.responses[:2])
        if prefix == etcd_keys.marker_of(prefix).removesuffix(etcd_keys.MARKER):
            self._forget_marker(prefix)
        return deleted

    def wait(
        self,
        keys: Sequence[str],
        *,
        timeout_s: float,
        describe_missing: Callable[[list[str]], str] | None = None,
    ) -> dict[str, bytes]:
        keys = [canonical(key) for key in keys]
        wanted = frozenset(keys)
        wait = store_refusals.KeyWait(keys, timeout_s, describe_missing, self.where)
        read = partial(self._values_of, sorted(wanted))
        found, revision = self._retry_until(read, wait.deadline_s)
        if len(found) == len(wanted):
            return found
        begin = partial(self.watch, *wanted, from_revision=revision + 1)
        with self._retry_until(begin, wait.deadline_s) as watch:
            while True:
                try:
                    left_s = wait.left_s(found)
                except WaitTimeout:
                    if not watch.is_connected:
                        # Raises StoreUnavailable: the store is away, no key missing
                        self.client.read([])
                    raise
                for event in watch.poll(min(left_s, LOOK_EVERY_S)):
                    if event.key not in wanted:
                        continue  # below an awaited key
                    if event.kind is EventKind.PUT:
                        found[event.key] = event.value
                    else:
                        found.pop(event.key, None)
                if len(found) == len(wanted):
                    return found

    def watch(
        self, *prefixes: str, from_revision: int | None = None, judges_leases: bool = True
    ) -> EtcdWatch:
        prefixes = check_prefixes(prefixes)
        watch = EtcdWatch(self.client, prefixes, from_revision)
        self._watches.add(watch)
        return watch

    def grant(self, ttl_s: float) -> EtcdLease:
        store_refusals.check_ttl(ttl_s)
        client, number = self.client, secrets.randbits(62) + 1
        try:
            return EtcdLease(client, number, client.grant(number, math.ceil(ttl_s)).TTL)
        except LeaseExists:  # granted by an earlier attempt whose reply was lost
            reply = client.time_to_live(number)
            if reply.TTL <= 0:
                raise StoreUnavailable(
                    "a lease ended before its grant was answered",
                    where=self.where,
                    fix="etcd answers too slowly for leases this short",
                ) from None
            return EtcdLease(client, number, reply.grantedTTL)

    def renewed_ago_s(self, lease_id: str) -> float | None:
        """In whole seconds of the server's clock; None also if the lease has ended."""
        reply = self.client.time_to_live(etcd_keys.lease_number(lease_id))
        return None if reply.TTL < 0 else float(max(0, reply.grantedTTL - reply.TTL))

    def transaction(
        self, compares: Sequence[Compare], *, puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> bool:
        store_refusals.check_transaction(compares, puts, deletes, where=self.where)
        outcome = self._run(
            conditions=[etcd_keys.compare(compare) for compare in compares],
            puts=puts,
            ranges=[(etcd_keys.to_etcd(key), b"") for key in deletes],
            deletes_of=deletes,
        )
        return outcome.happened

    def _run(self, *, puts: Sequence[Put] = (), **parts: Any) -> TransactionOutcome:
        try:
            return Transaction(self.client, puts=puts, **parts).run()
        except LeaseLost as error:
            ids = sorted({put.lease.id for put in puts if put.lease is not None})
            where = f"key {puts[0].key!r} in {self.where}"
            raise LeaseLost(
                f"lease {', '.join(ids)} has ended", where=where, fix=error.fix
            ) from error

    def _values_of(self, keys: Sequence[str]) -> tuple[dict[str, bytes], int]:
        entries, revision = entries_of(self.client, keys)
        return {key: found.value for key, found in entries.items()}, revision

    def _retry_until(self, call: Callable[[], T], deadline_s: float) -> T:
        """Returns the call's result; retries through an outage until the deadline."""
        while True:
            try:
                return call()
            except StoreUnavailable:
                if time.monotonic() >= deadline_s:
                    raise

    def _forget_marker(self, trial: str) -> None:
        """Deletes the marker of a cleared trial. Watchers read it in etcd's history."""
        marker = etcd_keys.to_etcd(etcd_keys.marker_of(trial))
        request = protocol.TxnRequest(success=[etcd_keys.delete_operation(marker)])
        try:
            self.client.transaction(request, deadline_s=self.client.deadline_s())
        except (Unsure, StoreUnavailable):
            logger.warning("marker deletion failed trial=%s", trial)


class EtcdLease:
    """A Lease of an EtcdStore. It costs only its entry in etcd: thousands share one client.

    Granted and expired by the server alone. No local clock ends it: a server that was unavailable
    restarts every lease's full time, so a late renewal may still be in time. When to stop without an
    answer is the holder's decision (lease_renewer.py). etcd's leases have whole seconds, and none is
    shorter than about two election timeouts.
    """

    def __init__(self, client: EtcdClient, number: int, ttl_s: int) -> None:
        self._client, self._number = client, number
        self.id, self.ttl_s = etcd_keys.lease_text(number), float(ttl_s)
        # Two more attempts must fit into the TTL after one that got no answer.
        self._timeout_s = min(client.call_timeout_s, max(1.0, ttl_s / 3))

    def keep_alive(self) -> None:
        reply = self._client.keep_alive(self._number, timeout_s=self._timeout_s)
        if reply.TTL <= 0:
            what = f"lease {self.id} (ttl {self.ttl_s:g} s) has ended: it was not renewed in time"
            raise store_refusals.lease_lost(what, where=self._client.where)

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
        ours = [etcd_keys.is_under_lease(key, self._number) for key in keys]
        delete_keys(self._client, [etcd_keys.from_etcd(key) for key in keys], ours)
