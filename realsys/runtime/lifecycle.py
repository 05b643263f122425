"""States of a worker and what moves it between them (pure).

``TRANSITIONS`` is the whole truth: ``next_state`` moves a worker by it and refuses everything else,
changing nothing; docs/workers.md prints it. The driver (runner.py) writes each new state into name
resolution. A worker never calls itself lost: only those who miss it may.
"""

from __future__ import annotations

from enum import StrEnum

from realsys.api.errors import InternalError


class WorkerState(StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"  # process up, plan read, not yet found by others
    READY = "ready"  # registered, waits for work
    RUNNING = "running"  # computes
    PAUSED = "paused"  # registered, asked to wait
    DONE = "done"  # said goodbye
    FAILED = "failed"  # said why it died
    LOST = "lost"  # gone without a word, or cut off


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
    """The state after ``event``.

    Raises:
        InternalError: the table has no such move; names both.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InternalError(
            f"a worker that is {state} can't take {event}", where="realsys/runtime/lifecycle.py"
        ) from None
