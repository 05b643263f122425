"""The supervisor of one attempt: runs the phases in order, watches every worker, records the outcome.

Success is the master's own marker (``done-<phase>.json`` in the attempt's folder), never a return code
alone. A worker fails by ending, by losing its lease, or by a stall. Workers of some types are restarted
by themselves (worker_restarts.py); for the others all workers are ended at the first failure. It holds no
lock and no socket.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from realsys.api.errors import StaleAttempt
from realsys.api.plan import LaunchPlan, PhasePlan
from realsys.api.scheduling import WorkerType
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import NameResolve
from realsys.observability.history import HistoryLog, Op, history_file
from realsys.runtime import worker_exit_codes
from realsys.supervisor.attempt.stop_watch import StopWatch
from realsys.supervisor.health.ask_for_stacks import ask_for_stacks
from realsys.supervisor.health.failure_report import LEASE_ENDED, FailureReporter, suspects
from realsys.supervisor.health.first_failure import order_failures
from realsys.supervisor.health.late_evidence import LateEvidence, Silent, is_unseen
from realsys.supervisor.health.peer_failures import addresses_of, is_secondary, with_both_ends
from realsys.supervisor.health.restarts import is_optional
from realsys.supervisor.health.worker_leases import WorkerLeases
from realsys.supervisor.health.worker_restarts import STACKS_S, WorkerRestarts
from realsys.supervisor.products import attempt_that_finished, is_done, last_step, publish
from realsys.supervisor.scaling.worker_scaling import WorkerScaling
from realsys.supervisor.steps.steps import Steps, StepTask
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    ExitMarker,
    Failure,
    Result,
    TrialFiles,
    TrialRecord,
    WorkerExit,
    WorkerStatus,
    read_fresh,
    read_record,
)
from realsys.worker.requeued import newer_attempt_of_same_job

logger = logging.getLogger(__name__)

POLL_S = 0.05
MANY_TASKS, MANY_POLL_S = 200, 0.5  # polling thousands of tasks must not occupy a core
REQUEUE_LOOK_S = 2.0
STATUSES_S = 2.0  # time limit of reading workers' final states from the store
LAST_WORDS_S = 1.0  # time for peers to write failure records after the first failure
END_GRACE_S = 5.0
BALLAST_BYTES = 1 << 20
GOODBYE_S = 20.0  # time for workers to leave after the master is done
EVALUATIONS_S = 600.0  # time for evaluators to finish pending evaluations after that


@dataclass
class Supervisor:
    """Runs one attempt to its end. ``run`` is called once, from the main thread."""

    plan: LaunchPlan
    plan_hash: str
    attempt: AttemptRecord
    files: TrialFiles
    attempt_files: AttemptFiles
    store: NameResolve
    keys: TrialKeys
    steps: Steps
    look_after_store: Callable[[], None] = lambda: None
    preflight: Callable[[Callable[[], bool]], list[Failure]] = lambda goes_on: []
    _next_requeue_look: float = 0.0
    _left_s: dict[int, float] = field(default_factory=dict)  # by id: when it was seen to end well
    _failures: list[Failure] = field(default_factory=list)
    _tasks: list[StepTask] = field(default_factory=list)  # of the newest phase
    leases: WorkerLeases = field(init=False)
    evidence: LateEvidence = field(init=False)
    history: HistoryLog = field(init=False)
    restarts: WorkerRestarts = field(init=False)
    scaling: WorkerScaling = field(init=False)
    _reporter: FailureReporter = field(init=False)
    stop_watch: StopWatch = field(init=False)

    def __post_init__(self) -> None:
        self._reporter = FailureReporter(self.attempt, self.attempt_files)
        self.history = HistoryLog(
            history_file(self.attempt_files.history, "supervisor"),
            worker="supervisor",
            attempt=self.attempt.number,
            token=self.attempt.token,
        )
        self.history.note(Op.TOOK_ATTEMPT, began=self.attempt.started_at)
        self.stop_watch = StopWatch(self.store, self.keys, self.attempt)
        self.leases = WorkerLeases(
            self.store,
            self.keys,
            self.attempt,
            judges_leases=self.plan.job is not None,
            has_left=self._has_left,
        )
        self.evidence = LateEvidence(self.leases)
        self.restarts = WorkerRestarts(
            self.steps,
            self.attempt_files,
            self.store,
            self.keys,
            self.attempt,
            self.leases,
            self.history,
            self._reporter,
            is_stopping=lambda: self.stop_watch.is_requested,
        )
        self.scaling = WorkerScaling(
            self.attempt_files,
            self.store,
            self.keys,
            self.attempt,
            self.leases,
            self.restarts,
            is_stopping=lambda: self.stop_watch.is_requested,
        )

    def run(self) -> ExitMarker:
        """Runs every phase that is not done yet; returns the exit marker."""
        self.stop_watch.start()
        try:
            result, phase = self._run_phases()
        finally:
            self.stop_watch.stop()
            self.history.close()
        first, others = order_failures(self._failures, self._peers())
        if first is not None and len(hosts := self.evidence.hosts(self._tasks)) > 1:
            first = with_both_ends(first, others, self.leases.registered, hosts)
        going_on = result is not Result.COMPLETED
        return ExitMarker(
            result=result,
            attempt=self.attempt.number,
            ended_at=time.time(),
            phase=phase.name,
            step=last_step(TrialFiles.phase(phase.folder)),
            first_failure=first,
            other_failures=others,
            resume=self._resume(phase, first) if going_on else "",
        )

    def _resume(self, phase: PhasePlan, first: Failure | None) -> str:
        """Returns the command that resumes the trial; for the main phase with the setting that avoids the
        failure."""
        command = f"realsys resume {self.plan.trial}"
        if first is None or phase.publish is not None or not first.resume_with:
            return command
        return f"{command} {first.resume_with}"

    def _run_phases(self) -> tuple[Result, PhasePlan]:
        """Runs every phase that is not done yet, until one does not complete."""
        result, phase, is_checked = Result.COMPLETED, self.plan.phases[-1], False
        for phase in self.plan.phases:
            if phase.publish is not None and Path(phase.publish).is_dir():
                logger.info("phase skipped phase=%s product=%s", phase.name, phase.publish)
                continue
            by = attempt_that_finished(self.files, phase.name)
            if by is not None and (phase.publish is not None or by >= self._planned_since()):
                logger.info("phase skipped phase=%s done_by_attempt=%d", phase.name, by)
                continue
            if not is_checked and not self._nodes_are_well():
                return (Result.STOPPED if self.stop_watch.is_requested else Result.FAILED), phase
            is_checked = True
            result = self._run_phase(phase)
            if result is not Result.COMPLETED:
                break
        return result, phase

    def _nodes_are_well(self) -> bool:
        """Runs the preflight, before any worker starts; returns False if the run must not start, or at a
        stop."""
        self._failures += self.preflight(self._goes_on)
        first, _ = order_failures(self._failures)
        if first is not None:
            self.give_room()
            logger.error("preflight failed host=%s reason=%s", first.host, first.why)
        return first is None and not self.stop_watch.is_requested

    def _goes_on(self) -> bool:
        """Does what must not wait; returns whether no stop was requested.

        Raises:
            StaleAttempt: Slurm has requeued the job, and its new incarnation runs.
        """
        self.look_after_store()
        self.stop_watch.poll()
        self._refuse_if_requeued()
        return not self.stop_watch.is_requested

    def _planned_since(self) -> int:
        """Returns the first attempt with this plan: a former plan may have ended the main phase earlier."""
        record = read_record(TrialRecord, self.files.record)
        return record.changes[-1].from_attempt if record is not None and record.changes else 1

    def keep_room(self) -> None:
        """Reserves disk space for the records that must be written if the disk is full."""
        try:
            self.attempt_files.ballast.write_bytes(bytes(BALLAST_BYTES))
        except OSError as error:
            logger.warning("no room kept for the exit marker error=%s", error)

    def give_room(self) -> None:
        """Frees that space."""
        self.attempt_files.ballast.unlink(missing_ok=True)

    def request_stop(self, by: str, *, grace_s: float) -> bool:
        """Requests the master to end after its step (from a signal handler). Returns False if there was
        an earlier request."""
        return self.stop_watch.request(by, grace_s=grace_s)

    # ---- one phase --------------------------------------------------------------------------

    def _run_phase(self, phase: PhasePlan) -> Result:
        phase_files = TrialFiles.phase(phase.folder)
        Path(phase.folder).mkdir(parents=True, exist_ok=True)
        for old in self.attempt_files.failure_records.glob("*.json"):  # of an earlier phase
            old.unlink(missing_ok=True)
        logger.info("phase started phase=%s", phase.name)
        tasks: list[StepTask] = []
        try:
            self._tasks = tasks = self.steps.start(phase)
            self._left_s.clear()
            self.leases.begin_phase(len(tasks))
            self.restarts.begin_phase()
            self.scaling.begin_phase(phase)
            result = self._watch(tasks, phase)
        finally:
            self.scaling.end_phase()
            self.leases.end_phase()
            self._end_steps(tasks)
        if result is Result.COMPLETED and phase.publish is not None:
            patience_s = float(self.plan.cluster.store_patience_seconds)
            AttemptFence(self.store, self.keys, self.attempt).check_with_retry(timeout_s=patience_s)
            publish(phase_files, Path(phase.publish))
        logger.info("phase ended phase=%s result=%s", phase.name, result)
        return result

    def _end_steps(self, tasks: list[StepTask]) -> None:
        """Ends the steps unless the job was requeued: then an order to Slurm would end the new attempt's
        steps."""
        if newer_attempt_of_same_job(self.files, self.attempt.number) is None:
            self.steps.end(tasks, grace_s=END_GRACE_S)

    def _watch(self, tasks: list[StepTask], phase: PhasePlan) -> Result:
        """Watches the phase until the master is done or a worker fails.

        Raises:
            StaleAttempt: Slurm has requeued the job, and its new incarnation runs.
        """
        master = next(t for t in tasks if t.worker.startswith("master_worker/"))
        while True:
            self._goes_on()
            if self.stop_watch.is_over:
                logger.warning("grace period over, ending the workers")
                return Result.STOPPED
            if unrecoverable := self.restarts.advance(tasks):
                return self._fail_by(unrecoverable, tasks)
            self.scaling.advance(tasks, self.steps)
            up = self._looked_after(tasks)
            ended = [t for t in up if t.poll() is not None]
            if master.poll() == worker_exit_codes.DONE and is_done(
                self.files, self.attempt, phase.name
            ):
                self._wait_for_evaluators(tasks, timeout_s=EVALUATIONS_S)
                return self._wait_for_exits(tasks)
            # The master, or one interrupted
            if any(t.poll() == worker_exit_codes.STOPPED for t in ended):
                return Result.STOPPED
            bad = [t for t in ended if t is master or self._has_failed(t)]
            bad = self._without_restarted(bad, Op.EXITED)
            lost = self._without_restarted(self.leases.lost(up), Op.LOST) if not bad else []
            if bad or lost:
                return self._collect_failures(tasks, lost)
            if self.leases.stalled() and not self.restarts.take_hung(up):
                self._collect_stalls(tasks, self.leases.statuses)
                return Result.FAILED
            time.sleep(POLL_S if len(tasks) < MANY_TASKS else MANY_POLL_S)

    def _looked_after(self, tasks: list[StepTask]) -> list[StepTask]:
        """Returns the tasks whose end or silence matters: not those being restarted or drained."""
        return [
            t
            for t in tasks
            if not (self.restarts.is_down(t.worker) or self.scaling.is_leaving(t.worker))
        ]

    def _without_restarted(self, tasks: list[StepTask], op: Op) -> list[StepTask]:
        """Returns those whose end ends the trial; the others are scheduled for a restart."""
        return [
            t for t in tasks if not (self.restarts.is_down(t.worker) or self.restarts.take(t, op))
        ]

    def _refuse_if_requeued(self) -> None:
        if self.plan.job is None or time.monotonic() < self._next_requeue_look:
            return
        self._next_requeue_look = time.monotonic() + REQUEUE_LOOK_S
        newer = newer_attempt_of_same_job(self.files, self.attempt.number)
        if newer is not None:
            raise StaleAttempt(
                f"attempt {newer.number} on {newer.host} has taken over: Slurm requeued the job",
                where=str(self.attempt_files.root),
                fix="none: the newer attempt runs the trial",
            )

    def _has_failed(self, task: StepTask) -> bool:
        """Returns whether a task that has ended failed: with an error code, or with 0 in the middle of
        its work (os._exit(0) in code that it runs)."""
        if task.poll() != worker_exit_codes.DONE:
            return True
        left_s = self._left_s.setdefault(id(task), time.monotonic())
        return self.leases.left_unwell(task.worker, left_s=left_s)

    def _has_left(self, task: StepTask) -> bool:
        """Returns whether its parent recorded a clean exit: srun reports only when its last task ends."""
        recorded = read_fresh(WorkerExit, self.attempt_files.exit_of(task.worker))
        return recorded is not None and recorded.returncode == worker_exit_codes.DONE

    def _wait_for_evaluators(self, tasks: list[StepTask], *, timeout_s: float) -> None:
        """Waits until they have left, restarting them and the reward workers that score for them if they
        fail, or a stop is requested. The others leave meanwhile."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._goes_on()
            self.restarts.advance(tasks)
            here = [t for t in tasks if is_optional(t.worker)]
            up = [t for t in here if not self.restarts.is_down(t.worker)]
            well = (None, worker_exit_codes.DONE, worker_exit_codes.STOPPED)
            scoring = [t for t in tasks if t.worker.startswith(WorkerType.REWARD_WORKER)]
            bad = [
                t
                for t in up + scoring
                if t.poll() not in well and not self.restarts.is_down(t.worker)
            ]
            self._without_restarted(bad, Op.EXITED)
            at_work = [t.worker for t in up if t.poll() is None]
            down = [t.worker for t in here if self.restarts.is_down(t.worker)]
            down = [w for w in down if not self.restarts.is_given_up(w)]
            if self.stop_watch.is_requested or not at_work + down:
                return
            time.sleep(POLL_S)
        logger.warning("evaluations not finished in time timeout_s=%g", timeout_s)

    def _wait_for_exits(self, tasks: list[StepTask]) -> Result:
        deadline = time.monotonic() + GOODBYE_S
        while time.monotonic() < deadline:
            if all(t.poll() is not None for t in tasks):
                break
            time.sleep(POLL_S)
        slow = [t.worker for t in tasks if t.poll() is None]
        if slow:
            logger.warning("workers did not leave in time workers=%s timeout_s=%g", slow, GOODBYE_S)
        return Result.COMPLETED

    # ---- failures ---------------------------------------------------------------------------

    def _collect_failures(self, tasks: list[StepTask], lost: list[StepTask]) -> Result:
        """Collects every worker's reason: its own failure record, else its exit code or signal. Where all
        reasons only say that somebody was missing, waits for leases or Slurm to tell who it was.

        STOPPED if the cause was a worker interrupted by a command (`realsys tell … interrupt`), or if
        connections broke while the run was being stopped.
        """
        self.give_room()
        failed = self._await_failure_records(tasks)
        if any(task.poll() == worker_exit_codes.STOPPED for task in failed):
            self._end_steps(tasks)
            return Result.STOPPED
        silent = [Silent(task) for task in lost]
        if silent and not failed:
            silent = self.evidence.rest_of(silent, lambda: self._looked_after(tasks))
            failed = self._await_failure_records(tasks)
        if failed and not silent and self._only_miss_others(failed):
            if self._may_be_a_node(tasks):
                silent = self._await_cause(tasks)
            failed = self._await_failure_records(tasks)
            if self.stop_watch.is_requested and not silent and self._only_miss_others(failed):
                self._end_steps(tasks)
                return Result.STOPPED
        silent = self._still_silent(silent) or ([] if failed else silent)
        self._failures += [self._silence_of(s) for s in silent]
        of_silent = {s.task.worker for s in silent}
        named = [t for t in failed if t.worker not in of_silent]
        if not (named or silent):
            named = [t for t in self._looked_after(tasks) if t.poll() is not None]
        self._failures += [self._failure_of(task) for task in named]
        for task in (*named, *(s.task for s in silent)):
            self.history.note(Op.EXITED if task.poll() is not None else Op.LOST, worker=task.worker)
        self._end_all(tasks)
        return Result.FAILED

    def _await_failure_records(self, tasks: list[StepTask]) -> list[StepTask]:
        """Gives peers of a failed worker a moment for their failure records; returns all that failed."""
        deadline = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < deadline and any(t.poll() is None for t in tasks):
            time.sleep(POLL_S)
        ended = [t for t in self._looked_after(tasks) if t.poll() is not None]
        if any(t.poll() == worker_exit_codes.DONE and not self._has_failed(t) for t in ended):
            self.leases.look_now(timeout_s=STATUSES_S)  # one that ended with 0 may have been first
        return [t for t in ended if self._has_failed(t)]

    def _still_silent(self, silent: list[Silent]) -> list[Silent]:
        """Returns those whose end nobody has seen meanwhile: a parent that recorded it is on a node that
        lives, though srun may be late."""
        return [
            s
            for s in silent
            if s.why != LEASE_ENDED
            or (is_unseen(s.task) and not self.attempt_files.exit_of(s.task.worker).exists())
        ]

    def _failure_of(self, task: StepTask) -> Failure:
        known = self.leases.registered.get(task.worker)
        return self.restarts.with_restart_count(self._reporter.of_task(task, known))

    def _silence_of(self, silent: Silent) -> Failure:
        known = self.leases.registered.get(silent.task.worker)
        failure = self._reporter.of_silence(silent.task, known, why=silent.why)
        return self.restarts.with_restart_count(failure)

    def _peers(self) -> set[str]:
        """Returns the names and addresses of the workers' hosts."""
        records = self.leases.registered.values()
        return self.evidence.hosts(self._tasks).union(*map(addresses_of, records))

    def _only_miss_others(self, failed: list[StepTask]) -> bool:
        peers = self._peers()
        return all(is_secondary(self._failure_of(task), peers) for task in failed)

    def _may_be_a_node(self, tasks: list[StepTask]) -> bool:
        """Returns whether a node's end would be seen by its leases only: there are several nodes."""
        return self.plan.job is not None and len(self.evidence.hosts(tasks)) > 1

    def _await_cause(self, tasks: list[StepTask]) -> list[Silent]:
        secondary: set[str] = set()
        primary_since_s: dict[str, float] = {}

        def is_explained() -> bool:
            now_s, peers = time.monotonic(), self._peers()
            ended = [t for t in self._looked_after(tasks) if t.poll() not in (None, 0)]
            for task in (t for t in ended if t.worker not in secondary and self._has_failed(t)):
                if is_secondary(self._failure_of(task), peers):
                    secondary.add(task.worker)
                # Its failure record may be on its way
                elif now_s - primary_since_s.setdefault(task.worker, now_s) > LAST_WORDS_S:
                    return True
            return False

        logger.warning("all failures so far are secondary; waiting for their cause")
        return self.evidence.wait(
            lambda: self._looked_after(tasks), is_explained=is_explained, goes_on=self._goes_on
        )

    def _fail_by(self, failures: list[Failure], tasks: list[StepTask]) -> Result:
        """Ends the phase because workers could not be restarted."""
        self.give_room()
        self._failures += failures
        self._end_all(tasks)
        return Result.FAILED

    def _collect_stalls(self, tasks: list[StepTask], statuses: Mapping[str, WorkerStatus]) -> None:
        """Collects all stacks, then reports the workers that do not merely wait for another one."""
        self.give_room()
        asked = [t.worker for t in tasks if t.poll() is None]
        ask_for_stacks(self.store, self.keys, self.attempt, asked)
        time.sleep(STACKS_S)
        by_name = {t.worker: t for t in tasks}
        for worker in suspects(statuses):
            if worker in by_name:
                self.history.note(Op.LOST, worker=worker)
                known = self.leases.registered.get(worker)
                failure = self._reporter.of_stall(by_name[worker], known, statuses[worker])
                self._failures.append(self.restarts.with_restart_count(failure))
        self._end_all(tasks)

    def _end_all(self, tasks: list[StepTask]) -> None:
        self._end_steps(tasks)
        first, _ = order_failures(self._failures, self._peers())
        if first is not None:
            logger.error(
                "first failure worker=%s pid=%d reason=%s", first.worker, first.pid, first.why
            )
