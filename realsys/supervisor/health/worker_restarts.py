"""Restarts single workers of an attempt: ended ones after a pause, lost and hung ones after killing them.

restarts.py decides whether and when. Used from the supervisor's thread, which passes findings to ``take``
and calls ``advance`` in every turn; nothing here waits, except for an unavailable store.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace

from realsys.api.errors import ClusterError, StoreError
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import NameResolve
from realsys.observability.history import HistoryLog, Op
from realsys.observability.jsonl import JsonlAppender
from realsys.runtime import worker_exit_codes
from realsys.supervisor.health.ask_for_stacks import ask_for_stacks
from realsys.supervisor.health.failure_report import FailureReporter
from realsys.supervisor.health.restarts import (
    RECOVERY_S,
    RestartPolicy,
    is_optional,
    is_restarted_alone,
    judge_stalls,
)
from realsys.supervisor.health.worker_leases import WorkerLeases
from realsys.supervisor.steps.steps import Steps, StepTask
from realsys.trial.records import AttemptFiles, AttemptRecord, Failure, WorkerStatus

logger = logging.getLogger(__name__)

STACKS_S = 2.0  # time for workers to write their stacks
KILL_TIMEOUT_S = 30.0  # a killed task must be seen to end; a lost node does not answer


@dataclass
class _Down:
    """A worker between its end, or the decision to end it, and its restart (infinite: never)."""

    task: StepTask
    op: Op
    failure: Failure
    kill_at_s: float
    start_at_s: float
    was_killed: bool = False


@dataclass
class WorkerRestarts:
    """The workers of one attempt that were or will be restarted. ``begin_phase`` first.

    Args:
        is_stopping: whether a stop was requested: then nothing is started any more.
        optional: workers that the trial continues without, beside those of optional types.
    """

    steps: Steps
    files: AttemptFiles
    store: NameResolve
    keys: TrialKeys
    attempt: AttemptRecord
    leases: WorkerLeases
    history: HistoryLog
    reporter: FailureReporter
    is_stopping: Callable[[], bool]
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    optional: set[str] = field(default_factory=set)
    _down: dict[str, _Down] = field(default_factory=dict)
    _past_s: dict[str, list[float]] = field(default_factory=dict)
    _began_s: float = field(default_factory=time.monotonic)  # of the phase

    def begin_phase(self) -> None:
        """Forgets the workers of the phase before, but not how often they were restarted."""
        self._down.clear()
        self.optional.clear()
        self._began_s = time.monotonic()

    def is_down(self, worker: str) -> bool:
        """Returns whether its end is known and it will be restarted (or not any more, after a stop)."""
        return worker in self._down

    def is_given_up(self, worker: str) -> bool:
        """Returns whether it stays down for the rest of the phase, and the trial continues without it."""
        return worker in self._down and math.isinf(self._down[worker].start_at_s)

    def recovering(self) -> frozenset[str]:
        """Returns the workers that are down, or were restarted recently."""
        now_s = time.monotonic()
        fresh = (w for w, at_s in self._past_s.items() if now_s - at_s[-1] < RECOVERY_S)
        return frozenset((*self._down, *fresh))

    def take(self, task: StepTask, op: Op, *, stall: WorkerStatus | None = None) -> bool:
        """Schedules the restart of a worker that ended, was lost or hangs; returns False if that ends the
        trial.

        After a stop request the worker is left as it is: the master may still save.

        Args:
            op: how it was noticed, for the history.
            stall: last status of a worker that hangs; it gets time to write its stacks.
        """
        if not is_restarted_alone(task.worker):
            return False
        now_s, past_s = time.monotonic(), self._past_s.get(task.worker, [])
        known = self.leases.registered.get(task.worker)
        if stall is not None:
            failure = self.reporter.of_stall(task, known, stall)
        else:
            failure = self.reporter.of_task(task, known)
        start_at_s = self.policy.next_start_s(
            past_s, now_s=now_s, began_s=self._began_s, kind=failure.kind
        )
        # Its step was refused, as a second one would be
        if task.poll() == worker_exit_codes.NOT_STARTED:
            start_at_s = None
        if start_at_s is None and self._is_optional(task.worker):
            logger.warning("worker given up worker=%s restarts=%d", task.worker, len(past_s))
            start_at_s = math.inf
        if start_at_s is None and not self.is_stopping():
            return False
        self.history.note(op, worker=task.worker)
        kill_at_s = now_s + (STACKS_S if stall is not None else 0.0)
        self._down[task.worker] = _Down(task, op, failure, kill_at_s, start_at_s or now_s)
        why, times = failure.why.partition("\n")[0], len(past_s)
        logger.warning("worker down worker=%s restarts=%d reason=%s", task.worker, times, why)
        return True

    def let_go(self, worker: str) -> None:
        """Cancels a restart of ``worker``, which is being drained."""
        self._down.pop(worker, None)

    def _is_optional(self, worker: str) -> bool:
        return is_optional(worker) or worker in self.optional

    def take_hung(self, up: Iterable[StepTask]) -> bool:
        """Schedules restarts of workers that hang and do not merely wait for another; returns False if
        one of them ends the trial."""
        statuses = {w: s for w, s in self.leases.statuses.items() if not self.is_down(w)}
        stalls = judge_stalls(statuses, recovering=self.recovering())
        running = {t.worker: t for t in up if t.poll() is None}
        if stalls.fatal or not running.keys() >= set(stalls.again):
            return False
        if stalls.again:
            ask_for_stacks(self.store, self.keys, self.attempt, stalls.again)
        return all(self.take(running[w], Op.LOST, stall=statuses[w]) for w in stalls.again)

    def with_restart_count(self, failure: Failure) -> Failure:
        """Adds to ``failure`` how often its worker had been restarted."""
        past_s = self._past_s.get(failure.worker)
        if not past_s:
            return failure
        times = f"{len(past_s)} time" + "s" * (len(past_s) > 1)
        return replace(failure, why=f"{failure.why} (it had been restarted {times})")

    def advance(self, tasks: list[StepTask]) -> list[Failure]:
        """Kills and starts what is due, and replaces old tasks in ``tasks`` by the new ones.

        Returns:
            Failures of workers that could not be restarted: they end the trial.
        """
        failures: list[Failure] = []
        for down in list(self._down.values()):
            try:
                self._advance_one(down, tasks)
            except ClusterError as error:
                if self._is_optional(down.task.worker):
                    logger.warning(
                        "worker given up worker=%s reason=%s", down.task.worker, error.what
                    )
                    down.start_at_s = down.kill_at_s = math.inf
                    continue
                del self._down[down.task.worker]
                why = f"{down.failure.why}; it can't be restarted: {error.what}"
                fix = down.failure.fix or error.fix
                failures.append(self.with_restart_count(replace(down.failure, why=why, fix=fix)))
        return failures

    def _advance_one(self, down: _Down, tasks: list[StepTask]) -> None:
        """Kills or starts one worker if due. Raises ClusterError if it can't be restarted."""
        if self.is_stopping():
            return
        now_s = time.monotonic()
        if down.task.poll() is None:
            if not down.was_killed and now_s >= down.kill_at_s:
                down.was_killed = True
                self.steps.kill(down.task)
                logger.warning("worker killed worker=%s", down.task.worker)
            elif now_s > down.kill_at_s + KILL_TIMEOUT_S:
                raise ClusterError(
                    f"it was killed but has not ended within {KILL_TIMEOUT_S:g} s",
                    where=down.task.host or down.task.worker,
                    fix="its node may be lost: check it, then resume the trial",
                )
            return
        if now_s >= down.start_at_s:
            self._start(down, tasks)

    def _start(self, down: _Down, tasks: list[StepTask]) -> None:
        old, worker = down.task, down.task.worker
        if down.op is Op.EXITED:  # its failure record and log are complete by now
            down.failure = self.reporter.of_task(old, self.leases.registered.get(worker))
        self._forget(worker)
        new = self.steps.restart(old)
        tasks[next(i for i, task in enumerate(tasks) if task is old)] = new
        del self._down[worker]
        self._past_s.setdefault(worker, []).append(time.monotonic())
        number = len(self._past_s[worker])
        self.history.note(Op.RESTARTED, worker=worker)
        self._record(down.failure, number)
        logger.info("worker restarted worker=%s restarts=%d", worker, number)

    def _forget(self, worker: str) -> None:
        """Removes what the former process left, so that it is not taken for the new one's."""
        self.files.failure_record(worker).unlink(missing_ok=True)
        self.leases.forget(worker)
        worker_type, _, index = worker.partition("/")
        keys = [
            self.keys.worker(worker_type, int(index)),
            self.keys.command(worker_type, int(index)),
        ]
        try:
            AttemptFence(self.store, self.keys, self.attempt).write([], deletes=keys)
        except StoreError as error:  # the new one takes the key over
            logger.warning("key of former worker not removed key=%s error=%s", keys[0], error.what)

    def _record(self, failure: Failure, number: int) -> None:
        row = {**asdict(failure), "number": number, "ended_at": failure.at, "at": time.time()}
        try:
            with JsonlAppender(self.files.restarts) as file:
                file.append(row)
        except ClusterError as error:
            logger.warning("restart not recorded error=%s", error.what)
