"""A watch of a KeySpaceStore: the events a watcher has not seen yet.

For keyspace_store.py, which creates them. A watcher polls; nothing is pushed. Events come from the
KeySpace's history; a watcher that lags behind it gets the difference to what it knew (coalesced:
one PUT per changed key, and for a removed key a DELETE without its last value).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from realsys.name_resolve.keyspace import KeySpace, difference
from realsys.name_resolve.store import Entry, Event, EventKind, Watch, is_under

if TYPE_CHECKING:
    from realsys.name_resolve.keyspace_store import KeySpaceStore


class KeySpaceWatch(Watch):
    """A Watch of a KeySpaceStore. For one thread; ``close`` is safe from another."""

    def __init__(
        self,
        store: KeySpaceStore,
        prefixes: Sequence[str],
        from_revision: int | None,
        *,
        judges_leases: bool,
    ) -> None:
        self._store, self._prefixes, self._closed = store, prefixes, False
        self._judges_leases = judges_leases
        with store.lock:
            space = store.opened()
            self._next = space.revision + 1 if from_revision is None else from_revision
            older = [e for e in self._entries(space) if e.revision < self._next]
        self._known = {entry.key: entry.revision for entry in older}

    def poll(self, timeout_s: float) -> list[Event]:
        deadline_s = time.monotonic() + timeout_s
        while not self._closed:
            if events := self._take():
                return events
            if (left_s := deadline_s - time.monotonic()) <= 0:
                break
            self._store.pause(left_s, seen=self._next - 1)
        return []

    @property
    def is_connected(self) -> bool:
        return True  # it has no connection: a failing store raises from ``poll``

    def close(self) -> None:
        self._closed = True

    def _take(self) -> list[Event]:
        if self._judges_leases:
            with self._store.lock:
                space = self._store.watched()
                leases = {i for prefix in self._prefixes for i in space.leases_under(prefix)}
            self._store.end_dead(leases)
        with self._store.lock:
            space = self._store.watched()
            events = space.events_from(self._next)
            if events is None:
                events = difference(self._known, self._entries(space), revision=space.revision)
            self._next = space.revision + 1
        events = [event for event in events if self._is_ours(event.key)]
        for event in events:
            if event.kind is EventKind.PUT:
                self._known[event.key] = event.revision
            else:
                self._known.pop(event.key, None)
        return events

    def _is_ours(self, key: str) -> bool:
        return any(is_under(key, prefix) for prefix in self._prefixes)

    def _entries(self, space: KeySpace) -> list[Entry]:
        return [entry for key, entry in space.entries.items() if self._is_ours(key)]
