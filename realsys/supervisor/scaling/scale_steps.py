"""Decides which workers of a live run to start and to let go, so that it becomes what is requested
(pure).

realsys/worker/live_scaling.py has the requested value; worker_scaling.py acts on the decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from realsys.worker.live_scaling import Scaling, index_of, is_scaled


@dataclass(frozen=True, kw_only=True)
class Moves:
    """What to do now, by workers' names."""

    start: tuple[tuple[str, str], ...] = ()  # each with the planned one of the same configuration
    let_go: tuple[str, ...] = ()


def moves(wanted: Scaling, *, known: Set[str], leaving: Set[str], failed: Set[str]) -> Moves:
    """Returns what is due; nothing is repeated for a worker that was started, let go or failed to start.

    Args:
        known: workers that were started in this phase, planned or added.
        leaving: workers that are known to drain, or that have left.
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
    """Returns ``worker`` with the workers that are useless without it: of an added rollout group, both."""
    if not are_makers:
        return (worker,)
    return tuple(w for w in added if index_of(w) == index_of(worker))
