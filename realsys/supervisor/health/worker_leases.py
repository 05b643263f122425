"""The supervisor's view of the store: which workers hold their lease, are stalled, or are lost.

For workers whose end can't be observed here: a node that is cut off, a process that hangs. Slurm itself
needs minutes to notice (SlurmdTimeout). failure_detector.py decides what follows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from realsys.api.errors import TrialError
from realsys.heartbeat.bounded import within
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import Entry, NameResolve
from realsys.runtime.lifecycle import WorkerState
from realsys.supervisor.health.failure_detector import FailureDetector
from realsys.supervisor.health.store_poller import StorePoller
from realsys.supervisor.steps.steps import StepTask
from realsys.trial.records import AttemptRecord, WorkerRecord, WorkerStatus, loads

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 1.0
WORKERS_A_LOOK = 1000  # with more, polls are rarer: reading them must not occupy a core


@dataclass(frozen=True, kw_only=True)
class LeaseReport:
    """Contents of one poll for our attempt: registrations, their leases, statuses."""

    records: dict[str, WorkerRecord]
    leases: dict[str, str]
    statuses: dict[str, WorkerStatus]


@dataclass
class WorkerLeases:
    """Used from one thread between ``begin_phase`` and ``end_phase``; it polls in another.

    Args:
        judges_leases: False if every worker is a child process: then its end is observed directly, and
            an ended lease only tells about the store.
        has_left: whether a task whose key is gone left as intended.
    """

    store: NameResolve
    keys: TrialKeys
    attempt: AttemptRecord
    judges_leases: bool
    has_left: Callable[[StepTask], bool]
    detector: FailureDetector = field(default_factory=FailureDetector)
    registered: dict[str, WorkerRecord] = field(default_factory=dict)  # of the running phase
    statuses: dict[str, WorkerStatus] = field(default_factory=dict)
    looked_s: float = 0.0  # when the poll that returned them began, on the monotonic clock
    # Restarted workers → the registration of the former process, if it had one.
    _former: dict[str, WorkerRecord | None] = field(default_factory=dict)
    _let_go: set[str] = field(default_factory=set)  # workers that are no longer watched
    _known: dict[str, tuple[int, object]] = field(default_factory=dict)  # key → revision, value
    _poller: StorePoller[LeaseReport] | None = None
    _frozen: str = ""

    def begin_phase(self, num_workers: int) -> None:
        """Forgets the workers of the phase before, and starts polling."""
        self.registered.clear()
        self.statuses.clear()
        self._former.clear()
        self._let_go.clear()
        self.detector = FailureDetector(
            lost_s=self.detector.lost_s, settle_s=self.detector.settle_s
        )
        every_s = LOOK_S * max(1.0, num_workers / WORKERS_A_LOOK)
        self._poller = StorePoller(self._read, every_s=every_s, name="leases").start()

    def end_phase(self) -> None:
        """Stops polling."""
        if self._poller is not None:
            self._poller.stop()
            self._poller = None

    def lost(self, tasks: Iterable[StepTask], *, unseen: Collection[str] = ()) -> list[StepTask]:
        """Returns the lost tasks according to the newest poll; none if there is no new one.

        Args:
            unseen: workers that count as running, though their step is over: nobody saw their own end.
        """
        poll = self._poller.latest() if self._poller is not None else None
        if poll is None:
            return []
        running = {t.worker: t for t in tasks if t.poll() is None or t.worker in unseen}
        present: dict[str, str] | None = None
        if (found := poll.value) is not None:
            found = self._without_former(found)
            self.registered |= found.records
            self.statuses, self.looked_s = found.statuses, poll.asked_s
            present = {worker: record.host for worker, record in found.records.items()}
            self._forget_who_left(present, running)
        leases = found.leases if found is not None else None
        verdict = self.detector.look(
            present, now_s=poll.answered_s, asked_s=poll.asked_s, leases=leases
        )
        self._log_frozen(verdict.frozen)
        if not self.judges_leases:
            return []
        return [running[worker] for worker in verdict.lost if worker in running]

    @property
    def is_frozen(self) -> bool:
        """Whether nobody is declared lost at present, because the store is in doubt."""
        return bool(self._frozen)

    def look_now(self, *, timeout_s: float) -> None:
        """Reads the statuses now, if the store answers in that time."""
        asked_s, found = time.monotonic(), list[LeaseReport]()
        within(timeout_s, lambda: found.append(self._read()))
        if found:
            self.statuses = self._without_former(found[0]).statuses
            self.looked_s = asked_s

    def left_unwell(self, worker: str, *, left_s: float) -> bool:
        """Returns whether a worker whose process ended at ``left_s`` did not deregister: its heartbeat
        process marked it LOST. False while that is unknown."""
        status = self.statuses.get(worker)
        return (
            self.looked_s > left_s and status is not None and status.state == WorkerState.LOST.value
        )

    def forget(self, worker: str) -> None:
        """Ignores ``worker``, which is being restarted, until the new process has registered."""
        former = self.registered.pop(worker, self._former.get(worker))
        self._former[worker] = former
        self.statuses = {name: s for name, s in self.statuses.items() if name != worker}
        self.detector.forget(worker)

    def let_go(self, worker: str) -> None:
        """Stops watching ``worker``, which may leave at any time."""
        self._let_go.add(worker)
        self.statuses = {name: s for name, s in self.statuses.items() if name != worker}
        self.detector.forget(worker)

    def stalled(self) -> dict[str, WorkerStatus]:
        """Returns the workers that report a stall, as of the last poll."""
        return {worker: s for worker, s in self.statuses.items() if s.stalled_s > 0}

    def _read(self) -> LeaseReport:
        """Reads the store, in the polling thread. Raises StoreError."""
        entries = self.store.get_subtree(self.keys.workers)
        status_entries = self.store.get_subtree(self.keys.worker_statuses)
        records, leases, statuses = {}, {}, {}
        for entry in entries:
            record = self._decoded(WorkerRecord, entry)
            if record is not None and record.token == self.attempt.token:
                records[record.worker] = record
                if entry.lease_id is not None:
                    leases[record.worker] = entry.lease_id
        prefix = self.keys.worker_statuses + "/"
        for entry in status_entries:
            status = self._decoded(WorkerStatus, entry)
            if status is not None and status.token == self.attempt.token:
                statuses[entry.key.removeprefix(prefix)] = status
        return LeaseReport(records=records, leases=leases, statuses=statuses)

    def _without_former(self, found: LeaseReport) -> LeaseReport:
        """Removes workers that were let go, and entries of former processes of restarted ones."""
        gone = {
            worker
            for worker, old in self._former.items()
            if found.records.get(worker) in (None, old)
        } | self._let_go
        if not gone:
            return found
        return LeaseReport(
            records={w: r for w, r in found.records.items() if w not in gone},
            leases={w: lease for w, lease in found.leases.items() if w not in gone},
            statuses={w: s for w, s in found.statuses.items() if w not in gone},
        )

    def _decoded(self, kind: type[T], entry: Entry) -> T | None:
        """Decodes an entry's value, once per revision, since few of thousands change. Logs and skips an
        invalid one."""
        revision, value = self._known.get(entry.key, (0, None))
        if revision != entry.revision:
            try:
                value = loads(kind, entry.value, where=entry.key)
            except TrialError as error:
                logger.error("%s; %s", error.what, error.fix)
                value = None
            self._known[entry.key] = (entry.revision, value)
        return cast(T | None, value)

    def _forget_who_left(self, present: dict[str, str], running: dict[str, StepTask]) -> None:
        for worker in self.detector.hosts.keys() - present.keys():
            if worker not in running or self.has_left(running[worker]):
                self.detector.forget(worker)

    def _log_frozen(self, frozen: str) -> None:
        if frozen and not self._frozen:
            logger.warning("lost-worker detection suspended reason=%s", frozen)
        elif self._frozen and not frozen:
            logger.info("lost-worker detection resumed")
        self._frozen = frozen
