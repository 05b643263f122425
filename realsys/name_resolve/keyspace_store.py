"""The store's calls over a KeySpace: everything that memory and file stores have in common.

A subclass says how to bring the KeySpace up to date, how to make a write happen, and how to judge a
lease; all else stands here, in lease.py and in watch.py once. Two locks: ``_write_lock``
is taken first and may be held while waiting for other processes, ``lock`` guards the KeySpace and is
held for microseconds, so that reads and lease renewals are never behind a slow write.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from realsys.api.errors import KeyExists, KeyNotFound, StoreError, WaitTimeout
from realsys.name_resolve.keyspace import (
    DeleteKey,
    EndLease,
    GrantLease,
    KeySpace,
    Operation,
    PutKey,
    require_lease,
)
from realsys.name_resolve.lease import StoreLease
from realsys.name_resolve.process_identity import this_process
from realsys.name_resolve.store import (
    Compare,
    Entry,
    Lease,
    Put,
    canonical,
    check_clearable,
    check_value,
)
from realsys.name_resolve.watch import KeySpaceWatch

logger = logging.getLogger(__name__)

Decide = Callable[[KeySpace], Sequence[Operation]]
SHORT_VALUE_BYTES = 200  # a holder's value up to this length is shown in KeyExists
ANNOUNCE_EVERY_S = 30.0  # a long wait says so in the log


class KeySpaceStore(ABC):
    """A NameResolve. Args: ``where`` names the store in errors; ``clock`` judges leases."""

    def __init__(self, *, where: str, clock: Callable[[], float], lock: threading.RLock) -> None:
        self.where, self.clock = where, clock
        self.lock, self._write_lock = lock, threading.RLock()
        self._closed = False

    @abstractmethod
    def current(self) -> KeySpace:
        """The KeySpace, up to date. Called with ``lock`` held."""

    @abstractmethod
    def write(self, decide: Decide) -> int:
        """Makes happen what ``decide`` returns for the newest contents; returns the revision.

        ``decide`` may be asked again when somebody else was faster. An empty list writes nothing.
        """

    @abstractmethod
    def is_dead(self, lease: GrantLease, *, at_once: bool) -> bool:
        """Whether the lease is over. Without ``at_once`` it may answer from a moment ago."""

    @abstractmethod
    def renew(self, lease_id: str) -> None:
        """Shows every reader that the holder is alive."""

    @abstractmethod
    def renewed_ago_s(self, lease_id: str) -> float | None:
        """See NameResolve."""

    @abstractmethod
    def pause(self, longest_s: float) -> None:
        """Waits until something may have changed."""

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
                raise _taken(held, self.where)
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
            raise KeyNotFound(
                f"no key {key!r}", where=self.where, fix="its writer has not come yet, or has ended"
            )
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
            raise KeyNotFound(
                f"no key {key!r} to delete", where=self.where, fix="pass missing_ok=True if so"
            )

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
        written = [canonical(k) for k in (*(p.key for p in puts), *deletes)]
        if len(set(written)) < len(written):
            raise StoreError(
                f"a transaction writes a key twice: {sorted(written)}",
                where=self.where,
                fix="put or delete each key once",
            )
        for put in puts:
            check_value(put.key, put.value)
        self._end_dead_leases_of([canonical(c.key) for c in compares])
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
        began_s = announced_s = time.monotonic()
        while True:
            self._end_dead_leases_of(keys)
            with self.lock:
                entries = self.opened().entries
                found = {key: entries[key].value for key in keys if key in entries}
            if len(found) == len(set(keys)):
                return found
            missing = [key for key in keys if key not in found]
            now_s = time.monotonic()
            if now_s - began_s >= timeout_s:
                raise _timed_out(missing, keys, timeout_s, describe_missing, self.where)
            if now_s - announced_s >= ANNOUNCE_EVERY_S:
                announced_s = now_s
                text = f"{', '.join(missing[:5])} ({len(missing)} of {len(keys)})"
                logger.info("waiting for=%s timeout_s=%g", text, timeout_s)
            self.pause(timeout_s - (now_s - began_s))

    def watch(self, prefix: str, *, from_revision: int | None = None) -> KeySpaceWatch:
        return KeySpaceWatch(self, canonical(prefix), from_revision)

    def grant(self, ttl_s: float) -> StoreLease:
        if not ttl_s > 0:
            raise StoreError(f"ttl_s={ttl_s} is not above 0", where="grant", fix="15 is usual")
        lease_id = secrets.token_hex(8)
        self.write(lambda space: [GrantLease(lease_id, ttl_s, this_process())])
        return StoreLease(self, lease_id, ttl_s)

    def opened(self) -> KeySpace:
        if self._closed:
            raise StoreError("the store is closed", where=self.where, fix="open it again")
        return self.current()

    def _at(self, key: str) -> str:
        return f"key {key!r} in {self.where}"

    def _end_dead_leases_of(self, keys: Iterable[str], *, at_once: bool = False) -> bool:
        with self.lock:
            entries = self.opened().entries
            held = [entries[key].lease_id for key in keys if key in entries]
        lease_ids = {lease_id for lease_id in held if lease_id is not None}
        return self.end_dead(lease_ids, at_once=at_once)

    def end_dead(self, lease_ids: Iterable[str], *, at_once: bool = False) -> bool:
        """Writes the end of those leases that are over; returns whether any was."""
        with self.lock:
            leases = self.opened().leases
            asked = [leases[i] for i in lease_ids if i in leases]
            dead = [lease.lease_id for lease in asked if self.is_dead(lease, at_once=at_once)]
        if dead:
            self.write(lambda space: self._endings(space, dead))
        return bool(dead)

    def _endings(self, space: KeySpace, lease_ids: list[str]) -> list[Operation]:
        # Judged again under the write lock: the holder may have renewed since the first look.
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


def _taken(held: Entry, where: str) -> KeyExists:
    shown = f", held with {held.value!r}" if len(held.value) <= SHORT_VALUE_BYTES else ""
    return KeyExists(
        f"key {held.key!r} exists since revision {held.revision}{shown}",
        where=where,
        fix="another process was first; pass replace=True only if you own the key",
    )


def _timed_out(
    missing: list[str],
    keys: Sequence[str],
    timeout_s: float,
    describe_missing: Callable[[list[str]], str] | None,
    where: str,
) -> WaitTimeout:
    what = f"{len(missing)} of {len(keys)} keys did not come in {timeout_s:g} s: "
    what += ", ".join(missing)
    if describe_missing is not None:
        what += f"\n  {describe_missing(missing)}"
    return WaitTimeout(what, where=where, fix="look at the logs of the workers that write them")
