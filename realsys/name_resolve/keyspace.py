"""The contents of a store as a value: applies operations, returns entries and events.

Shared by the memory and the file store, so that leases, revisions and transactions mean the same in
both. Pure: no clock, no file, no lock; its owner guards it and assigns revisions to lists of
operations. Whether a lease is still alive is not known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from realsys.name_resolve.store import Compare, Entry, Event, EventKind, is_under
from realsys.name_resolve.store_refusals import lease_lost
from realsys.runtime.process_identity import ProcessIdentity

# A watcher that lags further gets the difference (keyspace_watch.py).
MAX_HISTORY_EVENTS = 8192
MAX_HISTORY_BYTES = 64 * 1024 * 1024


class PutKey(msgspec.Struct, frozen=True, tag="put"):
    """Sets a key, optionally bound to a lease."""

    key: str
    value: bytes
    lease_id: str | None


class DeleteKey(msgspec.Struct, frozen=True, tag="delete"):
    """Deletes a key."""

    key: str


class GrantLease(msgspec.Struct, frozen=True, tag="grant"):
    """Grants a lease to a process."""

    lease_id: str
    ttl_s: float
    holder: ProcessIdentity


class EndLease(msgspec.Struct, frozen=True, tag="end"):
    """Ends a lease and deletes its keys."""

    lease_id: str
    expired: bool  # False: revoked by its holder


Operation = PutKey | DeleteKey | GrantLease | EndLease


class KeySpaceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All contents at one revision."""

    revision: int
    entries: list[Entry]
    leases: list[GrantLease]


class KeySpace:
    """Entries, leases and recent events of a store.

    Args:
        snapshot: the initial contents; its revision is also where the history begins.
    """

    def __init__(self, snapshot: KeySpaceSnapshot | None = None) -> None:
        self.revision = snapshot.revision if snapshot else 0
        self.entries = {e.key: e for e in snapshot.entries} if snapshot else {}
        self.leases = {g.lease_id: g for g in snapshot.leases} if snapshot else {}
        self.keys_of_lease: dict[str, set[str]] = {lease_id: set() for lease_id in self.leases}
        for entry in self.entries.values():
            if entry.lease_id is not None:
                self.keys_of_lease[entry.lease_id].add(entry.key)
        self._history: deque[Event] = deque()
        self._history_bytes = 0
        self._history_floor = self.revision  # events of later revisions are all in the history

    def snapshot(self) -> KeySpaceSnapshot:
        entries, leases = list(self.entries.values()), list(self.leases.values())
        return KeySpaceSnapshot(revision=self.revision, entries=entries, leases=leases)

    def subtree(self, prefix: str) -> list[Entry]:
        found = [entry for key, entry in self.entries.items() if is_under(key, prefix)]
        return sorted(found, key=lambda entry: entry.key)

    def leases_under(self, prefix: str) -> list[str]:
        """Returns the leases with a key at or below ``prefix``."""
        held = self.keys_of_lease.items()
        return [lease for lease, keys in held if any(is_under(key, prefix) for key in keys)]

    def holds(self, compare: Compare) -> bool:
        entry = self.entries.get(compare.key)
        if compare.value is not None:
            return entry is not None and entry.value == compare.value
        return (entry.revision if entry else 0) == compare.revision

    def events_from(self, revision: int) -> list[Event] | None:
        """Returns the events of ``revision`` and later; None if the history does not reach back
        that far."""
        if revision > self.revision:
            return []
        if revision <= self._history_floor:
            return None
        newer = []
        for event in reversed(self._history):
            if event.revision < revision:
                break
            newer.append(event)
        return newer[::-1]

    def apply(self, revision: int, operations: Iterable[Operation]) -> None:
        """Applies the operations as ``revision``."""
        self.revision = revision
        for operation in operations:
            match operation:
                case PutKey():
                    self._put(operation)
                case DeleteKey(key=key):
                    self._end_key(key, EventKind.DELETE)
                case GrantLease(lease_id=lease_id):
                    self.leases[lease_id] = operation
                    self.keys_of_lease[lease_id] = set()
                case EndLease(lease_id=lease_id, expired=expired):
                    kind = EventKind.EXPIRE if expired else EventKind.DELETE
                    for key in sorted(self.keys_of_lease.get(lease_id, ())):
                        self._end_key(key, kind)
                    self.leases.pop(lease_id, None)
                    self.keys_of_lease.pop(lease_id, None)
        while len(self._history) > MAX_HISTORY_EVENTS or self._history_bytes > MAX_HISTORY_BYTES:
            oldest = self._history.popleft()
            self._history_floor = oldest.revision
            self._history_bytes -= len(oldest.value)

    def _put(self, put: PutKey) -> None:
        old = self.entries.get(put.key)
        if old is not None and old.lease_id is not None:
            self.keys_of_lease[old.lease_id].discard(put.key)
        if put.lease_id is not None:
            self.keys_of_lease[put.lease_id].add(put.key)
        self.entries[put.key] = Entry(
            key=put.key,
            value=put.value,
            revision=self.revision,
            version=old.version + 1 if old else 1,
            lease_id=put.lease_id,
        )
        self._record(EventKind.PUT, put.key, put.value)

    def _end_key(self, key: str, kind: EventKind) -> None:
        old = self.entries.pop(key, None)
        if old is None:
            return
        if old.lease_id is not None:
            self.keys_of_lease[old.lease_id].discard(key)
        self._record(kind, key, old.value)

    def _record(self, kind: EventKind, key: str, value: bytes) -> None:
        self._history_bytes += len(value)
        self._history.append(Event(kind=kind, key=key, value=value, revision=self.revision))


def difference(known: dict[str, int], entries: Sequence[Entry], *, revision: int) -> list[Event]:
    """Returns the events a watcher missed, from the revisions it knew and the entries that exist
    now.

    Args:
        revision: assigned to deletions, whose own revision, kind and value are no longer known.
    """
    events = [
        Event(kind=EventKind.PUT, key=e.key, value=e.value, revision=e.revision)
        for e in entries
        if known.get(e.key) != e.revision
    ]
    gone = known.keys() - {e.key for e in entries}
    events += [
        Event(kind=EventKind.DELETE, key=key, value=b"", revision=revision) for key in sorted(gone)
    ]
    return sorted(events, key=lambda event: event.revision)


def require_lease(space: KeySpace, lease_id: str | None, *, where: str) -> str | None:
    """Returns ``lease_id`` if it is None or alive; raises LeaseLost otherwise."""
    if lease_id is not None and lease_id not in space.leases:
        raise lease_lost(f"lease {lease_id} has ended", where=where)
    return lease_id
