"""A worker's two keys in name resolution: its registration and its status. For
heartbeat_process.py.

Both are under one lease. Every write is one transaction with its own condition: the attempt is
still ours (registering), the registration is still the one we wrote (all others). A worker of an
earlier attempt can't change its successor's keys, however late it continues.
"""

from __future__ import annotations

import logging
import threading

from realsys.api.errors import KeyNotFound, StaleAttempt, StoreUnavailable
from realsys.heartbeat.heartbeat_messages import Init
from realsys.name_resolve.store import Compare, Lease, NameResolve, Put
from realsys.trial.records import AttemptRecord, WorkerRecord, WorkerStatus, dumps, loads

logger = logging.getLogger(__name__)

DEREGISTER_TRIES = 2


class WorkerKeys:
    """The keys of one worker of one attempt. Thread-safe."""

    def __init__(self, store: NameResolve, begin: Init) -> None:
        self.store, self.keys, self.begin = store, begin.keys, begin
        self.worker = self.keys.worker(begin.worker_type, begin.index)
        self.status = self.keys.worker_status(begin.worker_type, begin.index)
        self.command = self.keys.command(begin.worker_type, begin.index)
        self._record = b""
        self._writing = threading.Lock()

    def register(self, record: WorkerRecord, status: WorkerStatus, *, ttl_s: float) -> Lease:
        """Registers under a new lease.

        Raises:
            StaleAttempt: another attempt has taken over, or the trial was cleared.
        """
        lease = self.store.grant(ttl_s)
        value = dumps(record)
        with self._writing:
            ours = Compare.at_revision(self.keys.attempt, self.own_attempt_revision())
            puts = [Put(self.worker, value, lease), Put(self.status, dumps(status), lease)]
            if not self.store.transaction([ours], puts=puts):
                self.own_attempt_revision()  # raises, naming the newer attempt
                raise StoreUnavailable(
                    "the attempt's key changed meanwhile",
                    where=self.keys.attempt,
                    fix="none is needed: it is retried",
                )
            self._record = value
        return lease

    def publish(self, status: WorkerStatus, lease: Lease) -> bool:
        """Writes the status; returns False if the registration is no longer ours."""
        with self._writing:
            ours = Compare.holds(self.worker, self._record)
            return self.store.transaction([ours], puts=[Put(self.status, dumps(status), lease)])

    def deregister(self, status: WorkerStatus) -> bool:
        """Deletes the registration and leaves the final status behind, without a lease.

        Returns False if another attempt has taken over, or another worker owns the key. Also writes the
        status of a worker that never registered, or whose lease has ended.
        """
        with self._writing:
            put = Put(self.status, dumps(status))
            for _ in range(DEREGISTER_TRIES):
                held = Compare.holds(self.worker, self._record)
                if self._record and self.store.transaction(
                    [held], puts=[put], deletes=[self.worker]
                ):
                    return True
                try:
                    ours = Compare.at_revision(self.keys.attempt, self.own_attempt_revision())
                except StaleAttempt:
                    return False
                if self.store.transaction([ours, Compare.absent(self.worker)], puts=[put]):
                    return True
        return False

    def own_attempt_revision(self) -> int:
        """Returns the revision of the attempt key while it is ours. Raises StaleAttempt."""
        try:
            entry = self.store.get(self.keys.attempt)
        except KeyNotFound:
            raise StaleAttempt(
                f"the store knows no attempt, this is attempt {self.begin.attempt}",
                where=self.keys.attempt,
                fix="the trial was cleared while it ran; launch it again",
            ) from None
        if (other := self.newer_attempt(entry.value)) is not None:
            raise StaleAttempt(
                self.termination_reason(other),
                where=self.keys.attempt,
                fix="none: the newer attempt, if there is one, runs the trial",
            )
        return entry.revision

    def termination_reason(self, other: AttemptRecord) -> str:
        """Returns why this worker must exit, according to the attempt key."""
        if self._is_ours(other):
            return f"attempt {other.number} was ended by its supervisor"
        ours = self.begin.attempt
        return f"attempt {other.number} on {other.host} has taken over from attempt {ours}"

    def newer_attempt(self, value: bytes) -> AttemptRecord | None:
        """Returns the attempt in a value of the attempt key, if it is not ours or has ended."""
        record = loads(AttemptRecord, value, where=self.keys.attempt)
        return None if self._is_ours(record) and record.ended_at is None else record

    def _is_ours(self, record: AttemptRecord) -> bool:
        return (record.number, record.token) == (self.begin.attempt, self.begin.token)
