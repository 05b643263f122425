"""States of a worker and the transitions between them (pure).

``TRANSITIONS`` is complete: ``next_state`` moves a worker by it and refuses everything else,
changing nothing; docs/workers.md prints it. runner.py writes each new state into name resolution. A
worker never marks itself LOST: only its observers do.
"""

from __future__ import annotations

from enum import StrEnum

from realsys.api.errors import InternalError


class WorkerState(StrEnum):
    """State of a worker."""

    STARTING = "starting"  # process started, plan read, not yet registered
    READY = "ready"  # registered, waits for work
    RUNNING = "running"  # computes
    PAUSED = "paused"  # registered, paused by a command
    DONE = "done"  # deregistered
    FAILED = "failed"  # left a failure record
    LOST = "lost"  # ended without a failure record, or cut off


class WorkerEvent(StrEnum):
    """What can happen to a worker."""

    REGISTERED = "registered"
    STARTED = "started"
    FINISHED_CALL = "finished_call"
    PAUSE = "pause"
    RESUME = "resume"
    EXIT = "exit"
    ERROR = "error"
    VANISHED = "vanished"


S, E = WorkerState, WorkerEvent

TRANSITIONS: dict[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (S.STARTING, E.REGISTERED): S.READY,
    (S.READY, E.STARTED): S.RUNNING,
    (S.RUNNING, E.FINISHED_CALL): S.READY,
    (S.READY, E.PAUSE): S.PAUSED,
    (S.PAUSED, E.RESUME): S.READY,
    (S.READY, E.EXIT): S.DONE,
    (S.PAUSED, E.EXIT): S.DONE,
    (S.STARTING, E.EXIT): S.DONE,
    **{(s, E.ERROR): S.FAILED for s in (S.STARTING, S.READY, S.RUNNING, S.PAUSED)},
    **{(s, E.VANISHED): S.LOST for s in (S.STARTING, S.READY, S.RUNNING, S.PAUSED)},
}

FINAL = frozenset({S.DONE, S.FAILED, S.LOST})


def next_state(state: WorkerState, event: WorkerEvent) -> WorkerState:
    """Returns the state after ``event``.

    Raises:
        InternalError: the table has no such transition; names both.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InternalError(
            f"a worker that is {state} can't take {event}", where="realsys/runtime/lifecycle.py"
        ) from None
