"""Notifies the master at once if a worker it depends on has ended.

A worker's heartbeat process deletes the worker's key when the worker ends, for any reason, and writes the
reason into its status. Calls waiting for it then fail within a moment instead of at their deadline. A key
that *expired* (no process is left to report, or the store was unavailable) is ignored here: the
supervisor decides whether that worker is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from realsys.api.errors import RealsysError
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import Event, EventKind, NameResolve
from realsys.runtime.background_thread import BackgroundThread
from realsys.runtime.lifecycle import WorkerState
from realsys.trial.records import WorkerRecord, WorkerStatus, loads

logger = logging.getLogger(__name__)

POLL_S = 0.5


class PeerWatch:
    """Watches the workers of one attempt in a thread of its own. Use as a context manager.

    Args:
        token: the attempt's.
        from_revision: of the store, from before the workers were looked up.
        on_ended: called with worker and reason, in the watching thread.
    """

    def __init__(
        self,
        store: NameResolve,
        keys: TrialKeys,
        *,
        token: str,
        from_revision: int,
        on_ended: Callable[[str, str], None],
    ) -> None:
        self._store, self._keys, self._token = store, keys, token
        self._from_revision, self._on_ended = from_revision, on_ended
        self._thread = BackgroundThread(self._follow, name="peer-watch")

    def __enter__(self) -> PeerWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.stop()

    def _follow(self) -> None:
        watched = self._store.watch(
            self._keys.workers, from_revision=self._from_revision, judges_leases=False
        )
        with watched as watch:
            while not self._thread.is_ending:
                try:
                    for event in watch.poll(POLL_S):
                        self._take(event)
                except RealsysError as error:  # the supervisor sees the worker's end all the same
                    logger.warning("watching peers interrupted error=%s", error.what)
                    self._thread.pause(POLL_S)

    def _take(self, event: Event) -> None:
        if event.kind is not EventKind.DELETE or not event.value:
            return
        try:
            record = loads(WorkerRecord, event.value, where=event.key)
        except RealsysError as error:  # others that came with it are told all the same
            logger.warning("end of a worker not read key=%s why=%s", event.key, error.what)
            return
        if record.token != self._token:
            return
        status = self._status(record.worker)
        if status is not None and status.state == WorkerState.DONE:
            return
        reason = status.reason if status is not None and status.reason else "its process has ended"
        logger.error("peer ended worker=%s reason=%s", record.worker, reason)
        self._on_ended(record.worker, reason)

    def _status(self, worker: str) -> WorkerStatus | None:
        key = f"{self._keys.worker_statuses}/{worker}"
        try:
            return loads(WorkerStatus, self._store.get(key).value, where=key)
        except RealsysError:  # no such key, no answer, or a damaged value
            return None
