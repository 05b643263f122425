"""The store on etcd: the calls of NameResolve, made of etcd's transactions, leases and watches.

Everything is judged by the server: there is no copy of the contents here, and no clock. Each call has
the client's deadline; when etcd is away it raises StoreUnavailable, and the next call works as soon as
etcd is back. Thread-safe; thousands of leases share the one connection. Open it after a fork.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from realsys.api.errors import LeaseLost, StoreUnavailable
from realsys.name_resolve import store_refusals
from realsys.name_resolve.etcd import etcd_keys, etcd_lease, protocol
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.name_resolve.etcd.channels import Unsure
from realsys.name_resolve.etcd.etcd_client import CALL_TIMEOUT_S, EtcdClient
from realsys.name_resolve.etcd.etcd_lease import EtcdLease
from realsys.name_resolve.etcd.etcd_watch import EtcdWatch
from realsys.name_resolve.etcd.listing import entries_of, entries_under, revisions_under
from realsys.name_resolve.etcd.transaction import Transaction, TransactionOutcome, delete_keys
from realsys.name_resolve.store import (
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

LOOK_EVERY_S = 1.0  # a waiter looks this often whether its time is over


class EtcdStore:
    """A NameResolve on etcd. ``open`` makes one that answers; ``close`` also closes the client."""

    def __init__(self, client: EtcdClient) -> None:
        self.client, self.where = client, client.where
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()
        self._readable: str | None = None  # a key that we may read, for revision()
        self._closed = False

    @classmethod
    def open(cls, access: EtcdAccess, *, call_timeout_s: float = CALL_TIMEOUT_S) -> Self:
        """Raises StoreUnavailable when nobody answers there, StoreError when we may not enter."""
        store = cls(EtcdClient(access, call_timeout_s=call_timeout_s))
        # All workers of a node connect at the same time, and load their libraries meanwhile.
        deadline_s = time.monotonic() + 2 * call_timeout_s
        try:
            store.client.read([], deadline_s=deadline_s)  # asks for no key: every user may
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        self._closed = True
        for watch in list(self._watches):
            watch.end(store_refusals.closed(where=self.where))
        self.client.close()

    def revision(self) -> int:
        self._check_open()
        if self._readable is None:
            # Nobody has told us a key yet, and on most we may have no permission. A member that lags
            # behind may answer this one; the newest that we know of is never undercut.
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
        self._check_open()
        found = self.client.range(etcd_keys.to_etcd(key)).kvs
        self._readable = key
        if not found:
            raise store_refusals.not_there(key, where=self.where)
        return etcd_keys.entry(found[0])

    def get_subtree(self, prefix: str) -> list[Entry]:
        prefix = canonical(prefix)
        self._check_open()
        entries, _ = entries_under(self.client, [prefix])
        self._readable = prefix
        return entries

    def find_subtree(self, prefix: str) -> list[str]:
        prefix = canonical(prefix)
        self._check_open()
        found, _ = revisions_under(self.client, [prefix])
        self._readable = prefix
        return sorted(found)

    def delete(self, key: str, *, missing_ok: bool = False) -> None:
        key = canonical(key)
        self._check_open()
        outcome = delete_keys(self.client, [key], [etcd_keys.exists(key)])
        if not outcome.happened and not missing_ok:
            raise store_refusals.not_there_to_delete(key, where=self.where)

    def clear_subtree(self, prefix: str) -> int:
        prefix = check_clearable(prefix)
        self._check_open()
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
        began_s = announced_s = time.monotonic()
        found, revision = self._sit_out(
            lambda: self._values_of(sorted(wanted)), began_s + timeout_s
        )
        if len(found) == len(wanted):
            return found
        begin = partial(self.watch, *wanted, from_revision=revision + 1)
        with self._sit_out(begin, began_s + timeout_s) as watch:
            while True:
                now_s = time.monotonic()
                missing = [key for key in keys if key not in found]
                left_s = began_s + timeout_s - now_s
                if left_s <= 0 and not watch.is_connected:
                    self.client.read([])  # raises StoreUnavailable: nobody is missing, it is away
                if left_s <= 0:
                    raise store_refusals.timed_out(
                        missing,
                        keys,
                        timeout_s=timeout_s,
                        describe_missing=describe_missing,
                        where=self.where,
                    )
                if now_s - announced_s >= store_refusals.ANNOUNCE_EVERY_S:
                    announced_s = now_s
                    store_refusals.announce(missing, keys, timeout_s=timeout_s)
                for event in watch.poll(min(left_s, LOOK_EVERY_S)):
                    if event.key not in wanted:
                        continue  # it is below a key that is waited for
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
        self._check_open()
        watch = EtcdWatch(self.client, prefixes, from_revision)
        self._watches.add(watch)
        return watch

    def grant(self, ttl_s: float) -> EtcdLease:
        store_refusals.check_ttl(ttl_s)
        self._check_open()
        return etcd_lease.grant(self.client, ttl_s)

    def renewed_ago_s(self, lease_id: str) -> float | None:
        self._check_open()
        return etcd_lease.renewed_ago_s(self.client, lease_id)

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

    def _check_open(self) -> None:
        if self._closed:
            raise store_refusals.closed(where=self.where)

    def _run(self, *, puts: Sequence[Put] = (), **parts: Any) -> TransactionOutcome:
        self._check_open()
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

    def _sit_out(self, call: Callable[[], T], deadline_s: float) -> T:
        """The call's result; an outage until the deadline is waited for."""
        while True:
            self._check_open()
            try:
                return call()
            except StoreUnavailable:
                if time.monotonic() >= deadline_s:
                    raise

    def _forget_marker(self, trial: str) -> None:
        """Of a trial that is cleared nothing shall stay. Watchers read the marker in etcd's history."""
        marker = etcd_keys.to_etcd(etcd_keys.marker_of(trial))
        request = protocol.TxnRequest(success=[etcd_keys.delete_operation(marker)])
        try:
            self.client.transaction(request, deadline_s=self.client.deadline_s())
        except (Unsure, StoreUnavailable):
            logger.warning("a trial's marker stays in etcd trial=%s", trial)
