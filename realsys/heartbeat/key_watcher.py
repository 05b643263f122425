"""Watches name resolution for what concerns a worker: stop requests, newer attempts, commands, lost
peers.

For heartbeat_process.py. An unavailable store is not evidence: no worker is orphaned by it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from realsys.api.errors import RealsysError, StoreError
from realsys.heartbeat.heartbeat_messages import (
    CommandReceived,
    StopRequested,
    Terminate,
    ToWorker,
    WatchedProcess,
)
from realsys.heartbeat.worker_keys import WorkerKeys
from realsys.name_resolve.store import Compare, Event, EventKind, find
from realsys.runtime import worker_exit_codes
from realsys.runtime.background_thread import BackgroundThread
from realsys.trial.records import StopRequest, loads

logger = logging.getLogger(__name__)

POLL_S = 0.25
RETRY_S = 0.5
# A worker whose lease the store lost reacquires it within seconds.
ORPHAN_AFTER_S = 8.0


class KeyWatcher:
    """Watches in a thread of its own between ``start`` and ``stop``.

    Args:
        watch_keys: the worker is orphaned if all of these existed and are gone.
        on_message: called from the thread with messages for the worker. A command's key is deleted
            once it has been passed on.
    """

    def __init__(
        self,
        keys: WorkerKeys,
        *,
        watch_keys: Sequence[str],
        on_message: Callable[[ToWorker], None],
    ) -> None:
        self._keys, self._watch_keys = keys, frozenset(watch_keys)
        self._on_message = on_message
        self._present: set[str] = set()
        self._seen: set[str] = set()
        self._reported_present = True
        self._gone_since_s: float | None = None
        self._last_command = 0
        self._thread = BackgroundThread(self._run, name="key-watch")

    def start(self) -> None:
        """Starts the thread, which reads the present values and then watches for changes."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current wait, without waiting for it."""
        self._thread.stop(wait_s=0.0)

    def _run(self) -> None:
        while not self._thread.is_ending:
            try:
                self._watch()
            except StoreError as error:
                logger.warning("watching keys interrupted error=%s", error.what)
            except Exception:  # outermost frame: a dead thread would miss stop requests
                logger.exception("watching keys failed")
            self._thread.pause(RETRY_S)

    def _watch(self) -> None:
        keys = self._keys
        # Keys that are close in key order share a watch: an etcd watch spans all keys between them, and
        # the master's progress, which changes constantly, must not be sent to every worker.
        first = (keys.keys.attempt, keys.command)
        second = (keys.keys.stop, *sorted(self._watch_keys))
        revision = keys.store.revision()
        self._present.clear()
        self._gone_since_s = None
        for key in (*first, *second):
            if (entry := find(self._keys.store, key)) is not None:
                self._on_value(entry.key, entry.value, entry.revision)
        with (
            keys.store.watch(*first, from_revision=revision + 1) as one,
            keys.store.watch(*second, from_revision=revision + 1) as other,
        ):
            while not self._thread.is_ending:
                for event in (*one.poll(0.0), *other.poll(POLL_S)):
                    self._changed(event)
                self._report_watched()
                if other.is_connected:
                    self._check_orphaned()

    def _changed(self, event: Event) -> None:
        if event.kind is EventKind.PUT:
            self._on_value(event.key, event.value, event.revision)
        else:
            self._present.discard(event.key)

    def _on_value(self, key: str, value: bytes, revision: int) -> None:
        if key in self._watch_keys:
            self._present.add(key)
            self._seen.add(key)
        try:
            if key == self._keys.keys.stop:
                request = loads(StopRequest, value, where=key)
                if request.attempt == self._keys.begin.attempt:
                    self._on_message(StopRequested(request=request))
            elif key == self._keys.keys.attempt:
                self._check_superseded(value)
            elif key == self._keys.command and revision > self._last_command:
                self._pass_on_command(value, revision)
        except StoreError:
            raise
        except RealsysError as error:  # an invalid value is its writer's fault
            logger.warning("value not decoded key=%s error=%s", key, error.what)

    def _pass_on_command(self, value: bytes, revision: int) -> None:
        self._last_command = revision
        try:
            self._on_message(CommandReceived(value=value))
        finally:  # unless the next command has already been written
            key = self._keys.command
            self._keys.store.transaction([Compare.at_revision(key, revision)], deletes=[key])

    def _check_superseded(self, value: bytes) -> None:
        if (newer := self._keys.newer_attempt(value)) is not None:
            why = self._keys.termination_reason(newer)
            self._on_message(Terminate(code=worker_exit_codes.FENCED, kind="Fenced", why=why))

    def _report_watched(self) -> None:
        if self._seen and bool(self._present) != self._reported_present:
            self._reported_present = bool(self._present)
            self._on_message(WatchedProcess(present=self._reported_present))

    def _check_orphaned(self) -> None:
        if not self._seen or self._present:
            self._gone_since_s = None
            return
        if self._gone_since_s is None:
            self._gone_since_s = time.monotonic()
        if time.monotonic() - self._gone_since_s < ORPHAN_AFTER_S:
            return
        if any(find(self._keys.store, key) is not None for key in sorted(self._watch_keys)):
            return  # ``find`` raises if the store does not answer
        names = ", ".join(sorted(key.partition("/worker/")[2] or key for key in self._watch_keys))
        why = f"the workers it depends on were gone: {names}"
        self._on_message(Terminate(code=worker_exit_codes.ORPHANED, kind="WorkerLost", why=why))
