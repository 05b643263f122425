"""Decides what a failed try of an episode means: played again, scored as failed, or given up (pure).

An episode that fails costs itself. It is played again alone, after WAITS_S, and each try has seeds of its
own. What a try failed for (``TryFault``)::

    FAILED           agent, environment or machine   ─▶ played again; in the end the ticket is given up
    SERVERS, AWAY    what it needed did not answer   ─▶ the same; never the agent's lesson
    DOUBTFUL         maybe by the policy's doing     ─▶ played again once, then ``failed_reward``
    UNSCORED         its reward is not a number      ─▶ played again once, then the ticket is unscored

While nothing succeeds (the master says so), failed tries of the first three don't count, and the waits stay
at the longest: the run waits, and the master decides for how long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from realsys.api.agent import DoubtfulEnd
from realsys.api.errors import (
    RemoteError,
    RewardError,
    StoreError,
    WaitTimeout,
    encodable,
)
from realsys.runtime.failures import what_of
from realsys.transport.rollout_messages import OUTAGES, EpisodeTry, TryFault

WAITS_S = (1.0, 4.0, 16.0, 64.0)  # before the tries of an episode after its first
_SHOWN = 300  # characters of a reason in a report


_MOST_TWICE = (TryFault.DOUBTFUL, TryFault.UNSCORED)


def fault_of(error: Exception, *, servers_trouble: str = "") -> TryFault:
    """Returns what a try that raised ``error`` failed for.

    Args:
        servers_trouble: why the policy did not answer in it; empty: it did.
    """
    if servers_trouble:
        return TryFault.SERVERS
    if isinstance(error, DoubtfulEnd):
        return TryFault.DOUBTFUL
    if isinstance(error, RewardError):
        return TryFault.UNSCORED
    away = isinstance(error, WaitTimeout | RemoteError | StoreError | OSError)
    return TryFault.AWAY if away else TryFault.FAILED


def first_line(error: Exception) -> str:
    """Returns what an error says, in a line."""
    return what_of(error).partition("\n")[0][:500]


@dataclass(eq=False, kw_only=True)
class EpisodeChances:
    """The tries of one episode.

    Attributes:
        failures: tries that failed, all in a row.
    """

    waits_s: Sequence[float]
    failures: int = 0
    _counted: int = 0
    _last: TryFault | None = None
    _faults: Counter[TryFault] = field(default_factory=Counter)

    @property
    def is_doubtful(self) -> bool:
        """True if a try ended as by the policy's doing: the next that does so is scored as failed."""
        return self._faults[TryFault.DOUBTFUL] > 0

    def begins_outage(self, fault: TryFault) -> bool:
        """True if a try failed as in an outage, and the one before did not."""
        return fault in OUTAGES and self._last not in OUTAGES

    def wait_s(self, fault: TryFault, *, nothing_succeeds: bool = False) -> float | None:
        """Counts a failed try; returns how long to wait before the next, None if none follows."""
        self.failures += 1
        self._last = fault
        self._faults[fault] += 1
        if (
            not self.waits_s
        ):  # an evaluation: a question whose answers kill the agent has a score, too
            is_first = fault is TryFault.DOUBTFUL and self._faults[fault] == 1
            return 0.0 if is_first else None
        if fault in _MOST_TWICE:
            return self.waits_s[0] if self._faults[fault] == 1 else None
        if nothing_succeeds:
            self._counted = 0  # those that counted may have been the beginning of the same outage
            return self.waits_s[min(self.failures, len(self.waits_s)) - 1]
        self._counted += 1
        return self.waits_s[self._counted - 1] if self._counted <= len(self.waits_s) else None


@dataclass(eq=False, kw_only=True)
class EpisodeTries:
    """All tries of a worker's episodes, and what the master is to hear of them.

    Attributes:
        waits_s: before the tries of an episode after its first; none: it has one, and another at once if
            that ended in doubt.
        nothing_succeeds: at any worker, as the master has said last.
    """

    waits_s: Sequence[float] = WAITS_S
    nothing_succeeds: bool = False
    _ended: list[tuple[float, EpisodeTry]] = field(default_factory=list)

    def episode(self) -> EpisodeChances:
        """Begins an episode."""
        return EpisodeChances(waits_s=self.waits_s)

    def succeeded(self, id: str, *, began_s: float) -> None:
        """Notes a try that got a score."""
        self._ended.append((began_s, EpisodeTry(id=id, ago_s=0.0)))

    def failed(self, id: str, *, first_s: float, failures: int, fault: TryFault, why: str) -> None:
        """Notes a try that failed, the ``failures``-th of its episode. ``first_s``: the first one did."""
        outcome = EpisodeTry(
            id=id,
            ago_s=0.0,
            failures=failures,
            fault=fault,
            why=encodable(why)[:_SHOWN],
        )
        self._ended.append((first_s, outcome))

    def report(self, *, now_s: float) -> tuple[EpisodeTry, ...]:
        """Returns what ended since the last report."""
        ended, self._ended = self._ended, []
        return tuple(
            structs.replace(outcome, ago_s=max(0.0, now_s - at_s)) for at_s, outcome in ended
        )
