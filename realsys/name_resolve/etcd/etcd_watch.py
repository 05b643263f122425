"""A watch that survives lost connections: it resumes where it broke and delivers each event once.

For etcd_store.py. A thread reads etcd's stream and queues events; ``poll`` returns them. When the
stream breaks, it is reopened, on the next server if necessary, from the revision after the last
queued one. If that revision has been compacted, or a server comes back with older data than already
seen, the keys are listed and compared with the known ones: one PUT for each changed key and a
DELETE without value for each missing one.

Several prefixes are one etcd watch over the range from the first to the last, filtered here: etcd
keeps the order only within one watch. So name prefixes that are close together in key order, not
two with a thousand busy keys between them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from realsys.api.errors import RealsysError, StoreDenied, StoreError, StoreUnavailable
from realsys.name_resolve.etcd.channels import Stream, Unsure
from realsys.name_resolve.etcd.etcd_client import EtcdClient
from realsys.name_resolve.etcd.etcd_failures import Compacted, FutureRevision
from realsys.name_resolve.etcd.etcd_keys import (
    below,
    found_by,
    from_etcd,
    is_below_any,
    is_marker,
    marker_of,
    read_operation,
    to_etcd,
)
from realsys.name_resolve.etcd.listing import entries_under, revisions_under
from realsys.name_resolve.keyspace import MAX_HISTORY_EVENTS, difference
from realsys.name_resolve.store import MAX_TXN_OPS, Event, EventKind, Watch

logger = logging.getLogger(__name__)

# Pauses before each reconnect; then always the last
PAUSES_S = (
    0.02,
    0.05,
    0.1,
    0.25,
    0.5,
)
MAX_DENIALS = 3  # an expired login is denied once, a user without permission every time
_DELETE = 1  # etcd's Event.EventType


class EtcdWatch(Watch):
    """A Watch of an EtcdStore. ``poll`` is for one thread; ``close`` is safe from another."""

    def __init__(
        self, client: EtcdClient, prefixes: Sequence[str], from_revision: int | None
    ) -> None:
        self._client, self._prefixes = client, tuple(sorted(set(prefixes)))
        self._wanted = frozenset(prefixes)
        self._range = to_etcd(self._prefixes[0]), max(below(p)[1] for p in self._prefixes)
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._stream: Stream | None = None
        self._failure: RealsysError | None = None
        self._closed = self._connected = self._has_begun = False
        self._num_failed = self._num_denied = 0
        self._known, self._next = self._initial_state(from_revision)
        self._thread = threading.Thread(
            target=self._run, name=f"etcd-watch {self._prefixes[0]}", daemon=True
        )
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        """False while events may be queued at a server that does not answer."""
        return self._connected

    def poll(self, timeout_s: float) -> list[Event]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._events or self._closed or self._failure, timeout=max(0.0, timeout_s)
            )
            if self._closed:
                return []
            if not self._events and self._failure is not None:
                raise self._failure
            events = list(self._events)
            self._events.clear()
            self._changed.notify_all()
            return events

    def close(self) -> None:
        with self._changed:
            self._closed, self._connected = True, False
            self._changed.notify_all()
            stream = self._stream
        if stream is not None:
            stream.cancel()

    def end(self, failure: RealsysError) -> None:
        """Makes ``poll`` raise once the queued events have been returned."""
        with self._changed:
            self._failure = self._failure or failure
            self._connected = False
            self._changed.notify_all()
            stream = self._stream
        if stream is not None:
            stream.cancel()

    def _initial_state(self, from_revision: int | None) -> tuple[dict[str, int], int]:
        """Returns the revisions of the keys that exist when the watch begins, and its first
        revision."""
        if from_revision is None:
            known, revision = revisions_under(self._client, self._prefixes)
            return known, revision + 1
        try:
            before = from_revision - 1
            if before < 1:
                return {}, max(1, from_revision)
            known, _ = revisions_under(self._client, self._prefixes, revision=before)
        except Compacted:
            return {}, from_revision  # the stream reports it as well; every key then counts as new
        except FutureRevision:
            known, _ = revisions_under(self._client, self._prefixes)
        return known, from_revision

    @property
    def _is_over(self) -> bool:
        return self._closed or self._failure is not None

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._follow()
            except StoreDenied as error:
                if not self._has_begun:
                    self.end(error)  # never permitted
                    return
                self._note_break(error.what)  # permitted before: an expired login
            except (Unsure, StoreUnavailable) as error:
                self._note_break(str(error).partition("\n")[0])
            except RealsysError as error:
                self.end(error)
            except Exception as error:  # without this the poller would wait for a dead thread
                logger.exception("watch failed prefix=%s", self._prefixes[0])
                self.end(
                    StoreError(
                        f"a watch failed: {error!r}",
                        where=f"{self._prefixes[0]!r} in {self._client.where}",
                        fix="report this as a bug, with the traceback in this process's log",
                    )
                )

    def _note_break(self, why: str) -> None:
        with self._changed:
            if self._is_over:
                return
            if self._connected:
                logger.warning("watch interrupted prefix=%s error=%s", self._prefixes[0], why)
            self._connected = False
            pause_s = PAUSES_S[min(self._num_failed, len(PAUSES_S) - 1)]
            self._num_failed += 1
            self._changed.wait_for(lambda: self._is_over, timeout=pause_s)

    def _follow(self) -> None:
        """Reads one stream until it breaks, then raises Unsure."""
        stream = self._client.watch(*self._range, from_revision=self._next)
        with self._changed:
            self._stream = stream
            if self._is_over:
                stream.cancel()
                return
        try:
            for reply in stream:
                if reply.canceled:
                    self._cancelled(stream, reply)
                    return
                if reply.created:
                    self._begun(reply.header.revision)
                elif reply.events:
                    self._take(reply.events)
                if self._is_over:
                    return
            raise Unsure("the server ended the watch")
        finally:
            stream.cancel()

    def _begun(self, revision: int) -> None:
        if revision < self._next - 1:
            # Older than what was already seen: a member that lags behind, or a store that lost data.
            self._relist(only_if_before=self._next - 1)
        if self._num_failed:
            logger.info("watch resumed prefix=%s from_revision=%d", self._prefixes[0], self._next)
        self._num_failed = self._num_denied = 0
        self._connected = self._has_begun = True

    def _cancelled(self, stream: Stream, reply: Any) -> None:
        if reply.compact_revision:
            logger.warning(
                "watch fell behind compaction prefix=%s revision=%d recovery=relist",
                self._prefixes[0],
                self._next,
            )
            self._relist()
            return
        if self._num_denied < MAX_DENIALS:
            self._num_denied += 1
            stream.log_in_again()
            raise Unsure(reply.cancel_reason or "cancelled")
        raise StoreDenied(
            f"etcd refused the watch: {reply.cancel_reason or 'permission denied'}",
            where=f"{self._prefixes} in {self._client.where}",
            fix="give the user read on its whole prefix: `realsys etcd roles` prints the commands",
        )

    def _relist(self, *, only_if_before: int | None = None) -> None:
        entries, revision = entries_under(self._client, self._prefixes)
        if only_if_before is not None and revision >= only_if_before:
            return
        self._queue(difference(self._known, entries, revision=revision), revision + 1)

    def _take(self, changes: Sequence[Any]) -> None:
        ours = [change for change in changes if self._is_ours(change.kv.key)]
        kinds = ending_kinds(self._client, [change for change in ours if change.type == _DELETE])
        events = []
        for change in ours:
            key, revision = from_etcd(change.kv.key), change.kv.mod_revision
            if change.type == _DELETE:
                kind, value = kinds[key, revision], change.prev_kv.value
            else:
                kind, value = EventKind.PUT, change.kv.value
            events.append(Event(kind=kind, key=key, value=value, revision=revision))
        self._queue(events, changes[-1].kv.mod_revision + 1)

    def _is_ours(self, key: bytes) -> bool:
        if is_marker(key):
            return False
        return is_below_any(from_etcd(key), self._wanted)

    def _queue(self, events: Sequence[Event], next_revision: int) -> None:
        for event in events:
            if event.kind is EventKind.PUT:
                self._known[event.key] = event.revision
            else:
                self._known.pop(event.key, None)
        with self._changed:
            self._events.extend(events)
            self._next = next_revision
            self._changed.notify_all()
            # Backpressure: while the poller is slow, etcd buffers the events.
            self._changed.wait_for(lambda: len(self._events) < MAX_HISTORY_EVENTS or self._is_over)


# ---- Tells an explicit delete from a lease expiry; etcd reports both as DELETE.
#
# For etcd_watch.py. Every explicit delete also writes the trial's marker in the same revision
# (transaction.py); a lease that expires does not.


Marked = tuple[str, int]  # a marker key, and the revision at which it is read


def ending_kinds(client: EtcdClient, changes: Sequence[Any]) -> dict[tuple[str, int], EventKind]:
    """Returns DELETE or EXPIRE for each (key, revision) of etcd's deletion events.

    Deletions whose history has been compacted count as DELETE.

    What has been compacted meanwhile can't be told any more and counts as DELETE.
    """
    kinds, asked = {}, {}
    for change in changes:
        key, revision = from_etcd(change.kv.key), change.kv.mod_revision
        kinds[key, revision] = EventKind.DELETE
        if change.prev_kv.lease:
            asked[key, revision] = (marker_of(key), revision)
    signed = _signed(client, sorted(set(asked.values())))
    for ended, marked in asked.items():
        if not signed[marked]:
            kinds[ended] = EventKind.EXPIRE
    return kinds


def _signed(client: EtcdClient, asked: Sequence[Marked]) -> dict[Marked, bool]:
    """Returns whether each marker was written in exactly its revision."""
    signed: dict[Marked, bool] = {}
    for start in range(0, len(asked), MAX_TXN_OPS):
        page = asked[start : start + MAX_TXN_OPS]
        reads = [read_operation(to_etcd(marker), revision=revision) for marker, revision in page]
        try:
            found = found_by(client.read(reads))
        except Compacted:
            if len(page) > 1:  # some of them may still be kept
                middle = start + len(page) // 2
                for half in (asked[start:middle], asked[middle : start + len(page)]):
                    signed |= _signed(client, half)
            else:
                signed[page[0]] = True
            continue
        for (marker, revision), kv in zip(page, found, strict=True):
            signed[marker, revision] = kv is not None and kv.mod_revision == revision
    return signed
