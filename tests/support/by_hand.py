"""Checks that are run by hand, since they take long or need third parties: what they found, and when.

Each writes a JSON file beside itself, which is committed: ``command``, ``revision`` (the commit that it ran
on), ``at`` (UTC, ISO 8601), ``ok``, and what it measured. tests/unit/house/test_by_hand.py wants one for
each check; every run of the tests says how old they are.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Result:
    """What a check wrote; ``None`` for all but its name where there is no such file."""

    check: str
    command: str | None = None
    revision: str | None = None
    at: datetime.datetime | None = None
    ok: bool | None = None

    def line(self, now: datetime.datetime) -> str:
        """For the end of a run: "acceptance/store_away  ok  44051a07b779, 3 days ago"."""
        if self.at is None or self.revision is None:
            return f"{self.check}  never run: its result is missing"
        days = (now - self.at).days
        age = "today" if days == 0 else f"{days} days ago" if days > 1 else "a day ago"
        return f"{self.check}  {'ok' if self.ok else 'FAILED'}  {self.revision[:12]}, {age}"


def checks() -> list[str]:
    """Names of the checks: a script each in tests/acceptance, and the engines' tier."""
    scripts = sorted(p.stem for p in (TESTS / "acceptance").glob("*.py"))
    return [f"acceptance/{name}" for name in scripts]


def result_of(check: str) -> Result:
    """Reads a check's result."""
    tier, _, name = check.partition("/")
    file = TESTS / tier / "results" / f"{name}.json"
    if not file.exists():
        return Result(check)
    said = json.loads(file.read_text())
    at = datetime.datetime.fromisoformat(said["at"])
    return Result(check, said["command"], said["revision"], at, said["ok"])
