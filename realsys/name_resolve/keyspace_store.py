"""NameResolve over a KeySpace: everything that the memory and file stores have in common.

A subclass implements how the KeySpace is brought up to date, how a write is applied, and how a
lease is judged; everything else is here and in keyspace_watch.py. Two locks:
``_write_lock`` is taken first and may be held while waiting for other processes; ``lock`` guards
the KeySpace and is held for microseconds, so that reads and lease renewals never wait for a slow
write.
"""

from __future__ import annotations

import logging
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from realsys.api.errors import KeyExists
from realsys.name_resolve import store_refusals
from realsys.name_resolve.keyspace import (
    DeleteKey,
    EndLease,
    GrantLease,
    KeySpace,
    Operation,
    PutKey,
    require_lease,
)
from realsys.name_resolve.keyspace_watch import KeySpaceWatch
from realsys.name_resolve.store import (
    Compare,
    Entry,
    Lease,
    Put,
    canonical,
    check_clearable,
    check_prefixes,
    check_value,
)
from realsys.runtime.process_identity import this_process

logger = logging.getLogger(__name__)

Decide = Callable[[KeySpace], Sequence[Operation]]


class KeySpaceStore(ABC):
    """A NameResolve. ``where`` names the store in errors; ``clock`` judges leases."""

    def __init__(self, *, where: str, clock: Callable[[], float], lock: threading.RLock) -> None:
        self.where, self.clock = where, clock
        self.lock, self._write_lock = lock, threading.RLock()
        self._closed = False

    @abstractmethod
    def current(self) -> KeySpace:
        """Returns the up-to-date KeySpace. Called with ``lock`` held."""

    def recent(self) -> KeySpace:
        """Returns a possibly slightly older KeySpace, for callers that poll. Called with ``lock``
        held."""
        return self.current()

    @abstractmethod
    def write(self, decide: Decide) -> int:
        """Applies the operations that ``decide`` returns for the newest contents; returns the
        revision.

        ``decide`` is called again if another writer was faster. An empty list writes nothing.
        """

    @abstractmethod
    def is_dead(self, lease: GrantLease, *, at_once: bool) -> bool:
        """Returns whether the lease has ended. Without ``at_once`` the answer may be slightly old."""

    @abstractmethod
    def renew(self, lease_id: str) -> None:
        """Shows all readers that the holder is alive."""

    @abstractmethod
    def renewed_ago_s(self, lease_id: str) -> float | None:
        """See NameResolve."""

    @abstractmethod
    def pause(self, longest_s: float, *, seen: int) -> None:
        """Waits until something may have changed since revision ``seen``."""

    def close(self) -> None:
        self._closed = True

    def revision(self) -> int:
        with self.lock:
            return self.opened().revision

    def add(
        self, key: str, value: bytes, *, lease: Lease | None = None, replace: bool = False
    ) -> int:
        key, value = canonical(key), check_value(key, value)
        lease_id = lease.id if lease is not None else None

        def decide(space: KeySpace) -> list[Operation]:
            if not replace and (held := space.entries.get(key)) is not None:
                raise store_refusals.taken(held, where=self.where)
            return [PutKey(key, value, require_lease(space, lease_id, where=self._at(key)))]

        try:
            return self.write(decide)
        except KeyExists:
            if not self._end_dead_leases_of([key], at_once=True):
                raise
            return self.write(decide)

    def get(self, key: str) -> Entry:
        key = canonical(key)
        with self.lock:
            entry = self.opened().entries.get(key)
        if entry is not None and entry.lease_id is not None and self._end_dead_leases_of([key]):
            with self.lock:
                entry = self.opened().entries.get(key)
        if entry is None:
            raise store_refusals.not_there(key, where=self.where)
        return entry

    def get_subtree(self, prefix: str) -> list[Entry]:
        prefix = canonical(prefix)
        with self.lock:
            leases = self.opened().leases_under(prefix)
        self.end_dead(leases)
        with self.lock:
            return self.opened().subtree(prefix)

    def find_subtree(self, prefix: str) -> list[str]:
        return [entry.key for entry in self.get_subtree(prefix)]

    def delete(self, key: str, *, missing_ok: bool = False) -> None:
        key = canonical(key)

        def decide(space: KeySpace) -> list[Operation]:
            if key in space.entries:
                return [DeleteKey(key)]
            if missing_ok:
                return []
            raise store_refusals.not_there_to_delete(key, where=self.where)

        self.write(decide)

    def clear_subtree(self, prefix: str) -> int:
        prefix = check_clearable(prefix)
        cleared: list[Operation] = []

        def decide(space: KeySpace) -> list[Operation]:
            cleared[:] = [DeleteKey(entry.key) for entry in space.subtree(prefix)]
            return cleared

        self.write(decide)
        return len(cleared)

    def transaction(
        self, compares: Sequence[Compare], *, puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> bool:
        store_refusals.check_transaction(compares, puts, deletes, where=self.where)
        self._end_dead_leases_of([compare.key for compare in compares])
        held = False

        def decide(space: KeySpace) -> list[Operation]:
            nonlocal held
            held = all(space.holds(compare) for compare in compares)
            if not held:
                return []
            operations: list[Operation] = [DeleteKey(k) for k in deletes if k in space.entries]
            for put in puts:
                lease_id = put.lease.id if put.lease is not None else None
                require_lease(space, lease_id, where=self._at(put.key))
                operations.append(PutKey(put.key, put.value, lease_id))
            return operations

        self.write(decide)
        return held

    def wait(
        self,
        keys: Sequence[str],
        *,
        timeout_s: float,
        describe_missing: Callable[[list[str]], str] | None = None,
    ) -> dict[str, bytes]:
        keys = [canonical(key) for key in keys]
        wait = store_refusals.KeyWait(keys, timeout_s, describe_missing, self.where)
        self.revision()  # brings the contents up to date
        while True:
            self._end_dead_leases_of(keys, look=self.watched)
            with self.lock:
                space = self.watched()
                entries, seen = space.entries, space.revision
                found = {key: entries[key].value for key in keys if key in entries}
            if len(found) == len(set(keys)):
                return found
            self.pause(wait.left_s(found), seen=seen)

    def watch(
        self, *prefixes: str, from_revision: int | None = None, judges_leases: bool = True
    ) -> KeySpaceWatch:
        prefixes = check_prefixes(prefixes)
        return KeySpaceWatch(self, prefixes, from_revision, judges_leases=judges_leases)

    def grant(self, ttl_s: float) -> StoreLease:
        store_refusals.check_ttl(ttl_s)
        lease_id = secrets.token_hex(8)
        self.write(lambda space: [GrantLease(lease_id, ttl_s, this_process())])
        return StoreLease(self, lease_id, ttl_s)

    def opened(self) -> KeySpace:
        if self._closed:
            raise store_refusals.closed(where=self.where)
        return self.current()

    def watched(self) -> KeySpace:
        if self._closed:
            raise store_refusals.closed(where=self.where)
        return self.recent()

    def _at(self, key: str) -> str:
        return f"key {key!r} in {self.where}"

    def _end_dead_leases_of(
        self,
        keys: Iterable[str],
        *,
        at_once: bool = False,
        look: Callable[[], KeySpace] | None = None,
    ) -> bool:
        with self.lock:
            entries = (look or self.opened)().entries
            held = [entries[key].lease_id for key in keys if key in entries]
        lease_ids = {lease_id for lease_id in held if lease_id is not None}
        return self.end_dead(lease_ids, at_once=at_once)

    def end_dead(self, lease_ids: Iterable[str], *, at_once: bool = False) -> bool:
        """Ends those of the leases that have expired; returns whether there were any."""
        with self.lock:
            leases = self.watched().leases
            asked = [leases[i] for i in lease_ids if i in leases]
            dead = [lease.lease_id for lease in asked if self.is_dead(lease, at_once=at_once)]
        if dead:
            self.write(lambda space: self._endings(space, dead))
        return bool(dead)

    def _endings(self, space: KeySpace, lease_ids: list[str]) -> list[Operation]:
        # Judged again under the write lock: the holder may have renewed since the first check.
        leases = [space.leases[i] for i in lease_ids if i in space.leases]
        ended = [lease for lease in leases if self.is_dead(lease, at_once=True)]
        for lease in ended:
            logger.warning(
                "lease expired holder=%s pid=%d ttl_s=%g keys=%s",
                lease.holder.host,
                lease.holder.pid,
                lease.ttl_s,
                ",".join(sorted(space.keys_of_lease[lease.lease_id])),
            )
        return [EndLease(lease.lease_id, expired=True) for lease in ended]


class StoreLease:
    """A Lease of a KeySpaceStore. lease_renewer.py renews in time; each store judges the leases of
    other processes."""

    def __init__(self, store: KeySpaceStore, lease_id: str, ttl_s: float) -> None:
        self._store, self.id, self.ttl_s = store, lease_id, ttl_s
        self._renewed_s = store.clock()

    def keep_alive(self) -> None:
        sent_s = self._store.clock()
        if sent_s - self._renewed_s > self.ttl_s:
            # Expired even if no other process has noticed yet: one may act on it any moment.
            self._end(expired=True)
            self._raise_lost(f"was not renewed for {sent_s - self._renewed_s:.1f} s")
        self._store.renew(self.id)
        with self._store.lock:
            alive = self.id in self._store.opened().leases
        if not alive:
            self._raise_lost("was ended by another process, which took this one for dead")
        self._renewed_s = sent_s

    def revoke(self) -> None:
        self._end(expired=False)

    def _end(self, *, expired: bool) -> None:
        def decide(space: KeySpace) -> list[Operation]:
            return [EndLease(self.id, expired)] if self.id in space.leases else []

        self._store.write(decide)

    def _raise_lost(self, why: str) -> None:
        what = f"lease {self.id} (ttl {self.ttl_s:g} s) {why}"
        raise store_refusals.lease_lost(what, where=self._store.where)
