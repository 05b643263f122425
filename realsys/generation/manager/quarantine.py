"""Health state of servers: which are sick, why, and when each is checked next (pure).

For fleet.py. A server is sick after a failed check or ``Rules.failures`` consecutive failed requests; it is
checked again after growing pauses, and returns when a check passes (manager.py makes the checks).
Times are seconds of one monotonic clock, passed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Condition(StrEnum):
    """Health state of a server."""

    JOINING = "joining"  # registered, not checked yet
    WELL = "well"
    SICK = "sick"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Thresholds and intervals of health checks.

    Attributes:
        failures: consecutive failed requests after which a server is sick.
        within_s: older failures are ignored.
        check_every_s: interval between checks of a well server.
        first_pause_s, max_pause_s: interval between checks of a sick server; doubles from first to last.
    """

    failures: int = 3
    within_s: float = 60.0
    check_every_s: float = 5.0
    first_pause_s: float = 1.0
    max_pause_s: float = 60.0


@dataclass(kw_only=True)
class _Case:
    condition: Condition
    why: str
    due_s: float
    pause_s: float
    well_since_s: float
    breaks_s: list[float]


class Quarantine:
    """Condition of each server, by index."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self._cases: dict[int, _Case] = {}

    def joined(self, server: int, *, now_s: float) -> None:
        """Adds a server that has registered or restarted: no history, check due at once."""
        self._cases[server] = _Case(
            condition=Condition.JOINING,
            why="was not checked yet",
            due_s=now_s,
            pause_s=self.rules.first_pause_s,
            well_since_s=now_s,
            breaks_s=[],
        )

    def left(self, server: int) -> None:
        """Removes a server."""
        self._cases.pop(server, None)

    def request_broke(self, server: int, why: str, *, now_s: float) -> bool:
        """Records a failed request and makes a check due at once. Returns True if the server became
        sick.
        """
        case = self._cases[server]
        if case.condition is not Condition.WELL:
            return False
        case.due_s = now_s
        case.breaks_s = [s for s in case.breaks_s if now_s - s <= self.rules.within_s] + [now_s]
        if len(case.breaks_s) < self.rules.failures:
            return False
        return self.failed(server, f"{len(case.breaks_s)} requests broke: {why}", now_s=now_s)

    def request_ended(self, server: int) -> None:
        """Records a successful request, which clears earlier failures."""
        self._cases[server].breaks_s = []

    def failed(self, server: int, why: str, *, now_s: float) -> bool:
        """Records a failed check or update: the server is sick. Returns True if it was not before."""
        case, rules = self._cases[server], self.rules
        newly = case.condition is not Condition.SICK
        was_well_s = now_s - case.well_since_s if case.condition is Condition.WELL else 0.0
        if was_well_s >= rules.max_pause_s:
            case.pause_s = rules.first_pause_s  # otherwise it is unstable: the pauses keep growing
        case.condition, case.why, case.breaks_s = Condition.SICK, why, []
        case.due_s = now_s + case.pause_s
        case.pause_s = min(2 * case.pause_s, rules.max_pause_s)
        return newly

    def passed(self, server: int, *, now_s: float) -> Condition:
        """Records a passed check: the server is well. Returns its earlier condition."""
        case = self._cases[server]
        former, case.condition = case.condition, Condition.WELL
        if former is not Condition.WELL:
            case.well_since_s, case.breaks_s, case.why = now_s, [], ""
        case.due_s = now_s + self.rules.check_every_s
        return former

    def schedule_check(self, server: int, when_s: float) -> None:
        """Schedules the next check of a server."""
        self._cases[server].due_s = when_s

    def due(self, *, now_s: float) -> list[int]:
        """Lists servers to check now, longest overdue first."""
        late = [server for server, case in self._cases.items() if case.due_s <= now_s]
        return sorted(late, key=lambda server: self._cases[server].due_s)

    def next_due_s(self) -> float | None:
        """Time of the next due check; None if there are no servers."""
        return min((case.due_s for case in self._cases.values()), default=None)

    def condition(self, server: int) -> Condition:
        """Returns a server's condition."""
        return self._cases[server].condition

    @property
    def sick(self) -> Mapping[int, str]:
        """Reasons of servers that get no requests (also new ones), by server."""
        return {i: c.why for i, c in self._cases.items() if c.condition is not Condition.WELL}
