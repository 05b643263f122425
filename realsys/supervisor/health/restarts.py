"""Whether a worker that ended or hangs is started again by itself, and when (pure).

For the types in INDEPENDENTLY_RESTARTABLE: they hold nothing that another could not make again. A worker
that ends again and again costs a little more time each time, and in the end the trial; one in OPTIONAL is
left down instead. Times are seconds of one monotonic clock. What follows is done in worker_restarts.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from realsys.api.scheduling import INDEPENDENTLY_RESTARTABLE, OPTIONAL, WorkerType
from realsys.runtime.lifecycle import WorkerState
from realsys.supervisor.health.failure_report import is_in_collective, suspects
from realsys.trial.records import WorkerStatus

MAX_RESTARTS = 5
WINDOW_S = 3600.0
FIRST_PAUSE_S = 0.5
RECOVERY_S = (
    600.0  # who waits for a worker that was just started again does not stand still so long
)
COLLECTIVE_S = (
    1800.0  # the collectives' own timeout: so long one rank may wait for another that computes
)


def is_restarted_alone(worker: str) -> bool:
    """Whether ``generation_server/1`` is of a type that is started again by itself."""
    return worker.partition("/")[0] in INDEPENDENTLY_RESTARTABLE


def is_optional(worker: str) -> bool:
    """Whether the trial goes on without ``evaluator/0`` if it can't be started again."""
    return worker.partition("/")[0] in OPTIONAL


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """At most ``max_restarts`` of a worker in any ``window_s``, each after twice the pause before."""

    max_restarts: int = MAX_RESTARTS
    window_s: float = WINDOW_S
    first_pause_s: float = FIRST_PAUSE_S

    def next_start_s(self, past_s: Sequence[float], *, now_s: float) -> float | None:
        """When a worker that ends now is started again; None when it is not.

        Args:
            past_s: when it was started again so far.
        """
        recent = sum(now_s - at_s < self.window_s for at_s in past_s)
        if recent >= self.max_restarts:
            return None
        return now_s + self.first_pause_s * 2.0**recent


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Who stands still: workers that are started again, or others, which end the trial."""

    again: tuple[str, ...] = ()
    fatal: bool = False


def judge_stalls(statuses: Mapping[str, WorkerStatus], *, recovering: Set[str]) -> Stalls:
    """What to do about workers that say that they do not get on.

    Args:
        statuses: of all workers, by name.
        recovering: workers that are being started again or just were: excused is who waits for one of
            them, or for somebody who does.
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
    if all(_waits_for_peers(judged[worker]) for worker in named) and _somebody_gets_on(judged):
        return Stalls()
    if not all(is_restarted_alone(worker) for worker in named):
        return Stalls(fatal=True)
    return Stalls(again=tuple(named))


def _waits_for_peers(status: WorkerStatus) -> bool:
    return 0 < status.stalled_s < COLLECTIVE_S and is_in_collective(status)


def _somebody_gets_on(statuses: Mapping[str, WorkerStatus]) -> bool:
    """Whether some model worker computes: the others may wait in a collective for it."""
    return any(
        worker.startswith(WorkerType.MODEL_WORKER.value)
        and status.state == WorkerState.RUNNING
        and not status.stalled_s
        for worker, status in statuses.items()
    )


def _chain(worker: str, statuses: Mapping[str, WorkerStatus]) -> list[str]:
    """The worker, the one that it waits for, the one that this one waits for, and so on."""
    chain = [worker]
    while (status := statuses.get(chain[-1])) is not None and status.waits_for:
        other = status.waits_for.partition(": ")[0]
        if other in chain:
            break
        chain.append(other)
    return chain
