"""Decides the state of a trial from facts (pure).

For all code that checks whether a trial runs. ``decide`` is total: what can't be determined is UNKNOWN,
and COMPLETED results only from the exit marker. launcher/trials/trial_view.py derives the facts from the
records.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from realsys.trial.liveness import Liveness
from realsys.trial.records import Result


class JobState(StrEnum):
    """A job's state, in terms of what its user has to do."""

    WAITING = "waiting"  # Slurm will start it, or restart it, without intervention
    HELD = "held"  # must be released by a person
    RUNNING = "running"
    FINISHING = "finishing"  # is ending; nodes are not free yet
    PAUSED = "paused"
    INFRA_FAILURE = "infra_failure"  # ended by the site, not by its program: worth another try
    FAILED = "failed"
    STOPPED = "stopped"  # cancelled
    DONE = "done"  # exit 0; whether the run succeeded is in the trial's folder
    GONE = "gone"  # Slurm no longer knows it; how it ended is unknown
    UNKNOWN = "unknown"  # Slurm could not be queried, or printed a word that is not in the table

    @property
    def has_ended(self) -> bool:
        """Whether the job has stopped and Slurm will not start it again."""
        return self in _ENDED


_ENDED = frozenset(
    {
        JobState.INFRA_FAILURE,
        JobState.FAILED,
        JobState.STOPPED,
        JobState.DONE,
        JobState.GONE,
    }
)


class State(StrEnum):
    """The state of a trial."""

    PLANNED = "planned"  # recorded, never started
    QUEUED = "queued"  # in Slurm's queue, for the first time or again
    HELD = "held"  # in Slurm's queue, must be released by a person
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"  # suspended by Slurm
    STOPPING = "stopping"
    # Those of a Result have its values.
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"  # the supervisor ended without an exit marker
    UNKNOWN = "unknown"

    @classmethod
    def live(cls) -> frozenset[State]:
        """States in which processes run, or will run without intervention."""
        return frozenset(
            {cls.QUEUED, cls.HELD, cls.STARTING, cls.RUNNING, cls.PAUSED, cls.STOPPING}
        )

    @classmethod
    def final(cls) -> frozenset[State]:
        """States that only a resume leaves."""
        return frozenset({cls.COMPLETED, cls.STOPPED, cls.FAILED, cls.LOST})


@dataclass(frozen=True, kw_only=True)
class TrialFacts:
    """All facts that determine the state.

    Attributes:
        planned: there is a readable plan.
        pending: the process of a submission that has not taken an attempt yet.
        supervisor: of the last attempt.
        job: on Slurm, the job of the last submission; None for a local run. It replaces ``pending`` and
            ``supervisor``, which then only tell whether there was one.
        requeued: that job was started, or queued, again after the last attempt took it.
        cancelled: that job was cancelled before it took an attempt.
        result: of the last attempt's exit marker.
        stop_requested: for the last attempt.
        leases: some worker of the last attempt still holds its lease.
        working: the last attempt has shown progress.
    """

    planned: bool = False
    pending: Liveness = Liveness.NONE
    supervisor: Liveness
    result: Result | None
    stop_requested: bool = False
    leases: bool = False
    working: bool
    job: JobState | None = None
    requeued: bool = False
    cancelled: bool = False


def decide(facts: TrialFacts) -> State:
    """Decides the state from the facts. Total."""
    return _on_this_machine(facts) if facts.job is None else _on_slurm(facts, facts.job)


_IN_QUEUE = {
    JobState.WAITING: State.QUEUED,
    JobState.HELD: State.HELD,
    JobState.PAUSED: State.PAUSED,
}


def _on_slurm(facts: TrialFacts, job: JobState) -> State:
    attempted = facts.supervisor is not Liveness.NONE
    if facts.pending is not Liveness.NONE or not attempted or facts.requeued:
        return _before_an_attempt(facts, job)
    if facts.result is not None:
        return State(facts.result.value)
    if job in _IN_QUEUE:  # WAITING: requeued without an exit marker, e.g. after a lost node
        return _IN_QUEUE[job]
    if job is JobState.UNKNOWN and not facts.leases:
        return State.UNKNOWN
    # That Slurm has no record is no news of the job while its workers show that they live.
    if job.has_ended and not (job is JobState.GONE and facts.leases):
        return State.LOST
    if facts.stop_requested or job is JobState.FINISHING:
        return State.STOPPING
    return State.RUNNING if facts.working else State.STARTING


def _before_an_attempt(facts: TrialFacts, job: JobState) -> State:
    """Decides the state of a job that has not taken an attempt."""
    if facts.cancelled or job is JobState.STOPPED:
        return State.STOPPED
    if job in _IN_QUEUE:
        return _IN_QUEUE[job]
    if job is JobState.UNKNOWN:
        return State.UNKNOWN
    return State.LOST if job.has_ended else State.STARTING


def _on_this_machine(facts: TrialFacts) -> State:
    if facts.pending is not Liveness.NONE:
        return {
            Liveness.ALIVE: State.STARTING,
            Liveness.DEAD: State.LOST,
            Liveness.UNKNOWN: State.UNKNOWN,
        }[facts.pending]
    if facts.supervisor is Liveness.NONE:
        return State.PLANNED if facts.planned else State.UNKNOWN
    if facts.result is not None:
        return State(facts.result.value)
    if facts.supervisor is Liveness.DEAD:
        return State.LOST
    if facts.supervisor is Liveness.UNKNOWN and not facts.leases:
        return State.UNKNOWN
    if facts.stop_requested:
        return State.STOPPING
    return State.RUNNING if facts.working else State.STARTING
