"""Decides whether and when a worker that ended or hangs is restarted by itself (pure).

For the types in INDEPENDENTLY_RESTARTABLE: another worker can recreate everything they hold. A worker
that ends repeatedly is restarted after increasing pauses, and finally ends the trial, as one does that
refuses its configuration at its first start; one in OPTIONAL stays down instead. Times are seconds of one
monotonic clock. worker_restarts.py acts on the decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from realsys.api.errors import ConfigError, ConfigErrors, UnknownName
from realsys.api.scheduling import INDEPENDENTLY_RESTARTABLE, OPTIONAL, WorkerType
from realsys.runtime.lifecycle import WorkerState
from realsys.supervisor.health.failure_report import is_in_collective, suspects
from realsys.trial.records import WorkerStatus

MAX_RESTARTS = 5
WINDOW_S = 3600.0
FIRST_PAUSE_S = 0.5
RECOVERY_S = 600.0  # how long waiting for a worker that was just restarted is no stall
START_S = 600.0  # of a phase, in which its workers start
# A user has to mend these: another start would end in the same way
REFUSALS = frozenset(error.__name__ for error in (ConfigError, ConfigErrors, UnknownName))
COLLECTIVE_S = (
    1800.0  # the collectives' own timeout: how long a rank may wait for one that computes
)


def is_restarted_alone(worker: str) -> bool:
    """Returns whether ``generation_server/1`` is of an independently restartable type."""
    return worker.partition("/")[0] in INDEPENDENTLY_RESTARTABLE


def is_optional(worker: str) -> bool:
    """Returns whether the trial continues without ``evaluator/0`` if it can't be restarted."""
    return worker.partition("/")[0] in OPTIONAL


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """At most ``max_restarts`` of a worker in any ``window_s``, each after twice the previous pause."""

    max_restarts: int = MAX_RESTARTS
    window_s: float = WINDOW_S
    first_pause_s: float = FIRST_PAUSE_S

    def next_start_s(
        self, past_s: Sequence[float], *, now_s: float, began_s: float = 0.0, kind: str = ""
    ) -> float | None:
        """Returns when a worker that ends now is restarted; None if it is not.

        Args:
            past_s: when it was restarted so far.
            began_s: when the phase began.
            kind: class of the error that ended it. A worker that has run took its configuration before: it
                may refuse it because a file system is away.
        """
        if kind in REFUSALS and not past_s and now_s - began_s < START_S:
            return None
        recent = sum(now_s - at_s < self.window_s for at_s in past_s)
        if recent >= self.max_restarts:
            return None
        return now_s + self.first_pause_s * 2.0**recent


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Stalled workers: those to restart, or ``fatal`` if others hang, which ends the trial."""

    again: tuple[str, ...] = ()
    fatal: bool = False


def judge_stalls(statuses: Mapping[str, WorkerStatus], *, recovering: Set[str]) -> Stalls:
    """Decides what to do about workers that report a stall.

    Args:
        statuses: of all workers, by name.
        recovering: workers that are being restarted or just were: workers that wait for one of them,
            directly or through others, are not counted as stalled.
    """
    judged = {
        worker: replace(status, stalled_s=0.0)
        if recovering and not recovering.isdisjoint(_chain(worker, statuses)[1:])
        else status
        for worker, status in statuses.items()
    }
    if not any(status.stalled_s > 0 for status in judged.values()):
        return Stalls()
    named = suspects(judged)
    if all(_waits_for_peers(judged[worker]) for worker in named) and _any_computes(judged):
        return Stalls()
    if not all(is_restarted_alone(worker) for worker in named):
        return Stalls(fatal=True)
    return Stalls(again=tuple(named))


def _waits_for_peers(status: WorkerStatus) -> bool:
    return 0 < status.stalled_s < COLLECTIVE_S and is_in_collective(status)


def _any_computes(statuses: Mapping[str, WorkerStatus]) -> bool:
    """Returns whether some model worker computes: the others may wait in a collective for it."""
    return any(
        worker.startswith(WorkerType.MODEL_WORKER.value)
        and status.state == WorkerState.RUNNING
        and not status.stalled_s
        for worker, status in statuses.items()
    )


def _chain(worker: str, statuses: Mapping[str, WorkerStatus]) -> list[str]:
    """Returns the worker, the one it waits for, the one that that one waits for, and so on."""
    chain = [worker]
    while (status := statuses.get(chain[-1])) is not None and status.waits_for:
        other = status.waits_for.partition(": ")[0]
        if other in chain:
            break
        chain.append(other)
    return chain
