"""Workers of a trial whose groups are in several Slurm jobs that start separately (layout split).

This job's steps are started here, the others' by their agents (component_agent.py), by orders through the
store. Nothing starts before all jobs run; everything is checked when the supervisor polls a task, so a
stop request is also noticed while waiting.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from realsys.api.errors import ClusterError
from realsys.api.plan import LaunchPlan, PhasePlan
from realsys.runtime import worker_exit_codes
from realsys.slurm.job_identity import JobIdentity, Ownership
from realsys.supervisor.attempt.attempt import LEASE_SLACK_S
from realsys.supervisor.own_jobs import ownerships
from realsys.supervisor.split_jobs.component_board import (
    ComponentBoard,
    submitted_comment,
    submitted_job_ids,
)
from realsys.supervisor.split_jobs.components import (
    Action,
    ComponentRecord,
    Presence,
    TaskEnd,
    named,
    not_there,
)
from realsys.supervisor.steps.slurm_step import STRICT_TASKS
from realsys.supervisor.steps.slurm_steps import END_S
from realsys.supervisor.steps.steps import Steps, StepTask
from realsys.trial.records import AttemptFiles, TrialFiles, WorkerExit, read_fresh, write_record

logger = logging.getLogger(__name__)

POLL_S = 0.25
TELL_EVERY_S = 60.0  # while waiting for the other jobs
REMOTE_END_S = END_S + 30.0  # an agent's own time limit, and time for its report to arrive
LEAVE_S = 30.0


@dataclass
class SplitTask:
    """One task: of this job, or reported by its component's agent."""

    worker: str
    component: int
    steps: SplitSteps
    local: StepTask | None = None
    end: TaskEnd | None = None

    @property
    def host(self) -> str:
        """Where it runs or ran, "" if unknown."""
        return self.local.host if self.local else self.end.host if self.end else ""

    @property
    def pid(self) -> int:
        """Of the worker, 0 if unknown."""
        return self.local.pid if self.local else self.end.pid if self.end else 0

    @property
    def ended_at(self) -> float | None:
        """When it was seen to end."""
        return self.local.ended_at if self.local else self.end.ended_at if self.end else None

    @property
    def hint(self) -> str:
        """What its job reports about its end."""
        return self.local.hint if self.local else self.end.hint if self.end else ""

    def poll(self) -> int | None:
        """Returns the return code, or None. Raises ClusterError if a job of the trial is missing or
        failed."""
        self.steps.refresh()
        return self.known()

    def known(self) -> int | None:
        """Returns the return code as known now."""
        if self.local is not None:
            return self.local.poll()
        return self.end.returncode if self.end is not None else None


@dataclass
class SplitSteps:
    """Steps of all jobs of the trial. ``close`` it at the end, whatever happened.

    Args:
        local: starts the steps of component 0, this job's.
        board: open.
    """

    plan: LaunchPlan
    files: TrialFiles
    attempt_files: AttemptFiles
    board: ComponentBoard
    local: Steps
    poll_s: float = POLL_S
    slack_s: float = LEASE_SLACK_S
    end_s: float = REMOTE_END_S
    leave_s: float = LEAVE_S
    _opened: float = field(default_factory=time.monotonic)
    _next_look: float = 0.0
    _next_told: float = 0.0
    _job_ids: dict[int, str] = field(default_factory=dict)  # of components that were here once
    _leaving: dict[int, str] = field(default_factory=dict)  # why Slurm is about to end one
    _agents: dict[int, str] = field(default_factory=dict)  # that the attempt began with
    _presence: dict[int, Presence] = field(default_factory=dict)
    _sequence: int = 0
    _pending: PhasePlan | None = None
    _tasks: list[SplitTask] = field(default_factory=list)

    @property
    def others(self) -> range:
        """Indices of the components in other jobs."""
        assert self.plan.job is not None
        return range(1, len(self.plan.job.components))

    # ---- Steps ------------------------------------------------------------------------------

    def start(self, phase: PhasePlan) -> list[StepTask]:
        """Returns the phase's tasks; they start as soon as all jobs run (see ``refresh``)."""
        self._sequence += 1
        self._pending = phase
        self._tasks = [
            SplitTask(f"{step.worker_type.value}/{index}", step.component, self)
            for step in phase.steps
            for index in range(step.num_tasks)
        ]
        self._next_look = 0.0
        self.refresh()
        return list(self._tasks)

    def kill(self, task: StepTask) -> None:
        """Kills a task of this job. Raises ClusterError for those of another."""
        self.local.kill(self._local(task))

    def restart(self, task: StepTask) -> StepTask:
        """Restarts a task of this job. Raises ClusterError for those of another."""
        new = self.local.restart(self._local(task))
        assert isinstance(task, SplitTask)
        task_now = replace(task, local=new)
        self._tasks = [task_now if t is task else t for t in self._tasks]
        return task_now

    def add(
        self, worker: str, *, like: StepTask, running: Sequence[StepTask], left: Sequence[StepTask]
    ) -> StepTask:
        """Raises ClusterError: most workers would have to be started in another job."""
        raise ClusterError(
            f"{worker} can't be added: the trial's jobs were started apart",
            where="layout split",
            fix="use the layout single or het: realsys launch … --layout het",
        )

    def _local(self, task: StepTask) -> StepTask:
        """Returns the task as this job's steps know it."""
        assert isinstance(task, SplitTask)
        if task.local is None:
            raise ClusterError(
                f"{self._named(task.component)} can't restart a worker",
                where="layout split",
                fix="resume the trial; the layouts single and het restart such workers",
            )
        return task.local

    def end(self, tasks: Iterable[StepTask], *, grace_s: float) -> None:
        """Ends this job's tasks and makes the agents end theirs; returns when all have ended.

        Applies to all tasks of the phase, also after a ``start`` that failed half-way. A job whose agent
        does not report the end in time is cancelled.
        """
        begun, self._pending = self._pending is None and bool(self._agents), None
        remote = [t for t in self._tasks if t.local is None and t.component] if begun else []
        running = any(t.known() is None for t in remote)
        ordered = not running or self._order(Action.END)
        local = [t.local for t in self._tasks if t.local is not None]
        self.local.end(local, grace_s=grace_s)
        deadline = time.monotonic() + self.end_s
        while left := [t for t in remote if t.known() is None]:
            if time.monotonic() > deadline:
                self._cut_off({t.component for t in left})
                return
            ordered = ordered or self._order(Action.END)
            self._read_reports()
            time.sleep(self.poll_s)

    def close(self) -> None:
        """Ends the other jobs: by an order to leave, or by cancelling those without an agent."""
        deadline = time.monotonic() + self.leave_s
        present = self._components()  # before the order: an agent may obey it at once
        ordered = self._order(Action.LEAVE)
        left = list(self.others) if present is None else [i for i in self.others if i in present]
        self._cancel(i for i in self.others if i not in left)
        while left and time.monotonic() < deadline:
            time.sleep(self.poll_s)
            ordered = ordered or self._order(Action.LEAVE)
            present = self._components()
            left = [i for i in left if present is None or i in present]
        self._cancel(left)
        self.board.close()

    # ---- looking ----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Starts what can be started and updates the tasks, at most four times a second.

        Raises:
            ClusterError: a job did not start in time, or could not start its steps.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self.poll_s
        if self._pending is None:
            if problem := self._read_reports():
                raise problem
        elif self._agents or self._are_all_here():
            self._begin(self._pending)

    def _are_all_here(self) -> bool:
        present = self._components()
        if present is None:
            return False  # the missing ones are unknown
        missing = [i for i in self.others if i not in present]
        if self.board.is_stop_requested():
            self._pending = None
            for task in self._tasks:
                task.end = TaskEnd(returncode=worker_exit_codes.STOPPED, ended_at=time.time())
            return False
        if missing:
            self._wait_on(missing)
            return False
        self._agents = {i: record.agent for i, record in present.items()}
        self._presence = {i: Presence(self.slack_s) for i in self.others}
        self._note_nodes(present)
        logger.info("all jobs running jobs=%s", ",".join(r.job_id for r in present.values()))
        return True

    def _wait_on(self, missing: list[int]) -> None:
        assert self.plan.job is not None
        limit_s = self.plan.cluster.slurm.rendezvous_seconds
        left_s = self._opened + limit_s - time.monotonic()
        if left_s < 0:
            ids = submitted_job_ids(self.files, self.board.attempt)
            trial = self.plan.trial
            raise not_there(self.plan.job, missing, ids, waited_s=limit_s, trial=trial)
        if time.monotonic() > self._next_told:
            self._next_told = time.monotonic() + TELL_EVERY_S
            names = ",".join(self._name(i) for i in missing)
            logger.info("waiting for=%s timeout_s=%.0f", names, left_s)

    def _begin(self, phase: PhasePlan) -> None:
        """Starts the phase everywhere; retried next time if the store does not answer."""
        if not self._order(Action.START, phase.name):
            return
        self._pending = None
        started = {task.worker: task for task in self.local.start(phase)}
        for task in self._tasks:
            task.local = started.get(task.worker)

    def _read_reports(self) -> ClusterError | None:
        """Reads the agents' keys; returns what one of them could not do."""
        present, problem = self._components(), None
        for index, report in self.board.reports(self._sequence, self._agents).items():
            for task in self._running(index):
                task.end = self._explained(index, report.end_of(task.worker))
            if report.problem is not None:
                reported = report.problem
                where = f"{self._named(index)}: {reported.where}"
                problem = problem or ClusterError(reported.what, where=where, fix=reported.fix)
        for index, presence in self._presence.items():
            there = None if present is None else self._is_same(present.get(index))
            if presence.is_gone(there, now_s=time.monotonic()):
                why = f": {self._leaving[index]}" if index in self._leaving else ""
                self._give_up(index, f"{self._named(index)} is gone{why}")
        return problem

    def _components(self) -> dict[int, ComponentRecord] | None:
        present = self.board.components()
        for index, record in (present or {}).items():
            self._job_ids[index] = record.job_id
            if record.leaving:
                self._leaving[index] = record.leaving
            self.board.pass_on_end(record, self._name(index))
        return present

    def _explained(self, index: int, end: TaskEnd | None) -> TaskEnd | None:
        """Explains an end that has no record of its own (no pid) by the end of its job, if Slurm ended
        that."""
        if end is None or not end.returncode or end.pid or index not in self._leaving:
            return end
        return replace(end, hint=self._leaving[index])

    def _is_same(self, record: ComponentRecord | None) -> bool:
        return record is not None and self._agents[record.index] == record.agent

    def _running(self, index: int) -> list[SplitTask]:
        return [t for t in self._tasks if t.component == index and t.known() is None]

    def _give_up(self, index: int, hint: str) -> None:
        """Marks the component's tasks as ended, by their own records if there are any."""
        running = self._running(index)
        if running:
            logger.error("component lost tasks=%d hint=%s", len(running), hint)
        for number, task in enumerate(running):
            task.end = TaskEnd(returncode=worker_exit_codes.FAILED, ended_at=time.time(), hint=hint)
            path = self.attempt_files.exit_of(task.worker)
            if number < STRICT_TASKS and (recorded := read_fresh(WorkerExit, path)) is not None:
                task.end = TaskEnd(
                    returncode=recorded.returncode,
                    host=recorded.host,
                    pid=recorded.pid,
                    ended_at=recorded.at,
                )

    def _cut_off(self, indices: set[int]) -> None:
        """Cancels components that do not report the end of their tasks."""
        self._cancel(indices)
        for index in indices:
            self._give_up(index, f"{self._named(index)} did not end it in time and was cancelled")

    # ---- jobs and nodes ---------------------------------------------------------------------

    def _order(self, action: Action, phase: str = "") -> bool:
        return self.board.order(action, self._sequence, self._agents, phase)

    def _note_nodes(self, present: dict[int, ComponentRecord]) -> None:
        """Records the nodes of all jobs as the attempt's: workers choose their addresses by them."""
        nodes = ",".join(present[i].nodes for i in sorted(present) if present[i].nodes)
        write_record(self.attempt_files.record, replace(self.board.attempt, nodes=nodes))

    def _name(self, index: int) -> str:
        assert self.plan.job is not None
        return self.plan.job.components[index].name

    def _named(self, index: int) -> str:
        assert self.plan.job is not None
        return named(self.plan.job, index, "".join(self._ids([index])))

    def _cancel(self, indices: Iterable[int]) -> None:
        """Cancels the jobs of those components that Slurm still has under their ids."""
        began_at = self.board.attempt.started_at
        comment = submitted_comment(self.files)
        ids = self._ids(indices)
        known = [JobIdentity(job_id=one, comment=comment, began_at=began_at) for one in ids]
        whose = ownerships(known, timeout_s=SCANCEL_TIMEOUT_S)
        if whose is None:
            logger.error("jobs not cancelled jobs=%s reason=Slurm does not answer", ",".join(ids))
            return
        cancel_jobs([one for one in ids if whose[one] is Ownership.OURS])

    def _ids(self, indices: Iterable[int]) -> list[str]:
        """Returns the known job ids of those components."""
        noted = dict(enumerate(submitted_job_ids(self.files, self.board.attempt)))
        ids = {**noted, **self._job_ids}
        return [ids[i] for i in indices if ids.get(i)]


# ---- Cancels the trial's remaining Slurm jobs if a graceful stop failed.


SCANCEL_TIMEOUT_S = 60.0


def cancel_jobs(job_ids: Sequence[str]) -> None:
    """Cancels all jobs with one scancel; messages about jobs that have ended go to the log only."""
    if not job_ids:
        return
    argv = ["scancel", *job_ids]
    logger.warning("jobs cancelled jobs=%s", ",".join(job_ids))
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=SCANCEL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.error("scancel failed jobs=%s error=%s", ",".join(job_ids), error)
        return
    if done.returncode or done.stderr.strip():
        logger.warning("scancel said=%s code=%d", done.stderr.strip(), done.returncode)
