"""Workers of a trial whose groups sit in several Slurm jobs that started apart (layout split).

This job's steps are started here, the others' by their agents (component_agent.py), told through the
store. Nothing starts before all jobs are there; until then, and after, everything is looked at when the
supervisor polls a task, so a stop is heard while it waits.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from realsys.api.errors import ClusterError, KeyExists, StoreError
from realsys.api.job import JobPlan
from realsys.api.plan import LaunchPlan, PhasePlan
from realsys.api.trial import (
    AttemptFiles,
    AttemptRecord,
    StopRequest,
    TrialFiles,
    WorkerExit,
    dumps,
    loads,
    read_record,
    write_record,
)
from realsys.name_resolve.keys import TrialKeys
from realsys.name_resolve.store import Entry, NameResolve
from realsys.supervisor.attempt import LEASE_SLACK_S
from realsys.supervisor.cancel import cancel_jobs
from realsys.supervisor.components import (
    Action,
    ComponentRecord,
    Order,
    Presence,
    Report,
    TaskEnd,
    named,
    not_there,
)
from realsys.supervisor.membership import Membership
from realsys.supervisor.slurm_steps import END_S, STRICT_TASKS
from realsys.supervisor.steps import Steps, Task
from realsys.worker import exit_codes

logger = logging.getLogger(__name__)

POLL_S = 0.25
TELL_EVERY_S = 60.0  # while waiting for the other jobs
REMOTE_END_S = END_S + 30.0  # an agent's own patience, and its report's way
LEAVE_S = 30.0


@dataclass
class SplitTask:
    """One task: of this job once it is started, or told about by its component's agent."""

    worker: str
    component: int
    steps: SplitSteps
    local: Task | None = None
    end: TaskEnd | None = None

    @property
    def host(self) -> str:
        """Where it runs or ran, "" while that is not known."""
        return self.local.host if self.local else self.end.host if self.end else ""

    @property
    def pid(self) -> int:
        """Of the worker, 0 while it is not known."""
        return self.local.pid if self.local else self.end.pid if self.end else 0

    @property
    def ended_at(self) -> float | None:
        """When it was seen to end."""
        return self.local.ended_at if self.local else self.end.ended_at if self.end else None

    @property
    def hint(self) -> str:
        """What its job's side says of its end."""
        return self.local.hint if self.local else self.end.hint if self.end else ""

    def poll(self) -> int | None:
        """Return code, or None. Raises ClusterError when a job of the trial is missing or unfit."""
        self.steps.refresh()
        return self.known()

    def known(self) -> int | None:
        """Return code as known now; raises nothing."""
        if self.local is not None:
            return self.local.poll()
        return self.end.returncode if self.end is not None else None


@dataclass
class SplitSteps:
    """Steps of all jobs of the trial; this one's is component 0. ``open`` it first, ``close`` it last.

    Args:
        local: starts the steps of component 0.
        nodes: of this job, a hostlist.
    """

    plan: LaunchPlan
    attempt: AttemptRecord
    files: TrialFiles
    attempt_files: AttemptFiles
    store: NameResolve
    keys: TrialKeys
    local: Steps
    nodes: str
    poll_s: float = POLL_S
    slack_s: float = LEASE_SLACK_S
    end_s: float = REMOTE_END_S
    leave_s: float = LEAVE_S
    _member: Membership = field(init=False)
    _opened: float = field(default_factory=time.monotonic)
    _next_look: float = 0.0
    _next_told: float = 0.0
    _seen: dict[int, ComponentRecord] = field(default_factory=dict)  # last record of each
    _agents: dict[int, str] = field(default_factory=dict)  # that the attempt began with
    _presence: dict[int, Presence] = field(default_factory=dict)
    _sequence: int = 0
    _pending: PhasePlan | None = None
    _tasks: list[SplitTask] = field(default_factory=list)
    _stop_passed_on: bool = False

    def __post_init__(self) -> None:
        record = ComponentRecord(
            index=0,
            agent=self.attempt.token,
            job_id=self.attempt.job_id,
            host=self.attempt.host,
            nodes=self.nodes,
            attempt=self.attempt.number,
            token=self.attempt.token,
        )
        self._member = Membership(self.store, self.keys.component(0), record)

    @property
    def job(self) -> JobPlan:
        """The plan's."""
        assert self.plan.job is not None
        return self.plan.job

    @property
    def others(self) -> range:
        """Indices of the other components."""
        return range(1, len(self.job.components))

    def open(self) -> Self:
        """Tells the agents that this attempt's supervisor is here; they may register from now on."""
        self._member.hold()
        return self

    # ---- Steps ------------------------------------------------------------------------------

    def start(self, phase: PhasePlan) -> list[Task]:
        """The phase's tasks, started as soon as all jobs are there: see ``SplitTask.poll``."""
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

    def end(self, tasks: Iterable[Task], *, grace_s: float) -> None:
        """Ends this job's tasks and has the agents end theirs; returns when all are gone.

        A job whose agent does not report the end in time is cancelled.
        """
        self._pending = None
        mine = [t for t in tasks if isinstance(t, SplitTask)]
        remote = [t for t in mine if t.local is None and t.component and self._agents]
        running = any(t.known() is None for t in remote)
        ordered = not running or self._try_to_order(Action.END)
        self.local.end([t.local for t in mine if t.local is not None], grace_s=grace_s)
        deadline = time.monotonic() + self.end_s
        while left := [t for t in remote if t.known() is None]:
            if time.monotonic() > deadline:
                self._cut_off(left)
                return
            time.sleep(self.poll_s)
            ordered = ordered or self._try_to_order(Action.END)
            self._look()

    def close(self) -> None:
        """Lets the other jobs end: told to leave, or cancelled where nobody is there to be told."""
        deadline = time.monotonic() + self.leave_s
        ordered = self._try_to_order(Action.LEAVE)
        present = self._read_components()
        cancelled = [i for i in self.others if i not in (present or self._seen)]
        cancel_jobs(self._ids(cancelled))
        left = [i for i in self.others if i not in cancelled]
        while left and time.monotonic() < deadline:
            time.sleep(self.poll_s)
            ordered = ordered or self._try_to_order(Action.LEAVE)
            present = self._read_components()
            left = [i for i in left if present is None or i in present]
        cancel_jobs(self._ids(left))
        self._member.leave()

    # ---- looking ----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Brings the tasks up to date, at most four times a second.

        Raises:
            ClusterError: a job did not come in time, or could not start its steps.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self.poll_s
        if self._pending is not None and self._agents:
            self._begin()
        elif self._pending is not None:
            self._wait_for_all()
        elif problem := self._look():
            raise problem

    def _wait_for_all(self) -> None:
        present = self._read_components() or {}
        self._pass_on_ends(present)
        missing = [i for i in self.others if i not in present]
        waited_s = time.monotonic() - self._opened
        limit_s = self.plan.cluster.slurm.rendezvous_seconds
        if self._is_stop_asked():
            self._pending = None
            for task in self._tasks:
                task.end = TaskEnd(returncode=exit_codes.STOPPED, ended_at=time.time())
        elif not missing:
            self._agents = {i: record.agent for i, record in present.items()}
            self._presence = {i: Presence(self.slack_s) for i in self.others}
            logger.info("all jobs there jobs=%s", ",".join(r.job_id for r in present.values()))
            self._note_nodes(present)
            self._begin()
        elif waited_s > limit_s:
            ids = self._all_ids()
            raise not_there(
                self.job, missing, ids, waited_s=limit_s, trial=self.plan.trial
            )
        elif time.monotonic() > self._next_told:
            self._next_told = time.monotonic() + TELL_EVERY_S
            names = ",".join(self.job.components[i].name for i in missing)
            logger.info("waiting for=%s timeout_s=%g", names, limit_s - waited_s)

    def _begin(self) -> None:
        """Starts the pending phase everywhere; later, if the store does not answer."""
        phase = self._pending
        if phase is None or not self._try_to_order(Action.START, phase.name):
            return
        self._pending = None
        started = {task.worker: task for task in self.local.start(phase)}
        for task in self._tasks:
            task.local = started.get(task.worker)

    def _look(self) -> ClusterError | None:
        """Reads the agents' keys; returns what one of them could not do."""
        present = self._read_components()
        if present is not None:
            self._pass_on_ends(present)
        problem = None
        for index, report in self._read_reports().items():
            for task in self._running(index):
                task.end = report.end_of(task.worker)
            if report.problem is not None:
                told = report.problem
                where = f"{self._named(index)}: {told.where}"
                problem = problem or ClusterError(told.what, where=where, fix=told.fix)
        for index, presence in self._presence.items():
            there = None if present is None else self._is_same(present.get(index))
            if presence.is_gone(there, now_s=time.monotonic()):
                self._give_up(index, f"{self._named(index)} is gone")
        return problem

    def _is_same(self, record: ComponentRecord | None) -> bool:
        return record is not None and self._agents[record.index] == record.agent

    def _running(self, index: int) -> list[SplitTask]:
        return [t for t in self._tasks if t.component == index and t.known() is None]

    def _give_up(self, index: int, hint: str) -> None:
        """The component's tasks count as ended: by their own records if they left any."""
        running = self._running(index)
        if running:
            logger.error("component lost tasks=%d hint=%s", len(running), hint)
        for number, task in enumerate(running):
            task.end = TaskEnd(returncode=exit_codes.FAILED, ended_at=time.time(), hint=hint)
            path = self.attempt_files.exit_of(task.worker)
            if number < STRICT_TASKS and (told := read_record(WorkerExit, path)) is not None:
                task.end = TaskEnd(
                    returncode=told.returncode, host=told.host, pid=told.pid, ended_at=told.at
                )

    def _cut_off(self, tasks: Sequence[SplitTask]) -> None:
        """Last resort for tasks whose end nobody reported."""
        indices = sorted({t.component for t in tasks})
        cancel_jobs(self._ids(indices))
        for index in indices:
            self._give_up(index, f"{self._named(index)} did not end it in time and was cancelled")

    # ---- what goes through the store --------------------------------------------------------

    def _read_components(self) -> dict[int, ComponentRecord] | None:
        """This attempt's components that are there, by index; None when the store does not answer."""
        try:
            self._member.hold()
            entries = self.store.get_subtree(self.keys.components)
        except StoreError as error:
            logger.warning("store does not answer error=%s", error.what)
            return None
        records = (loads(ComponentRecord, e.value, where=e.key) for e in entries)
        found = {r.index: r for r in records if r.token == self.attempt.token}
        self._seen |= found
        return found

    def _read_reports(self) -> dict[int, Report]:
        """Reports on the phase that runs, by component."""
        try:
            entries: list[Entry] = self.store.get_subtree(self.keys.component_reports)
        except StoreError:
            return {}
        reports = [loads(Report, e.value, where=e.key) for e in entries]
        mine = (self.attempt.token, self._sequence)
        return {
            r.component: r
            for r in reports
            if (r.token, r.sequence) == mine and self._agents.get(r.component) == r.agent
        }

    def _try_to_order(self, action: Action, phase: str = "") -> bool:
        order = Order(
            attempt=self.attempt.number,
            token=self.attempt.token,
            sequence=self._sequence,
            action=action,
            phase=phase,
            agents={str(i): agent for i, agent in self._agents.items()},
        )
        try:
            self.store.add(self.keys.component_order, dumps(order), replace=True)
        except StoreError as error:
            logger.warning("order not written action=%s error=%s", action, error.what)
            return False
        logger.info("order written action=%s sequence=%d", action, self._sequence)
        return True

    def _is_stop_asked(self) -> bool:
        try:
            entry = self.store.get(self.keys.stop)
        except StoreError:
            return False
        return loads(StopRequest, entry.value, where=entry.key).attempt == self.attempt.number

    def _pass_on_ends(self, present: dict[int, ComponentRecord]) -> None:
        """A job that Slurm is about to end stops the attempt, in good order, while there is time."""
        for record in present.values():
            if not record.leaving or self._stop_passed_on:
                continue
            by = f"{record.leaving}, component {self.job.components[record.index].name}"
            request = StopRequest(
                grace_seconds=record.leaving_grace_s,
                by=by,
                at=time.time(),
                attempt=self.attempt.number,
            )
            try:
                self.store.add(self.keys.stop, dumps(request))
            except KeyExists:
                pass  # somebody asked before
            except StoreError as error:
                logger.warning("stop not passed on error=%s", error.what)
                return
            self._stop_passed_on = True

    # ---- jobs and nodes ---------------------------------------------------------------------

    def _note_nodes(self, present: dict[int, ComponentRecord]) -> None:
        """The attempt's nodes are those of all jobs: workers find their way to each other by them."""
        nodes = ",".join(present[i].nodes for i in sorted(present) if present[i].nodes)
        write_record(self.attempt_files.record, replace(self.attempt, nodes=nodes))

    def _named(self, index: int) -> str:
        (job_id,) = self._ids([index]) or [""]
        return named(self.job, index, job_id)

    def _ids(self, indices: Iterable[int]) -> list[str]:
        """Job ids of those components, as far as known."""
        every = self._all_ids()
        found = [
            self._seen[i].job_id if i in self._seen else (every[i] if i < len(every) else "")
            for i in indices
        ]
        return [job_id for job_id in found if job_id]

    def _all_ids(self) -> list[str]:
        """Of all components in order, as the launch noted them down; empty when it is not ours."""
        try:
            note = json.loads((self.files.submitit / "submission.json").read_bytes())
            ids = [str(job_id) for job_id in note["job_ids"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []
        return ids if ids and ids[0] == self.attempt.job_id else []
