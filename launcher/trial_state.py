"""The state of a trial, decided from facts (pure).

For everything that asks whether a trial runs. ``decide`` is total: what can't be known is UNKNOWN, and
COMPLETED comes from the exit marker alone. Who has which facts is launcher/trial_view.py's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from launcher.liveness import Liveness
from realsys.api.trial import Result


class State(StrEnum):
    """Where a trial is in its life."""

    PLANNED = "planned"  # written down, never started
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"  # the supervisor is gone without an exit marker
    UNKNOWN = "unknown"

    @classmethod
    def live(cls) -> frozenset[State]:
        """States in which processes run."""
        return frozenset({cls.STARTING, cls.RUNNING, cls.STOPPING})

    @classmethod
    def final(cls) -> frozenset[State]:
        """States that only a resume ends."""
        return frozenset({cls.COMPLETED, cls.STOPPED, cls.FAILED, cls.LOST})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that the state depends on.

    Attributes:
        planned: there is a plan that can be read.
        pending: the process of a hand-over to submitit that has taken no attempt yet.
        supervisor: of the last attempt.
        result: of the last attempt's exit marker.
        stop_requested: for the last attempt.
        leases: some worker of the last attempt still holds its lease.
        working: the last attempt has shown progress.
    """

    planned: bool
    pending: Liveness
    supervisor: Liveness
    result: Result | None
    stop_requested: bool
    leases: bool
    working: bool


_RESULTS = {
    Result.COMPLETED: State.COMPLETED,
    Result.STOPPED: State.STOPPED,
    Result.FAILED: State.FAILED,
}


def decide(facts: Facts) -> State:
    """The state that the facts mean. Total."""
    if facts.pending is not Liveness.NONE:
        return {
            Liveness.ALIVE: State.STARTING,
            Liveness.DEAD: State.LOST,
            Liveness.UNKNOWN: State.UNKNOWN,
        }[facts.pending]
    if facts.supervisor is Liveness.NONE:
        return State.PLANNED if facts.planned else State.UNKNOWN
    if facts.result is not None:
        return _RESULTS[facts.result]
    if facts.supervisor is Liveness.DEAD:
        return State.LOST
    if facts.supervisor is Liveness.UNKNOWN and not facts.leases:
        return State.UNKNOWN
    if facts.stop_requested:
        return State.STOPPING
    return State.RUNNING if facts.working else State.STARTING
