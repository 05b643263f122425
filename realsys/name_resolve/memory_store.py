"""The name-resolution store inside one process: for unit tests and runs whose roles are threads.

Sees no other process and writes no files. Leases expire by the clock alone, which tests may
replace. Stores opened under one name share their contents (open.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from realsys.name_resolve.keyspace import EndLease, GrantLease, KeySpace, Operation
from realsys.name_resolve.keyspace_store import Decide, KeySpaceStore

POLL_S = 0.05  # how often a waiter checks for expired leases; a write wakes it at once


class SharedMemory:
    """The contents behind one or several MemoryStores. ``changed`` guards all of it."""

    def __init__(self) -> None:
        self.space = KeySpace()
        self.renewed_s: dict[str, float] = {}
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)


class MemoryStore(KeySpaceStore):
    """A NameResolve in memory. ``clock`` counts seconds and never goes back."""

    def __init__(
        self,
        shared: SharedMemory | None = None,
        *,
        name: str = "unnamed",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared = shared or SharedMemory()
        super().__init__(where=f"memory://{name}", clock=clock, lock=self._shared.lock)

    def current(self) -> KeySpace:
        return self._shared.space

    def write(self, decide: Decide) -> int:
        with self.lock:
            space = self.opened()
            if operations := decide(space):
                space.apply(space.revision + 1, operations)
                self._note_renewals(operations)
                self._shared.changed.notify_all()
            return space.revision

    def is_dead(self, lease: GrantLease, *, at_once: bool) -> bool:
        return self.clock() - self._shared.renewed_s[lease.lease_id] > lease.ttl_s

    def renew(self, lease_id: str) -> None:
        with self.lock:
            if lease_id in self.opened().leases:
                self._shared.renewed_s[lease_id] = self.clock()

    def renewed_ago_s(self, lease_id: str) -> float | None:
        with self.lock:
            renewed_s = self._shared.renewed_s.get(lease_id)
            return None if renewed_s is None else max(0.0, self.clock() - renewed_s)

    def pause(self, longest_s: float, *, seen: int) -> None:
        with self.lock:
            if self._shared.space.revision <= seen:
                self._shared.changed.wait(min(longest_s, POLL_S))

    def _note_renewals(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, GrantLease):
                self._shared.renewed_s[operation.lease_id] = self.clock()
            elif isinstance(operation, EndLease):
                self._shared.renewed_s.pop(operation.lease_id, None)
