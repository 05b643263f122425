"""What a worker must hear from name resolution: stop, another attempt, a command, who is gone.

For heartbeat_process.py. A store that does not answer says nothing: nobody is orphaned by it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from realsys.api.errors import KeyNotFound, RealsysError, StoreError
from realsys.heartbeat.heartbeat_messages import (
    Commanded,
    StopAsked,
    Terminate,
    ToWorker,
    WatchedProcess,
)
from realsys.heartbeat.worker_keys import WorkerKeys
from realsys.name_resolve.store import Compare, Entry, Event, EventKind
from realsys.runtime import worker_exit_codes
from realsys.runtime.background_thread import BackgroundThread
from realsys.trial.records import StopRequest, loads

logger = logging.getLogger(__name__)

POLL_S = 0.25
RETRY_S = 0.5
# A worker whose lease the store lost takes it anew within seconds; one that has left has told us to.
ORPHAN_AFTER_S = 8.0


class KeyWatcher:
    """Watches from a thread of its own between ``start`` and ``stop``.

    Args:
        watch_keys: the worker is an orphan when all of these were there and are gone.
        hear: gets what the worker must be told, from the thread. A command's key is deleted once it
            was taken.
    """

    def __init__(
        self,
        keys: WorkerKeys,
        *,
        attempt: int,
        watch_keys: Sequence[str],
        hear: Callable[[ToWorker], None],
    ) -> None:
        self._keys, self._attempt, self._watch_keys = keys, attempt, frozenset(watch_keys)
        self._hear = hear
        self._present: set[str] = set()
        self._seen: set[str] = set()
        self._told_present = True
        self._gone_since_s: float | None = None
        self._last_command = 0
        self._thread = BackgroundThread(self._run, name="key-watch")

    def start(self) -> None:
        """Looks at what is there, then at every change."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its next look; does not wait for it."""
        self._thread.stop(wait_s=0.0)

    def _run(self) -> None:
        while not self._thread.is_ending:
            try:
                self._watch()
            except StoreError as error:
                logger.warning("keys not watched error=%s", error.what)
            except Exception:  # outermost frame: a thread that died would never hear of a stop
                logger.exception("watching keys failed")
            self._thread.pause(RETRY_S)

    def _watch(self) -> None:
        keys = self._keys
        # Neighbours in the order of keys share a watch: with etcd one watch spans all between them, and
        # the master's progress, which changes all the time, must not come to every worker.
        first = (keys.keys.attempt, keys.command)
        second = (keys.keys.stop, *sorted(self._watch_keys))
        revision = keys.store.revision()
        self._present.clear()
        self._gone_since_s = None
        for key in (*first, *second):
            if (entry := self._get(key)) is not None:
                self._came(entry.key, entry.value, entry.revision)
        with (
            keys.store.watch(*first, from_revision=revision + 1) as one,
            keys.store.watch(*second, from_revision=revision + 1) as other,
        ):
            while not self._thread.is_ending:
                for event in (*one.poll(0.0), *other.poll(POLL_S)):
                    self._changed(event)
                self._tell_watched()
                if other.is_connected:
                    self._look_for_orphans()

    def _get(self, key: str) -> Entry | None:
        try:
            return self._keys.store.get(key)
        except KeyNotFound:
            return None

    def _changed(self, event: Event) -> None:
        if event.kind is EventKind.PUT:
            self._came(event.key, event.value, event.revision)
        else:
            self._present.discard(event.key)

    def _came(self, key: str, value: bytes, revision: int) -> None:
        if key in self._watch_keys:
            self._present.add(key)
            self._seen.add(key)
        try:
            if key == self._keys.keys.stop:
                request = loads(StopRequest, value, where=key)
                if request.attempt == self._attempt:
                    self._hear(StopAsked(request=request))
            elif key == self._keys.keys.attempt:
                self._is_superseded(value)
            elif key == self._keys.command and revision > self._last_command:
                self._take_command(value, revision)
        except StoreError:
            raise
        except RealsysError as error:  # a value that can't be read is its writer's fault
            logger.warning("value not understood key=%s error=%s", key, error.what)

    def _take_command(self, value: bytes, revision: int) -> None:
        self._last_command = revision
        try:
            self._hear(Commanded(value=value))
        finally:  # unless the next one is there already
            key = self._keys.command
            self._keys.store.transaction([Compare.at_revision(key, revision)], deletes=[key])

    def _is_superseded(self, value: bytes) -> None:
        if (newer := self._keys.newer_attempt(value)) is not None:
            why = self._keys.why_over(newer)
            self._hear(Terminate(code=worker_exit_codes.FENCED, kind="Fenced", why=why))

    def _tell_watched(self) -> None:
        if self._seen and bool(self._present) != self._told_present:
            self._told_present = bool(self._present)
            self._hear(WatchedProcess(present=self._told_present))

    def _look_for_orphans(self) -> None:
        if not self._seen or self._present:
            self._gone_since_s = None
            return
        if self._gone_since_s is None:
            self._gone_since_s = time.monotonic()
        if time.monotonic() - self._gone_since_s < ORPHAN_AFTER_S:
            return
        if any(self._get(key) is not None for key in sorted(self._watch_keys)):
            return  # raises when the store does not answer
        names = ", ".join(sorted(key.partition("/worker/")[2] or key for key in self._watch_keys))
        why = f"the workers it depends on were gone: {names}"
        self._hear(Terminate(code=worker_exit_codes.ORPHANED, kind="WorkerLost", why=why))
