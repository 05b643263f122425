"""Which workers of a live run are started, let go and killed, so that it becomes what is wanted (pure).

What is wanted is realsys/worker/live_scaling.py's value; what follows from it is done in worker_scaling.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from realsys.worker.live_scaling import Scaling, index_of, is_scaled


@dataclass(frozen=True, kw_only=True)
class Moves:
    """What is to be done now, by workers' names."""

    start: tuple[tuple[str, str], ...] = ()  # each with the one that it is like
    let_go: tuple[str, ...] = ()


def moves(wanted: Scaling, *, known: Set[str], leaving: Set[str], failed: Set[str]) -> Moves:
    """Nothing happens twice: a worker that was started, let go or could not be started stays so.

    Args:
        known: workers that were started in this phase, by the plan or later.
        leaving: those of which we know that they are to go, or that have gone.
        failed: added ones that could not be started.
    """
    added = {w: like for w, like in wanted.added.items() if is_scaled(w) and like in known}
    return Moves(
        start=tuple(
            (worker, like)
            for worker, like in added.items()
            if worker not in known | failed and worker not in wanted.drained
        ),
        let_go=tuple(
            worker
            for worker in wanted.drained
            if worker not in leaving and (worker in known or worker in added)
        ),
    )


def partners(worker: str, added: Mapping[str, str], *, are_makers: bool) -> tuple[str, ...]:
    """``worker`` with those that are of no use without it: of a maker that was added, both."""
    if not are_makers:
        return (worker,)
    return tuple(w for w in added if index_of(w) == index_of(worker))
