"""A store in a shared folder: no server to run, for one machine or a cluster's file system.

Every process keeps the contents in memory and reads on in the log (commit_log.py) before it answers,
so a reader sees every write that ended before its call began (on NFS: up to 50 ms old). Watches poll
each 50 ms and see every write in order.

A lease is a counter that its holder bumps. A reader judges it by its own monotonic clock: not changed
for longer than the ttl *since this reader first saw that number* means over. Clocks of two hosts, and
file times, are never compared. A holder on this host that is dead is seen at once. Ended leases are
written to the log by whoever notices first, so all readers see the same end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from realsys.api.errors import ConfigError, StoreUnavailable
from realsys.name_resolve.commit_log import CommitLog
from realsys.name_resolve.keyspace import (
    EndLease,
    GrantLease,
    KeySpace,
    Operation,
    Snapshot,
)
from realsys.name_resolve.keyspace_store import Decide, KeySpaceStore
from realsys.name_resolve.process_identity import is_known_dead

POLL_S = 0.05
JUDGE_EVERY_S = 0.2  # reads of one lease's counter; hundreds of leases must not fill a core
SNAPSHOT_EVERY = 1024  # revisions; also how far behind a reader may be and still see every event

_commits = msgspec.msgpack.Decoder(list[Operation])
_snapshots = msgspec.msgpack.Decoder(Snapshot)


class FileStore(KeySpaceStore):
    """A NameResolve in the folder ``root``. Not to be used across a fork: open one in the child.

    Args:
        poll_s: how often waits and watches look.
        lock_timeout_s: a write gives up (StoreUnavailable) when others hold the lock this long.
    """

    def __init__(
        self,
        root: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        poll_s: float = POLL_S,
        lock_timeout_s: float = 10.0,
    ) -> None:
        if root.resolve() == Path("/"):
            raise ConfigError(
                "a store can't be the root folder", where=str(root), fix="name a folder of its own"
            )
        super().__init__(where=f"file://{root}", clock=clock, lock=threading.RLock())
        self._log = CommitLog(root, lock_timeout_s=lock_timeout_s)
        self._poll_s = poll_s
        self._bumps: dict[str, int] = {}  # of our own leases
        self._seen: dict[str, tuple[bytes | None, float]] = {}  # counter, when first seen so
        self._judged_s: dict[str, float] = {}
        self._log.open(msgspec.msgpack.encode(KeySpace().snapshot()))
        self._space = self._load()

    def close(self) -> None:
        with self._write_lock, self.lock:
            if not self._closed:
                super().close()
                self._log.close()

    def current(self) -> KeySpace:
        self._log.refresh()
        for _ in range(100):
            self._read_on()
            # The newest file of the log is never removed, and files go oldest first. So if ours is
            # still there, the next one was not removed either: it does not exist yet.
            if self._log.has(self._space.revision):
                return self._space
            self._space = self._load()
        raise StoreUnavailable(
            "the log was removed under this process",
            where=self.where,
            fix="the folder is gone or damaged: stop the trial and start it with a new store",
        )

    def write(self, decide: Decide) -> int:
        with self._write_lock:
            if self._closed:
                self.opened()  # raises
            with self._log.exclusive(), self.lock:
                while True:
                    space = self.opened()
                    operations = decide(space)
                    if not operations:
                        return space.revision
                    self._make_counters(operations)
                    revision = space.revision + 1
                    if self._log.append(revision, msgspec.msgpack.encode(operations)):
                        break  # else a host that our lock does not reach was faster: look again
                space.apply(revision, operations)
                self._remove_counters(operations)
                if revision % SNAPSHOT_EVERY == 0:
                    data = msgspec.msgpack.encode(space.snapshot())
                    self._log.compact(revision, data, space.leases.__contains__)
                return revision

    def is_dead(self, lease: GrantLease, *, at_once: bool) -> bool:
        now_s = self.clock()  # before the look: a pause of ours in between must not count
        lease_id = lease.lease_id
        if not at_once and now_s - self._judged_s.get(lease_id, float("-inf")) < JUDGE_EVERY_S:
            return False
        self._judged_s[lease_id] = now_s
        if is_known_dead(lease.holder):
            return True
        counter = self._log.read_counter(lease_id)
        seen, since_s = self._seen.get(lease_id, (b"", now_s))
        if counter != seen:
            self._seen[lease_id] = (counter, now_s)
            return False
        return now_s - since_s > lease.ttl_s

    def renew(self, lease_id: str) -> None:
        with self.lock:
            if lease_id in self.opened().leases:
                self._bumps[lease_id] = self._bumps.get(lease_id, 0) + 1
                self._log.write_counter(lease_id, self._bumps[lease_id])

    def renewed_ago_s(self, lease_id: str) -> float | None:
        written_s = self._log.counter_time(lease_id)
        return None if written_s is None else max(0.0, time.time() - written_s)

    def pause(self, longest_s: float) -> None:
        time.sleep(min(longest_s, self._poll_s))

    def _load(self) -> KeySpace:
        try:
            return KeySpace(_snapshots.decode(self._log.load_snapshot()))
        except msgspec.MsgspecError as error:
            raise self._damaged("a snapshot", error) from error

    def _read_on(self) -> None:
        space = self._space
        while self._log.has(space.revision + 1):
            data = self._log.read(space.revision + 1)
            if data is None:
                return
            try:
                operations = _commits.decode(data)
            except msgspec.MsgspecError as error:
                raise self._damaged(f"revision {space.revision + 1}", error) from error
            space.apply(space.revision + 1, operations)

    def _damaged(self, what: str, error: msgspec.MsgspecError) -> StoreUnavailable:
        return StoreUnavailable(
            f"{what} can't be read: {error}",
            where=self.where,
            fix="a power cut or a full disk? Stop the trial and start it with a new store",
        )

    def _make_counters(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, GrantLease):
                self._log.write_counter(operation.lease_id, 0, create=True)

    def _remove_counters(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, EndLease):
                self._log.remove_counter(operation.lease_id)
                for notes in (self._bumps, self._seen, self._judged_s):
                    notes.pop(operation.lease_id, None)
