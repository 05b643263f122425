"""The store's calls over a KeySpace: everything that memory and file stores have in common.

A subclass says how to bring the KeySpace up to date, how to make a write happen, and how to judge a
lease; all else (exclusive add, waits, watches, leases) stands here once. Two locks: ``_write_lock``
is taken first and may be held while waiting for other processes, ``_lock`` guards the KeySpace and is
held for microseconds, so that reads and lease renewals are never behind a slow write.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self

from realsys.api.errors import KeyExists, KeyNotFound, LeaseLost, StoreError, WaitTimeout
from realsys.name_resolve.keyspace import (
    DeleteKey,
    EndLease,
    GrantLease,
    KeySpace,
    Operation,
    PutKey,
    difference,
    require_lease,
)
from realsys.name_resolve.process_identity import this_process
from realsys.name_resolve.store import (
    Compare,
    Entry,
    Event,
    EventKind,
    Lease,
    Put,
    canonical,
    check_clearable,
    check_value,
    is_under,
)

logger = logging.getLogger(__name__)

Decide = Callable[[KeySpace], Sequence[Operation]]
SHORT_VALUE_BYTES = 200  # a holder's value up to this length is shown in KeyExists
ANNOUNCE_EVERY_S = 30.0  # a long wait says so in the log


class KeySpaceStore(ABC):
    """A NameResolve. Args: ``where`` names the store in errors; ``clock`` judges leases."""

    def __init__(self, *, where: str, clock: Callable[[], float], lock: threading.RLock) -> None:
        self.where, self.clock = where, clock
        self._lock, self._write_lock = lock, threading.RLock()
        self._closed = False

    @abstractmethod
    def _current(self) -> KeySpace:
        """The KeySpace, up to date. Called with ``_lock`` held."""

    @abstractmethod
    def _write(self, decide: Decide) -> int:
        """Makes happen what ``decide`` returns for the newest contents; returns the revision.

        ``decide`` may be asked again when somebody else was faster. An empty list writes nothing.
        """

    @abstractmethod
    def _is_dead(self, lease: GrantLease, *, at_once: bool) -> bool:
        """Whether the lease is over. Without ``at_once`` it may answer from a moment ago."""

    @abstractmethod
    def _renew(self, lease_id: str) -> None:
        """Shows every reader that the holder is alive."""

    @abstractmethod
    def _pause(self, longest_s: float) -> None:
        """Waits until something may have changed."""

    def close(self) -> None:
        self._closed = True

    def revision(self) -> int:
        with self._lock:
            return self._opened().revision

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
            return self._write(decide)
        except KeyExists:
            if not self._end_dead_leases_of([key]):
                raise
            return self._write(decide)

    def get(self, key: str) -> Entry:
        key = canonical(key)
        with self._lock:
            entry = self._opened().entries.get(key)
        if entry is not None and entry.lease_id is not None and self._end_dead_leases_of([key]):
            with self._lock:
                entry = self._opened().entries.get(key)
        if entry is None:
            raise KeyNotFound(
                f"no key {key!r}", where=self.where, fix="its writer has not come yet, or has ended"
            )
        return entry

    def get_subtree(self, prefix: str) -> list[Entry]:
        prefix = canonical(prefix)
        with self._lock:
            leases = self._opened().leases_under(prefix)
        self._end_dead(leases)
        with self._lock:
            return self._opened().subtree(prefix)

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

        self._write(decide)

    def clear_subtree(self, prefix: str) -> int:
        prefix = check_clearable(prefix)
        cleared: list[Operation] = []

        def decide(space: KeySpace) -> list[Operation]:
            cleared[:] = [DeleteKey(entry.key) for entry in space.subtree(prefix)]
            return cleared

        self._write(decide)
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

        self._write(decide)
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
            with self._lock:
                entries = self._opened().entries
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
            self._pause(timeout_s - (now_s - began_s))

    def watch(self, prefix: str, *, from_revision: int | None = None) -> KeySpaceWatch:
        return KeySpaceWatch(self, canonical(prefix), from_revision)

    def grant(self, ttl_s: float) -> StoreLease:
        if not ttl_s > 0:
            raise StoreError(f"ttl_s={ttl_s} is not above 0", where="grant", fix="15 is usual")
        lease_id = secrets.token_hex(8)
        self._write(lambda space: [GrantLease(lease_id, ttl_s, this_process())])
        return StoreLease(self, lease_id, ttl_s)

    def _opened(self) -> KeySpace:
        if self._closed:
            raise StoreError("the store is closed", where=self.where, fix="open it again")
        return self._current()

    def _at(self, key: str) -> str:
        return f"key {key!r} in {self.where}"

    def _end_dead_leases_of(self, keys: Iterable[str]) -> bool:
        with self._lock:
            entries = self._opened().entries
            held = [entries[key].lease_id for key in keys if key in entries]
        return self._end_dead({lease_id for lease_id in held if lease_id is not None})

    def _end_dead(self, lease_ids: Iterable[str], *, at_once: bool = False) -> bool:
        """Writes the end of those leases that are over; returns whether any was."""
        with self._lock:
            leases = self._opened().leases
            asked = [leases[i] for i in lease_ids if i in leases]
            dead = [lease.lease_id for lease in asked if self._is_dead(lease, at_once=at_once)]
        if dead:
            self._write(lambda space: self._endings(space, dead))
        return bool(dead)

    def _endings(self, space: KeySpace, lease_ids: list[str]) -> list[Operation]:
        # Judged again under the write lock: the holder may have renewed since the first look.
        leases = [space.leases[i] for i in lease_ids if i in space.leases]
        ended = [lease for lease in leases if self._is_dead(lease, at_once=True)]
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
            # Too late is over, also when nobody has looked: others may act on it any moment.
            self._end(expired=True)
            self._raise_lost(f"was not renewed for {sent_s - self._renewed_s:.1f} s")
        self._store._renew(self._id)
        with self._store._lock:
            alive = self._id in self._store._opened().leases
        if not alive:
            self._raise_lost("was ended by others, who took this process for dead")
        self._renewed_s = sent_s

    def revoke(self) -> None:
        self._end(expired=False)

    def _end(self, *, expired: bool) -> None:
        def decide(space: KeySpace) -> list[Operation]:
            return [EndLease(self._id, expired)] if self._id in space.leases else []

        self._store._write(decide)

    def _raise_lost(self, why: str) -> None:
        raise LeaseLost(
            f"lease {self._id} (ttl {self._ttl_s:g} s) {why}",
            where=self._store.where,
            fix="stop this process's side effects and let it exit; others take it for dead",
        )


class KeySpaceWatch:
    """A Watch of a KeySpaceStore. Used by one thread; ``close`` may come from another."""

    def __init__(self, store: KeySpaceStore, prefix: str, from_revision: int | None) -> None:
        self._store, self._prefix, self._closed = store, prefix, False
        with store._lock:
            space = store._opened()
            self._next = space.revision + 1 if from_revision is None else from_revision
            behind = space.events_from(self._next) is None
            known = [] if behind else space.subtree(prefix)
        self._known = {entry.key: entry.revision for entry in known}

    def poll(self, timeout_s: float) -> list[Event]:
        deadline_s = time.monotonic() + timeout_s
        while not self._closed:
            if events := self._take():
                return events
            if (left_s := deadline_s - time.monotonic()) <= 0:
                break
            self._store._pause(left_s)
        return []

    def close(self) -> None:
        self._closed = True

    def __iter__(self) -> Iterator[Event]:
        while not self._closed:
            yield from self.poll(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _take(self) -> list[Event]:
        with self._store._lock:
            leases = self._store._opened().leases_under(self._prefix)
        self._store._end_dead(leases)
        with self._store._lock:
            space = self._store._opened()
            events = space.events_from(self._next)
            if events is None:
                now = [e for e in space.subtree(self._prefix) if self._is_news(e)]
                events = difference(self._known, now, revision=space.revision)
            self._next = space.revision + 1
        events = [event for event in events if is_under(event.key, self._prefix)]
        for event in events:
            if event.kind is EventKind.PUT:
                self._known[event.key] = event.revision
            else:
                self._known.pop(event.key, None)
        return events

    def _is_news(self, entry: Entry) -> bool:
        return entry.key in self._known or entry.revision >= self._next


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
