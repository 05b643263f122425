"""Messages between the jobs of a trial whose groups are in several of them (layout split).

Records of three keys, and the decisions based on them (pure). The supervisor is component 0; an agent
(component_agent.py) represents it in each other job. Every record repeats the attempt's number and token,
so that records of an older incarnation are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from realsys.api.errors import ClusterError
from realsys.api.plan import JobPlan
from realsys.supervisor.steps.steps import StepTask
from realsys.trial.records import AttemptRecord

MAX_REPORTED = 1000  # ends reported individually, so that a report stays far below a value's limit


@dataclass(frozen=True, kw_only=True)
class ComponentRecord:
    """Key ``component/<i>``, under a lease: this job is running.

    Attributes:
        agent: random, of this process: a job restarted by Slurm has another one.
        nodes: hostlist.
        leaving: why the job is about to end, else "".
        leaving_grace_s: time left from then on.
    """

    index: int
    agent: str
    job_id: str
    host: str
    nodes: str
    attempt: int
    token: str
    leaving: str = ""
    leaving_grace_s: float = 0.0


class Action(StrEnum):
    """What the supervisor orders."""

    START = "start"  # the phase's steps
    END = "end"  # what still runs of them
    LEAVE = "leave"  # end them, and the job


@dataclass(frozen=True, kw_only=True)
class Order:
    """Key ``component_order``: the newest order replaces the one before.

    Attributes:
        sequence: number of the phase within this attempt, from 1; END refers to that phase.
        agents: ``ComponentRecord.agent`` of the attempt's initial agents, by component.
    """

    attempt: int
    token: str
    sequence: int
    action: Action
    phase: str = ""
    agents: Mapping[str, str] = field(default_factory=dict)

    def is_for(self, record: ComponentRecord) -> bool:
        """Returns False for another attempt's order, and for one given before ``record``'s agent
        registered."""
        same = (self.attempt, self.token) == (record.attempt, record.token)
        return same and self.agents.get(str(record.index), record.agent) == record.agent


@dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """How a task of another component ended."""

    returncode: int
    host: str = ""
    pid: int = 0
    ended_at: float | None = None
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why a component could not start its steps."""

    what: str
    where: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Key ``component_report/<i>``: state of the component's tasks of a phase.

    Attributes:
        sequence: the order's.
        ended: worker → its end; only of those that ``report_of`` selects.
        rest: return code of all other tasks; None while one of them runs.
    """

    attempt: int
    token: str
    agent: str
    component: int
    sequence: int
    ended: Mapping[str, TaskEnd] = field(default_factory=dict)
    rest: int | None = None
    problem: Problem | None = None

    def end_of(self, worker: str) -> TaskEnd | None:
        """Returns how ``worker`` ended; None while it runs."""
        if worker in self.ended:
            return self.ended[worker]
        return None if self.rest is None else TaskEnd(returncode=self.rest)


def report_of(
    record: ComponentRecord,
    sequence: int,
    tasks: Sequence[StepTask],
    problem: Problem | None = None,
    *,
    most: int = MAX_REPORTED,
) -> Report:
    """Builds the report on ``tasks``.

    Failures come first. With more tasks than ``most``, successful ones are reported only by ``rest``,
    once all have ended; a failure beyond ``most`` gives ``rest`` its code.
    """
    codes = [(task, task.poll()) for task in tasks]
    bad = [(t, code) for t, code in codes if code]
    good = [(t, code) for t, code in codes if code == 0 and len(tasks) <= most]
    bad.sort(key=lambda item: item[0].ended_at or 0.0)
    reported = (bad + good)[:most]
    unreported = bad[most:]
    over = all(code is not None for _, code in codes)
    return Report(
        attempt=record.attempt,
        token=record.token,
        agent=record.agent,
        component=record.index,
        sequence=sequence,
        ended={t.worker: _end(t, code) for t, code in reported if code is not None},
        rest=(unreported[0][1] if unreported else 0) if over else None,
        problem=problem,
    )


def _end(task: StepTask, code: int) -> TaskEnd:
    return TaskEnd(
        returncode=code, host=task.host, pid=task.pid, ended_at=task.ended_at, hint=task.hint
    )


def is_joinable(
    attempt: AttemptRecord | None, supervisor: ComponentRecord | None, *, number: int
) -> bool:
    """Returns whether attempt ``number`` exists and its supervisor is registered."""
    if attempt is None or supervisor is None or attempt.number != number:
        return False
    return (supervisor.attempt, supervisor.token) == (attempt.number, attempt.token)


@dataclass
class Presence:
    """Distinguishes a key that is gone for good from a temporary gap.

    A lease that its holder lost and reacquired leaves a gap, and an unavailable store is no evidence:
    only answers count.
    """

    slack_s: float
    _absent_since: float | None = None

    def is_gone(self, there: bool | None, *, now_s: float) -> bool:
        """Returns whether it has been missing for longer than ``slack_s``. ``there`` is None for no
        answer."""
        if there is not False:
            self._absent_since = None
            return False
        if self._absent_since is None:
            self._absent_since = now_s
        return now_s - self._absent_since > self.slack_s


def named(job: JobPlan, index: int, job_id: str) -> str:
    """Returns ``job 123 of component rollout``."""
    return f"job {job_id or '(unknown)'} of component {job.components[index].name}"


def not_there(
    job: JobPlan,
    missing: Iterable[int],
    job_ids: Sequence[str],
    *,
    waited_s: float,
    trial: str,
) -> ClusterError:
    """Returns the error for components that have not started by the deadline.

    Args:
        job_ids: of all components, in order; empty if unknown.
    """
    missing_jobs, types = [], []
    for index in missing:
        job_id = job_ids[index] if index < len(job_ids) else ""
        kinds = ", ".join(kind.value for kind in job.components[index].worker_types)
        missing_jobs.append(f"{named(job, index, job_id)} ({kinds})")
        types.append(job_id)
    asked = ",".join(filter(None, types))
    look = f"see why they wait (squeue --start -j {asked}), then " if asked else ""
    return ClusterError(
        f"not all jobs of the trial were running after {waited_s:g} s; missing: {'; '.join(missing_jobs)}",
        where=f"{trial}, layout split, {len(job.components)} jobs that start apart",
        fix=f"{look}`realsys resume {trial}`; or raise slurm.rendezvous_seconds in the cluster spec, "
        "or use layout het, whose parts start together",
    )
