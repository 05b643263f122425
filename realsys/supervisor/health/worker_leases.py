"""The supervisor's looks at the store: who holds his lease, who stands still, and who is lost.

For workers that nobody here can see end: a node that is cut off, a process that hangs. Slurm itself
needs minutes to notice (SlurmdTimeout). What follows from a look is decided in failure_detector.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from realsys.api.errors import TrialError
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import Entry, NameResolve
from realsys.runtime.bounded import within
from realsys.runtime.lifecycle import WorkerState
from realsys.supervisor.health.failure_detector import FailureDetector
from realsys.supervisor.health.store_poller import StorePoller
from realsys.supervisor.steps.steps import Task
from realsys.trial.records import AttemptRecord, WorkerRecord, WorkerStatus, loads

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 1.0
WORKERS_A_LOOK = 1000  # of more, looks are farther apart: reading them must not fill a core


@dataclass(frozen=True, kw_only=True)
class LeaseReport:
    """What a look found of our attempt: registrations, the leases they are under, statuses."""

    records: dict[str, WorkerRecord]
    leases: dict[str, str]
    statuses: dict[str, WorkerStatus]


@dataclass
class WorkerLeases:
    """Used from one thread between ``begin_phase`` and ``end_phase``; it looks from another.

    Args:
        judges_leases: False where every worker is a child of ours: then its end is seen, and a lease
            that ended says something about the store only.
        has_left: whether a task whose key is gone left as it should.
    """

    store: NameResolve
    keys: TrialKeys
    attempt: AttemptRecord
    judges_leases: bool
    has_left: Callable[[Task], bool]
    detector: FailureDetector = field(default_factory=FailureDetector)
    registered: dict[str, WorkerRecord] = field(default_factory=dict)  # of the running phase
    statuses: dict[str, WorkerStatus] = field(default_factory=dict)
    looked_s: float = 0.0  # when the look was asked that they are of, on the monotonic clock
    # Workers that were started again → the registration of the former process, if it had one.
    _former: dict[str, WorkerRecord | None] = field(default_factory=dict)
    _let_go: set[str] = field(default_factory=set)  # workers that are not looked after any more
    _known: dict[str, tuple[int, object]] = field(default_factory=dict)  # key → revision, value
    _looks: StorePoller[LeaseReport] | None = None
    _frozen: str = ""

    def begin_phase(self, num_workers: int) -> None:
        """Forgets the workers of the phase before, and begins to look."""
        self.registered.clear()
        self.statuses.clear()
        self._former.clear()
        self._let_go.clear()
        self.detector = FailureDetector(
            lost_s=self.detector.lost_s, settle_s=self.detector.settle_s
        )
        every_s = LOOK_S * max(1.0, num_workers / WORKERS_A_LOOK)
        self._looks = StorePoller(self._look, every_s=every_s, name="leases").start()

    def end_phase(self) -> None:
        """Looks no more."""
        if self._looks is not None:
            self._looks.stop()
            self._looks = None

    def lost(self, tasks: Iterable[Task]) -> list[Task]:
        """Tasks that are lost, after the newest look; none when there is no new one."""
        sight = self._looks.take() if self._looks is not None else None
        if sight is None:
            return []
        running = {t.worker: t for t in tasks if t.poll() is None}
        present: dict[str, str] | None = None
        if (found := sight.value) is not None:
            found = self._without_former(found)
            self.registered |= found.records
            self.statuses, self.looked_s = found.statuses, sight.asked_s
            present = {worker: record.host for worker, record in found.records.items()}
            self._forget_who_left(present, running)
        leases = found.leases if found is not None else None
        verdict = self.detector.look(
            present, now_s=sight.answered_s, asked_s=sight.asked_s, leases=leases
        )
        self._tell(verdict.frozen)
        if not self.judges_leases:
            return []
        return [running[worker] for worker in verdict.lost if worker in running]

    def look_now(self, *, timeout_s: float) -> None:
        """Brings the statuses up to date, if the store answers in that time."""
        asked_s, found = time.monotonic(), list[LeaseReport]()
        within(timeout_s, lambda: found.append(self._look()))
        if found:
            self.statuses = self._without_former(found[0]).statuses
            self.looked_s = asked_s

    def left_unwell(self, worker: str, *, left_s: float) -> bool:
        """Whether a worker whose process ended at ``left_s`` has not said goodbye, as its heartbeat process
        says: it told its end, and in no final state of the worker's own. False while that is not known."""
        status = self.statuses.get(worker)
        return (
            self.looked_s > left_s and status is not None and status.state == WorkerState.LOST.value
        )

    def forget(self, worker: str) -> None:
        """``worker`` is started again: nothing counts until the new process has registered."""
        former = self.registered.pop(worker, self._former.get(worker))
        self._former[worker] = former
        self.statuses = {name: s for name, s in self.statuses.items() if name != worker}
        self.detector.forget(worker)

    def let_go(self, worker: str) -> None:
        """``worker`` is to leave when it likes: it is neither missed nor asked to get on."""
        self._let_go.add(worker)
        self.statuses = {name: s for name, s in self.statuses.items() if name != worker}
        self.detector.forget(worker)

    def stalled(self) -> dict[str, WorkerStatus]:
        """Workers that say of themselves that they do not get on, as of the last look."""
        return {worker: s for worker, s in self.statuses.items() if s.stalled_s > 0}

    def _look(self) -> LeaseReport:
        """On the looking thread. Raises StoreError."""
        entries = self.store.get_subtree(self.keys.workers)
        told = self.store.get_subtree(self.keys.worker_statuses)
        records, leases, statuses = {}, {}, {}
        for entry in entries:
            record = self._decoded(WorkerRecord, entry)
            if record is not None and record.token == self.attempt.token:
                records[record.worker] = record
                if entry.lease_id is not None:
                    leases[record.worker] = entry.lease_id
        prefix = self.keys.worker_statuses + "/"
        for entry in told:
            status = self._decoded(WorkerStatus, entry)
            if status is not None and status.token == self.attempt.token:
                statuses[entry.key.removeprefix(prefix)] = status
        return LeaseReport(records=records, leases=leases, statuses=statuses)

    def _without_former(self, found: LeaseReport) -> LeaseReport:
        """Without workers that were let go, and what former processes of others have left in the store,
        or had when we looked."""
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
        """An entry's value; decoded once, since of thousands few have changed. None, and a line in the
        log, for one that can't be: it must not hide the others."""
        revision, value = self._known.get(entry.key, (0, None))
        if revision != entry.revision:
            try:
                value = loads(kind, entry.value, where=entry.key)
            except TrialError as error:
                logger.error("%s; %s", error.what, error.fix)
                value = None
            self._known[entry.key] = (entry.revision, value)
        return cast(T | None, value)

    def _forget_who_left(self, present: dict[str, str], running: dict[str, Task]) -> None:
        for worker in self.detector.hosts.keys() - present.keys():
            if worker not in running or self.has_left(running[worker]):
                self.detector.forget(worker)

    def _tell(self, frozen: str) -> None:
        if frozen and not self._frozen:
            logger.warning("nobody is declared lost for now why=%s", frozen)
        elif self._frozen and not frozen:
            logger.info("leases are judged again")
        self._frozen = frozen
