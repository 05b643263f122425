"""Which servers are sick, why, and when each is looked at next (pure).

For fleet.py. A server is sick when a check of it fails or ``Rules.failures`` requests in a row broke on it;
it is looked at again after pauses that grow, and comes back when a check passes (what a check asks for is
server_checks.py's business). Times are seconds of one monotonic clock, handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Condition(StrEnum):
    """How a server is."""

    JOINING = "joining"  # registered, not checked yet
    WELL = "well"
    SICK = "sick"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When to look and when to give up.

    Attributes:
        failures: requests that break, without one between them that ends well, before it is sick.
        within_s: older breaks count no more.
        check_every_s: a well server is looked at this often.
        first_pause_s, max_pause_s: before a sick one is looked at again; doubles from first to last.
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
    """The condition of each server, by index."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self._cases: dict[int, _Case] = {}

    def joined(self, server: int, *, now_s: float) -> None:
        """It has registered, or registered anew: to be checked at once, with no past."""
        self._cases[server] = _Case(
            condition=Condition.JOINING,
            why="was not checked yet",
            due_s=now_s,
            pause_s=self.rules.first_pause_s,
            well_since_s=now_s,
            breaks_s=[],
        )

    def left(self, server: int) -> None:
        """Nothing is known of it any more."""
        self._cases.pop(server, None)

    def request_broke(self, server: int, why: str, *, now_s: float) -> bool:
        """A request found it not answering, and it is looked at at once. True: that makes it sick."""
        case = self._cases[server]
        if case.condition is not Condition.WELL:
            return False
        case.due_s = now_s
        case.breaks_s = [s for s in case.breaks_s if now_s - s <= self.rules.within_s] + [now_s]
        if len(case.breaks_s) < self.rules.failures:
            return False
        return self.failed(server, f"{len(case.breaks_s)} requests broke: {why}", now_s=now_s)

    def request_ended(self, server: int) -> None:
        """A request ended well there: breaks before it were passing troubles."""
        self._cases[server].breaks_s = []

    def failed(self, server: int, why: str, *, now_s: float) -> bool:
        """A check of it or an update failed: it is sick. True if it was not."""
        case, rules = self._cases[server], self.rules
        newly = case.condition is not Condition.SICK
        was_well_s = now_s - case.well_since_s if case.condition is Condition.WELL else 0.0
        if was_well_s >= rules.max_pause_s:
            case.pause_s = rules.first_pause_s  # else it comes and goes: the pauses go on growing
        case.condition, case.why, case.breaks_s = Condition.SICK, why, []
        case.due_s = now_s + case.pause_s
        case.pause_s = min(2 * case.pause_s, rules.max_pause_s)
        return newly

    def passed(self, server: int, *, now_s: float) -> Condition:
        """A check passed: it is well. Returns what it was."""
        case = self._cases[server]
        former, case.condition = case.condition, Condition.WELL
        if former is not Condition.WELL:
            case.well_since_s, case.breaks_s, case.why = now_s, [], ""
        case.due_s = now_s + self.rules.check_every_s
        return former

    def look_at(self, server: int, when_s: float) -> None:
        """It is due then, unless something happens to it before."""
        self._cases[server].due_s = when_s

    def due(self, *, now_s: float) -> list[int]:
        """Servers to be checked now, longest overdue first."""
        late = [server for server, case in self._cases.items() if case.due_s <= now_s]
        return sorted(late, key=lambda server: self._cases[server].due_s)

    def next_due_s(self) -> float | None:
        """When the next one is due; None: there are no servers."""
        return min((case.due_s for case in self._cases.values()), default=None)

    def condition(self, server: int) -> Condition:
        """How it is."""
        return self._cases[server].condition

    @property
    def sick(self) -> Mapping[int, str]:
        """Server → why, of those that take nothing (also those that have just come)."""
        return {i: c.why for i, c in self._cases.items() if c.condition is not Condition.WELL}
