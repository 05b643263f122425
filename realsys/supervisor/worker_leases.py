"""The supervisor's looks at the store: who holds his lease, who stands still, and who is lost.

For workers that nobody here can see end: a node that is cut off, a process that hangs. Slurm itself
needs minutes to notice (SlurmdTimeout). What follows from a look is decided in failure_detector.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from realsys.api.errors import StoreError
from realsys.api.trial import AttemptRecord, WorkerRecord, WorkerStatus, loads
from realsys.name_resolve.keys import TrialKeys
from realsys.name_resolve.store import NameResolve
from realsys.supervisor.failure_detector import FailureDetector
from realsys.supervisor.steps import Task

logger = logging.getLogger(__name__)

LOOK_S = 1.0


@dataclass
class WorkerLeases:
    """Looks at most once in ``LOOK_S``. Used from one thread.

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
    _lease_ids: dict[str, str] = field(default_factory=dict)
    _next_look_s: float = 0.0
    _frozen: str = ""

    def begin_phase(self) -> None:
        """Forgets the workers of the phase before."""
        self.registered.clear()
        self.statuses.clear()
        self.detector = FailureDetector(
            lost_s=self.detector.lost_s, settle_s=self.detector.settle_s
        )

    def lost(self, tasks: Iterable[Task]) -> list[Task]:
        """Tasks that are lost. Looks if it is time to."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return []
        self._next_look_s = now_s + LOOK_S
        running = {t.worker: t for t in tasks if t.poll() is None}
        present = self._look()
        if present is not None:
            self._forget_who_left(present, running)
        verdict = self.detector.look(present, now_s=now_s, leases=self._lease_ids)
        self._tell(verdict.frozen)
        if not self.judges_leases:
            return []
        return [running[worker] for worker in verdict.lost if worker in running]

    def stalled(self) -> dict[str, WorkerStatus]:
        """Workers that say of themselves that they do not get on, as of the last look."""
        return {worker: s for worker, s in self.statuses.items() if s.stalled_s > 0}

    def _look(self) -> dict[str, str] | None:
        """Worker → host of those of our attempt that hold their lease; None without an answer."""
        try:
            entries = self.store.get_subtree(self.keys.workers)
            told = self.store.get_subtree(self.keys.worker_statuses)
        except StoreError as error:
            logger.warning("leases not readable error=%s", error.what)
            return None
        found = [loads(WorkerRecord, entry.value, where=entry.key) for entry in entries]
        ours = {record.worker: record for record in found if record.token == self.attempt.token}
        self._lease_ids = {
            record.worker: entry.lease_id
            for record, entry in zip(found, entries, strict=True)
            if record.worker in ours and entry.lease_id is not None
        }
        self.registered |= ours
        prefix = self.keys.worker_statuses + "/"
        for entry in told:
            status = loads(WorkerStatus, entry.value, where=entry.key)
            if status.token == self.attempt.token:
                self.statuses[entry.key.removeprefix(prefix)] = status
        return {worker: record.host for worker, record in ours.items()}

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
