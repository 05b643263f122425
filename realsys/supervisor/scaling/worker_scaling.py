"""Starts workers added to a live run and oversees the departure of draining ones.

The requested state is read from name resolution; scale_steps.py decides what is due. The master (rollout
workers) and the server manager (servers) let a worker finish and leave. Here a draining worker is no
longer watched, and killed if it stays too long. Used from the supervisor's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from realsys.api.errors import ClusterError, RealsysError
from realsys.api.plan import PhasePlan
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import NameResolve
from realsys.observability.jsonl import JsonlAppender
from realsys.supervisor.health.store_poller import StorePoller
from realsys.supervisor.health.worker_leases import WorkerLeases
from realsys.supervisor.health.worker_restarts import WorkerRestarts
from realsys.supervisor.scaling.scale_steps import moves, partners
from realsys.supervisor.steps.steps import Steps, StepTask
from realsys.trial.records import AttemptFiles, AttemptRecord, WorkerExit, read_fresh
from realsys.worker.live_scaling import (
    LEFT_LATE_S,
    DrainDeadlines,
    Scaling,
    change_scaling,
    read_scaling,
)

logger = logging.getLogger(__name__)

LOOK_S = 1.0
TRY_AGAIN_S = 5.0  # between attempts to publish that a worker was given up


@dataclass
class WorkerScaling:
    """The added and draining workers of one attempt. ``begin_phase`` first, ``end_phase`` last.

    Args:
        is_stopping: whether a stop was requested: then nothing is started any more.
    """

    files: AttemptFiles
    store: NameResolve
    keys: TrialKeys
    attempt: AttemptRecord
    leases: WorkerLeases
    restarts: WorkerRestarts
    is_stopping: Callable[[], bool]
    _phase: PhasePlan | None = None
    _poller: StorePoller[Scaling | None] | None = None
    _wanted: Scaling | None = None
    _leaving: DrainDeadlines = field(default_factory=DrainDeadlines)
    _left: dict[str, StepTask] = field(default_factory=dict)
    _killed: set[str] = field(default_factory=set)
    _failed: dict[str, str] = field(default_factory=dict)  # added → why it could not be kept
    _not_before_s: dict[str, float] = field(default_factory=dict)
    _published_s: float = 0.0

    def begin_phase(self, phase: PhasePlan) -> None:
        """Forgets the phase before and starts polling."""
        self._phase, self._wanted, self._leaving = phase, None, DrainDeadlines()
        for known in (self._left, self._killed, self._failed, self._not_before_s):
            known.clear()
        self._poller = StorePoller(self._read, every_s=LOOK_S, name="wanted workers").start()

    def end_phase(self) -> None:
        """Stops polling."""
        if self._poller is not None:
            self._poller.stop()
            self._poller = None

    def is_leaving(self, worker: str) -> bool:
        """Returns whether it drains or has left: its end is no failure, and it is not restarted."""
        return worker in self._leaving

    def advance(self, tasks: list[StepTask], steps: Steps) -> None:
        """Does what is due; appends started workers to ``tasks``."""
        poll = self._poller.latest() if self._poller is not None else None
        if poll is not None and poll.value is not None:
            self._wanted = poll.value
        if self._wanted is None or self.is_stopping():
            return
        by_name = {task.worker: task for task in tasks}
        due = moves(
            self._wanted,
            known=by_name.keys(),
            leaving=self._leaving.until_s.keys(),
            failed=self._failed.keys(),
        )
        for worker in due.let_go:
            self._let_go(worker, by_name.get(worker))
        self._leaving.update(self._wanted, now_s=time.monotonic())
        self._check_leaving(by_name, steps)
        for worker, like in due.start:
            self._start(worker, by_name[like], tasks, steps)
        self._give_up_those_that_fail()

    # ---- adding -----------------------------------------------------------------------------

    def _start(self, worker: str, like: StepTask, tasks: list[StepTask], steps: Steps) -> None:
        kind, now_s = worker.partition("/")[0], time.monotonic()
        if now_s < self._not_before_s.get(worker, 0.0):
            return
        same = [t for t in tasks if t.worker.startswith(f"{kind}/")]
        left = [t for t in same if t.worker in self._left]
        try:
            task = steps.add(
                worker, like=like, running=[t for t in same if t not in left], left=left
            )
        except ClusterError as error:
            if any(self.is_leaving(t.worker) and t not in left for t in same):
                self._not_before_s[worker] = now_s + LOOK_S  # there may be a place for it then
            else:
                self._fail(worker, error.what, fix=error.fix)
            return
        tasks.append(task)
        self.restarts.optional.add(worker)
        logger.info("worker added worker=%s like=%s", worker, like.worker)
        self._record("started", worker, like=like.worker, by=self._by)

    def _fail(self, worker: str, why: str, *, fix: str = "") -> None:
        self._failed[worker] = why
        logger.warning("added worker given up worker=%s reason=%s", worker, why)
        self._record("failed", worker, why=why, fix=fix)

    def _give_up_those_that_fail(self) -> None:
        """Drains added workers that can't be kept, with their partners: the run continues as before."""
        assert self._wanted is not None
        assert self._phase is not None
        added, drained = self._wanted.added, self._wanted.drained
        for worker in added:
            if self.restarts.is_given_up(worker) and worker not in self._failed:
                self._fail(worker, f"it ended again and again (see the log of {worker})")
        rollout = self._phase.config.rollout
        are_makers = rollout is not None and bool(rollout.makers)
        gone = {p for w in self._failed for p in partners(w, added, are_makers=are_makers)}
        now_s = time.monotonic()
        if gone <= drained.keys() or now_s < self._published_s + TRY_AGAIN_S:
            return
        self._published_s = now_s
        try:
            self._wanted = change_scaling(
                self.store,
                self.keys,
                self.attempt,
                phase=self._phase.name,
                change=lambda scaling: scaling.with_drained(dict.fromkeys(gone, 0.0)),
            )
        except RealsysError as error:
            logger.warning("given-up workers not published error=%s", error.what)

    # ---- draining ---------------------------------------------------------------------------

    def _let_go(self, worker: str, task: StepTask | None) -> None:
        assert self._wanted is not None
        if task is None:  # it was never started
            self._record("left", worker, code=None, why="it was never started")
            return
        self.restarts.let_go(worker)
        self.leases.let_go(worker)
        seconds = self._wanted.drained[worker]
        logger.info("worker let go worker=%s timeout_s=%g by=%s", worker, seconds, self._by)
        self._record("leaving", worker, seconds=seconds, by=self._by)

    def _check_leaving(self, tasks: dict[str, StepTask], steps: Steps) -> None:
        """Records which workers have left and kills those that stay too long."""
        late = self._leaving.overdue(now_s=time.monotonic(), slack_s=LEFT_LATE_S)
        for worker in self._leaving.until_s.keys() & tasks.keys() - self._left.keys():
            task = tasks[worker]
            if (code := self._code(task)) is not None:
                self._left[worker] = task
                was_killed = worker in self._killed
                logger.info("worker left worker=%s code=%d killed=%s", worker, code, was_killed)
                self._record("left", worker, code=code, killed=was_killed)
            elif worker in late and worker not in self._killed:
                self._killed.add(worker)
                logger.warning("worker killed worker=%s reason=did not leave in time", worker)
                try:
                    steps.kill(task)
                except ClusterError as error:
                    logger.warning("worker not killed worker=%s reason=%s", worker, error.what)

    def _code(self, task: StepTask) -> int | None:
        """Returns how a task ended, also from its parent's record: srun reports only when its last task
        ends."""
        if (code := task.poll()) is not None:
            return code
        recorded = read_fresh(WorkerExit, self.files.exit_of(task.worker))
        return None if recorded is None else recorded.returncode

    # ---- store and files --------------------------------------------------------------------

    @property
    def _by(self) -> str:
        return self._wanted.by if self._wanted is not None else ""

    def _read(self) -> Scaling | None:
        """Reads the requested state, in the polling thread. Raises StoreError, TrialError."""
        assert self._phase is not None
        return read_scaling(self.store, self.keys, token=self.attempt.token, phase=self._phase.name)

    def _record(self, event: str, worker: str, **more: object) -> None:
        try:
            with JsonlAppender(self.files.scaling) as file:
                file.append({"at": time.time(), "event": event, "worker": worker, **more})
        except ClusterError as error:
            logger.warning("scaling event not recorded event=%s error=%s", event, error.what)
