"""A store in a shared folder: no server to run, for one machine or a cluster's file system.

Every process keeps the contents in memory and reads on in the log (commit_log.py) before it answers,
so a reader sees every write that ended before its call began (one of another host, on a shared file
system: 50 ms before). Watches and waits see every write in order: one of this host at once, since the
kernel says so (folder_changes.py), one of another host when they look again, after 50 ms while things
happen and after two seconds at most (looking.py). A server of a shared file system is asked little: a
trial at rest makes fewer than 20 calls a second (tests/process/test_file_calls.py, and on Slurm
tests/slurm/test_slurm_async.py). Of that most is reading counters of leases: whoever does not act on a
lease's end leaves it to others to notice (``judges_leases`` of a watch).

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
from realsys.name_resolve.file.commit_log import CommitLog
from realsys.name_resolve.file.folder_changes import OF_THIS_HOST
from realsys.name_resolve.file.looking import Looking
from realsys.name_resolve.keyspace import (
    EndLease,
    GrantLease,
    KeySpace,
    KeySpaceSnapshot,
    Operation,
)
from realsys.name_resolve.keyspace_store import Decide, KeySpaceStore
from realsys.runtime.process_identity import is_known_dead

POLL_S = 0.05
SURE_S = 10.0  # well below KEEP_S in commit_log.py
JUDGE_EVERY_S = 0.2  # whether a lease's holder on this host lives
READS_PER_TTL = 5.0  # of a lease's counter
SNAPSHOT_EVERY = 1024  # revisions; also how far behind a reader may be and still see every event

_commits = msgspec.msgpack.Decoder(list[Operation])
_snapshots = msgspec.msgpack.Decoder(KeySpaceSnapshot)


class FileStore(KeySpaceStore):
    """A NameResolve in the folder ``root``. Not to be used across a fork: open one in the child.

    Args:
        poll_s: how often waits and watches look while things happen.
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
        self._looking = Looking(poll_s)
        self._sure_s = float("-inf")  # when we last saw that our place in the log is still there
        self._is_behind = False  # a look has failed
        self._bumps: dict[str, int] = {}  # of our own leases
        self._seen: dict[str, tuple[bytes | None, float]] = {}  # counter, when first seen so
        self._read_s: dict[str, float] = {}
        self._judged_s: dict[str, float] = {}
        self._log.open(msgspec.msgpack.encode(KeySpace().snapshot()))
        try:
            self._space = self._load()
        except BaseException:
            self._log.close()
            raise

    def close(self) -> None:
        with self._write_lock, self.lock:
            if not self._closed:
                super().close()
                self._log.close()

    def current(self) -> KeySpace:
        changes, ago_s = self._log.changes, time.monotonic() - self._looking.looked_s
        if self._has_news():
            self._look(sure=True)
        # Without inotify each call looks; where other hosts write, several that come together look once.
        elif not changes.hears_all and (ago_s > POLL_S or self._log.file_system in OF_THIS_HOST):
            self._look()
        return self._space

    def glance(self) -> KeySpace:
        changes = self._log.changes
        if self._has_news():
            self._look(sure=True)
        elif not changes.hears_all and self._looking.due_in_s(time.monotonic()) <= 0:
            self._look()
        return self._space

    def write(self, decide: Decide) -> int:
        with self._write_lock:
            if self._closed:
                self.opened()  # raises
            with self._log.exclusive(), self.lock:
                while True:
                    space = self._look(sure=True)
                    operations = decide(space)
                    if not operations:
                        return space.revision
                    self._make_counters(operations)
                    revision = space.revision + 1
                    if self._log.append(revision, msgspec.msgpack.encode(operations)):
                        break  # else a host that our lock does not reach was faster: look again
                space.apply(revision, operations)
                self._looking.looked(time.monotonic(), found=True)
                self._remove_counters(operations)
                if revision % SNAPSHOT_EVERY == 0:
                    data = msgspec.msgpack.encode(space.snapshot())
                    self._log.compact(revision, data, space.leases.__contains__)
                return revision

    def is_dead(self, lease: GrantLease, *, at_once: bool) -> bool:
        now_s = self.clock()  # before the look: a pause of ours in between must not count
        lease_id, never_s = lease.lease_id, float("-inf")
        if not at_once and now_s - self._judged_s.get(lease_id, never_s) < JUDGE_EVERY_S:
            return False
        self._judged_s[lease_id] = now_s
        if is_known_dead(lease.holder):
            return True
        seen, since_s = self._seen.get(lease_id, (b"", now_s))
        is_late = now_s - since_s > lease.ttl_s
        read_ago_s = now_s - self._read_s.get(lease_id, never_s)
        if not (at_once or is_late) and read_ago_s < lease.ttl_s / READS_PER_TTL:
            return False
        self._read_s[lease_id] = now_s
        counter = self._log.read_counter(lease_id)
        if counter != seen:
            self._seen[lease_id] = (counter, now_s)
            return False
        return is_late

    def renew(self, lease_id: str) -> None:
        with self.lock:
            if lease_id in self.opened().leases:
                self._bumps[lease_id] = self._bumps.get(lease_id, 0) + 1
                self._log.write_counter(lease_id, self._bumps[lease_id])

    def renewed_ago_s(self, lease_id: str) -> float | None:
        written_s = self._log.counter_time(lease_id)
        return None if written_s is None else max(0.0, time.time() - written_s)

    def pause(self, longest_s: float, *, seen: int) -> None:
        changes = self._log.changes
        with self.lock:
            if self._space.revision > seen:
                return
            now_s = time.monotonic()
            pause_s = min(longest_s, JUDGE_EVERY_S)
            if not changes.hears_all:
                pause_s = min(pause_s, max(self._looking.due_in_s(now_s), 0.0))
        changes.wait(pause_s)

    def _load(self) -> KeySpace:
        try:
            return KeySpace(_snapshots.decode(self._log.load_snapshot()))
        except msgspec.MsgspecError as error:
            raise self._damaged("a snapshot", error) from error

    def _has_news(self) -> bool:
        """Whether we must look: there are changes, the last look failed, or it was long ago."""
        changed = self._log.has_changed(self._space.revision)
        is_old = time.monotonic() - self._looking.looked_s > SURE_S
        return changed or self._is_behind or is_old

    def _look(self, *, sure: bool = False) -> KeySpace:
        """Reads on in the log. ``sure``: also where the log may have been cut behind us."""
        now_s, self._is_behind = time.monotonic(), True
        sure = sure or now_s - self._sure_s > SURE_S
        known = self._space.revision
        self._log.refresh()
        for _ in range(100):
            self._read_on()
            # The newest file of the log is never removed, and files go oldest first. So if ours is
            # still there, the next one was not removed either: it does not exist yet.
            if not sure or self._log.has(self._space.revision):
                break
            self._space = self._load()
        else:
            raise StoreUnavailable(
                "the log was removed under this process",
                where=self.where,
                fix="the folder is gone or damaged: stop the trial and start it with a new store",
            )
        self._is_behind = False
        if sure:
            self._sure_s = now_s
        self._looking.looked(now_s, found=self._space.revision != known)
        return self._space

    def _read_on(self) -> None:
        space = self._space
        while (data := self._log.read(space.revision + 1)) is not None:
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
                for notes in (self._bumps, self._seen, self._read_s, self._judged_s):
                    notes.pop(operation.lease_id, None)
