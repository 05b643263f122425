"""The name-resolution store in a shared folder, without a server: for one machine or a cluster's
file system.

Every process keeps the contents in memory and reads new log entries (commit_log.py) before it
answers, so a reader sees every write that ended before its call began (for a write of another host
on a shared file system: 50 ms before). Watches and waits see every write in order: a write of this
host at once through inotify (folder_changes.py), one of another host at the next poll, after 50 ms
while changes arrive and after two seconds at most. The load on a file server is
small: an idle trial makes fewer than 20 calls a second (tests/process/test_file_calls.py, and on
Slurm tests/slurm/test_slurm_async.py). Most of those read lease counters: a watcher that does not
act on lease expiry leaves the check to others (``judges_leases`` of a watch).

A lease is a counter that its holder increments. A reader judges it by its own monotonic clock:
expired if unchanged for longer than the TTL *since this reader first saw that value*. Clocks of two
hosts, and file times, are never compared. A dead holder on this host is detected at once. The
process that first notices an ended lease writes it to the log, so all readers see the same end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from realsys.api.errors import ConfigError, StoreUnavailable
from realsys.name_resolve.file.commit_log import CommitLog
from realsys.name_resolve.file.folder_changes import OF_THIS_HOST
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
JUDGE_EVERY_S = 0.2  # between checks whether a lease's holder on this host is alive
READS_PER_TTL = 5.0  # of a lease's counter
SNAPSHOT_EVERY = 1024  # revisions; also how far a reader may lag and still see every event

_commits = msgspec.msgpack.Decoder(list[Operation])
_snapshots = msgspec.msgpack.Decoder(KeySpaceSnapshot)


class FileStore(KeySpaceStore):
    """A NameResolve in the folder ``root``. Not usable across a fork: open one in the child.

    Args:
        poll_s: poll interval of waits and watches while changes arrive.
        lock_timeout_s: a write raises StoreUnavailable if others hold the lock this long.
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
        self._poll_schedule = PollSchedule(poll_s)
        self._sure_s = float("-inf")  # when our position was last verified to be in the log still
        self._is_behind = False  # a poll has failed
        self._bumps: dict[str, int] = {}  # of our own leases
        self._seen: dict[str, tuple[bytes | None, float]] = {}  # counter, when first seen
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
        changes, ago_s = self._log.changes, time.monotonic() - self._poll_schedule.looked_s
        if self._has_news():
            self._poll_log(sure=True)
        # Without inotify each call polls; if other hosts write, simultaneous calls share one poll.
        elif not changes.reports_all and (ago_s > POLL_S or self._log.file_system in OF_THIS_HOST):
            self._poll_log()
        return self._space

    def recent(self) -> KeySpace:
        changes = self._log.changes
        if self._has_news():
            self._poll_log(sure=True)
        elif not changes.reports_all and self._poll_schedule.due_in_s(time.monotonic()) <= 0:
            self._poll_log()
        return self._space

    def write(self, decide: Decide) -> int:
        with self._write_lock:
            if self._closed:
                self.opened()  # raises
            with self._log.exclusive(), self.lock:
                while True:
                    space = self._poll_log(sure=True)
                    operations = decide(space)
                    if not operations:
                        return space.revision
                    self._make_counters(operations)
                    revision = space.revision + 1
                    if self._log.append(revision, msgspec.msgpack.encode(operations)):
                        break  # otherwise a host outside our lock was faster: read its write first
                space.apply(revision, operations)
                self._poll_schedule.looked(time.monotonic(), found=True)
                self._remove_counters(operations)
                if revision % SNAPSHOT_EVERY == 0:
                    data = msgspec.msgpack.encode(space.snapshot())
                    self._log.compact(revision, data, space.leases.__contains__)
                return revision

    def is_dead(self, lease: GrantLease, *, at_once: bool) -> bool:
        now_s = self.clock()  # before reading: a pause of this process in between must not count
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
            if not changes.reports_all:
                pause_s = min(pause_s, max(self._poll_schedule.due_in_s(now_s), 0.0))
        changes.wait(pause_s)

    def _load(self) -> KeySpace:
        try:
            return KeySpace(_snapshots.decode(self._log.load_snapshot()))
        except msgspec.MsgspecError as error:
            raise self._damaged("a snapshot", error) from error

    def _has_news(self) -> bool:
        """Returns whether to poll the log: it changed, the last poll failed, or was long ago."""
        changed = self._log.has_changed(self._space.revision)
        is_old = time.monotonic() - self._poll_schedule.looked_s > SURE_S
        return changed or self._is_behind or is_old

    def _poll_log(self, *, sure: bool = False) -> KeySpace:
        """Reads new log entries. ``sure``: also check whether the log was truncated behind our
        position."""
        now_s, self._is_behind = time.monotonic(), True
        sure = sure or now_s - self._sure_s > SURE_S
        known = self._space.revision
        self._log.refresh()
        for _ in range(100):
            self._read_on()
            # The newest file of the log is never removed, and files are removed oldest first. So if
            # ours still exists, the next one was not removed either: it does not exist yet.
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
        self._poll_schedule.looked(now_s, found=self._space.revision != known)
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


# ---- When a reader polls a folder for changes that nothing notifies it of (pure). For file_store.py.
#
# Changes tend to come in bursts, and something waits for them; after a quiet minute nothing is
# urgent. So the interval is a share of the quiet time before: polling delays a reader by at most a
# tenth of the time it has already waited.


LONGEST_S = 2.0
SHARE = 0.1


@dataclass
class PollSchedule:
    """The polls of one reader. Times are seconds of one monotonic clock.

    Attributes: shortest_s: interval while changes arrive. looked_s, changed_s: when it last polled,
    and last found a change.
    """

    shortest_s: float
    looked_s: float = float("-inf")
    changed_s: float = float("-inf")

    def looked(self, now_s: float, *, found: bool) -> None:
        """Records a poll."""
        self.looked_s = now_s
        if found:
            self.changed_s = now_s

    def due_in_s(self, now_s: float) -> float:
        """Returns the time until the next poll; 0 or less: now."""
        pause_s = min(max(self.shortest_s, SHARE * (now_s - self.changed_s)), LONGEST_S)
        return self.looked_s + pause_s - now_s
