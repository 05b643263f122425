"""Executes the supervisor's orders in one Slurm job of a trial whose groups are in several.

Starts and ends its own job's steps as ordered through the store, and reports how their tasks ended. It
decides nothing: the supervisor decides whether the attempt succeeded. It leaves on an order, when its
attempt has ended or is superseded, and when the supervisor has been gone for longer than a lease can be
late. An unavailable store ends nothing.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from realsys.api.errors import (
    ClusterError,
    RealsysError,
    StaleAttempt,
    StoreError,
)
from realsys.api.plan import LaunchPlan
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import NameResolve, Put
from realsys.supervisor.attempt.attempt import LEASE_SLACK_S, Job, is_of_removed_trial
from realsys.supervisor.split_jobs.components import (
    Action,
    ComponentRecord,
    Order,
    Presence,
    Problem,
    Report,
    is_joinable,
    report_of,
)
from realsys.supervisor.split_jobs.membership import Membership, read_key
from realsys.supervisor.steps.steps import Steps, StepTask
from realsys.supervisor.supervisor import END_GRACE_S
from realsys.trial.records import AttemptRecord, TrialFiles, dumps, fresh

logger = logging.getLogger(__name__)

POLL_S = 0.25
LOOK_AROUND_S = 1.0  # for the exit marker and a newer attempt
AFTER_GRACE_S = 5.0


@dataclass
class OrderFollower:
    """Represents the supervisor in one job. Call ``join``, then ``serve``, from the main thread."""

    plan: LaunchPlan
    component: int
    number: int
    job: Job
    files: TrialFiles
    store: NameResolve
    keys: TrialKeys
    steps: Steps
    poll_s: float = POLL_S
    slack_s: float = LEASE_SLACK_S
    _member: Membership | None = None
    _fence: AttemptFence = field(init=False)  # of the attempt that was joined
    _sequence: int = 0
    _tasks: Sequence[StepTask] = ()
    _problem: Problem | None = None
    _reported: Report | None = None
    _leaving: tuple[str, float, float] | None = None  # why, its grace, since when
    _next_look: float = 0.0
    _silent: bool = False  # the store, when last asked
    _supervisor: Presence = field(init=False)

    def __post_init__(self) -> None:
        self._supervisor = Presence(self.slack_s)

    def announce_end(self, why: str, *, grace_s: float) -> None:
        """Notes that Slurm is about to end this job (called from a signal handler: no I/O)."""
        self._leaving = self._leaving or (why, grace_s, time.monotonic())

    # ---- joining ----------------------------------------------------------------------------

    def join(self) -> None:
        """Waits for the attempt and its supervisor, then registers. Creates no file.

        Raises:
            ClusterError: they did not appear in time, or the attempt is over.
        """
        wait_s = self.plan.cluster.slurm.rendezvous_seconds
        deadline = time.monotonic() + wait_s
        while self._member is None:
            try:
                self._try_to_join()
            except StoreError as error:
                self._note_unavailable(error)
            if self._member is None:
                self._give_up_if_vain(wait_s, time.monotonic() > deadline)
                time.sleep(self.poll_s)

    def _try_to_join(self) -> None:
        attempt = read_key(AttemptRecord, self.store, self.keys.attempt)
        supervisor = read_key(ComponentRecord, self.store, self.keys.component(0))
        if attempt is None or not is_joinable(attempt, supervisor, number=self.number):
            return
        record = ComponentRecord(
            index=self.component,
            agent=secrets.token_hex(8),
            job_id=self.job.job_id,
            host=socket.gethostname(),
            nodes=self.job.nodes,
            attempt=attempt.number,
            token=attempt.token,
        )
        self._fence = AttemptFence(self.store, self.keys, attempt, may_have_ended=True)
        member = Membership(self.store, self._fence, self.keys.component(self.component), record)
        member.hold()
        self._member = member

    def _give_up_if_vain(self, wait_s: float, late: bool) -> None:
        if self._is_over():
            why = f"attempt {self.number} is over, or a newer one was begun"
        elif self._leaving is not None:
            why = f"this job ends: {self._leaving[0]}"
        elif late:
            why = f"the supervisor of attempt {self.number} did not appear in {wait_s:g} s"
        else:
            return
        assert self.plan.job is not None
        raise ClusterError(
            f"component {self.plan.job.components[self.component].name} was not needed: {why}",
            where=f"job {self.job.job_id}; the supervisor is the trial's first job",
            fix=f"see realsys status {self.plan.trial}",
        )

    def _is_over(self) -> bool:
        """Returns whether the attempt has its exit marker, or is not the newest."""
        fresh(self.files.attempt(self.number).root)
        if self.files.attempt(self.number).exit.exists():
            return True
        try:
            attempt = read_key(AttemptRecord, self.store, self.keys.attempt)
        except StoreError:
            return False
        if attempt is None or attempt.number <= self.number:
            return False
        return not is_of_removed_trial(self.files, attempt)

    # ---- serving ----------------------------------------------------------------------------

    def serve(self) -> bool:
        """Follows orders until there is a reason to leave; returns False if it was not ordered to."""
        assert self._member is not None
        try:
            while (ordered := self._turn(self._member)) is None:
                time.sleep(self.poll_s)
        finally:
            self._end_tasks()
            self._report_once(self._member)
            self._member.leave()
        logger.info("component left ordered=%s", ordered)
        return ordered

    def _turn(self, member: Membership) -> bool | None:
        """Checks everything once; returns None to continue, else whether it was ordered to leave."""
        try:
            member.hold()
            self._announce_end(member)
            order = read_key(Order, self.store, self.keys.component_order)
            ordered = self._follow(member, order)
            gone = self._is_supervisor_gone(member)
            self._silent = False
        except StoreError as error:
            self._note_unavailable(error)
            self._supervisor.is_gone(None, now_s=time.monotonic())
            ordered = gone = None
        except StaleAttempt as error:
            logger.error("attempt over reason=%s", error.what)
            return True
        if ordered is not None:
            return ordered
        if gone:
            logger.error("supervisor gone slack_s=%g", self.slack_s)
            return False
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + LOOK_AROUND_S
            if self._is_over():
                logger.info("attempt over number=%d", self.number)
                return True
        if self._leaving is not None:
            _, grace_s, since = self._leaving
            if time.monotonic() > since + grace_s + AFTER_GRACE_S:
                logger.error("no order received before this job's end")
                return False
        self._report_once(member)
        return None

    def _follow(self, member: Membership, order: Order | None) -> bool | None:
        mine = member.record
        if order is None or (order.attempt, order.token) != (mine.attempt, mine.token):
            return None
        if order.action is Action.LEAVE:
            return True
        if not order.is_for(mine):
            logger.error("attempt began with another agent of this component, which has ended")
            return False
        if order.action is Action.START and order.sequence > self._sequence:
            self._end_tasks()
            self._start(order)
        elif order.action is Action.END and order.sequence >= self._sequence:
            self._sequence = order.sequence
            self._end_tasks()
        return None

    def _start(self, order: Order) -> None:
        self._sequence, self._tasks, self._problem = order.sequence, (), None
        try:
            self._tasks = self.steps.start(self.plan.phase(order.phase))
        except Exception as error:  # reported to the supervisor, which decides
            logger.exception("steps not started phase=%s", order.phase)
            self._problem = _problem(error)
        logger.info("phase started phase=%s tasks=%d", order.phase, len(self._tasks))

    def _end_tasks(self) -> None:
        self.steps.end(self._tasks, grace_s=END_GRACE_S)

    def _report_once(self, member: Membership) -> None:
        """Writes the report if it differs from the last one written."""
        if not self._sequence:
            return
        report = report_of(member.record, self._sequence, self._tasks, self._problem)
        if report == self._reported:
            return
        try:
            self._fence.write([Put(self.keys.component_report(self.component), dumps(report))])
        except StoreError as error:
            logger.warning("report not written error=%s", error.what)
            return
        except StaleAttempt as error:  # a newer attempt's agent reports there now
            logger.error("report not written reason=%s", error.what)
        self._reported = report

    def _announce_end(self, member: Membership) -> None:
        if self._leaving is not None and not member.record.leaving:
            why, grace_s, _ = self._leaving
            member.announce_end(why, grace_s=grace_s)
            logger.warning("end announced reason=%s grace_s=%g", why, grace_s)

    def _note_unavailable(self, error: StoreError) -> None:
        if not self._silent:
            logger.warning("store unavailable error=%s", error.what)
        self._silent = True

    def _is_supervisor_gone(self, member: Membership) -> bool:
        found = read_key(ComponentRecord, self.store, self.keys.component(0))
        there = found is not None and found.token == member.record.token
        return self._supervisor.is_gone(there, now_s=time.monotonic())


def _problem(error: Exception) -> Problem:
    if isinstance(error, RealsysError):
        return Problem(what=error.what, where=error.where, fix=error.fix)
    what = f"{type(error).__name__}: {error}"
    return Problem(what=what, where="component agent", fix="see its log")
