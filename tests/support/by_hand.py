"""Checks that are run by hand, since they take long or need third parties: what they found, and when.

Each writes a JSON file beside itself, which is committed: ``command``, ``revision`` (the commit that it ran
on), ``at`` (UTC, ISO 8601), ``ok``, and what it measured. tests/unit/house/test_by_hand.py wants one for
each check; every run of the tests says how old they are.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
BY_HAND = TESTS / "by_hand"
OUTSIDERS = (
    "calls",
    "endpoint",
    "gyms",
    "mcp",
    "scores",
)  # cases that were written before the mending
AGENTS_CHECKS = (
    *("clients", "environments", "fuzz_histories", "recipes"),
    *(f"outsider_{name}" for name in OUTSIDERS),
)


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
    """Names of the checks in tests/by_hand: all of acceptance/, those of agents/, real servers, planted
    faults, the comparison with peers, and chat templates.
    """
    scripts = sorted(p.stem for p in (BY_HAND / "acceptance").glob("*.py"))
    of_agents = [f"agents/{name}" for name in AGENTS_CHECKS]
    others = ("engines/real_engines", "mutants/mutants", "oracle/oracle")
    names = ("outsider_turns", "tool_calls_read", "tool_chats_learn", "trl_templates")
    templates = [f"templates/{name}" for name in names]
    return [*(f"acceptance/{name}" for name in scripts), *of_agents, *others, *templates]


def result_of(check: str) -> Result:
    """Reads a check's result."""
    tier, _, name = check.partition("/")
    file = BY_HAND / tier / "results" / f"{name}.json"
    if not file.exists():
        return Result(check)
    said = json.loads(file.read_text())
    at = datetime.datetime.fromisoformat(said["at"])
    return Result(check, said["command"], said["revision"], at, said["ok"])


class HandCheck:
    """A check that begins now, of the code as it is now.

    Args:
        script: its file.
    """

    def __init__(self, script: str) -> None:
        self._script = Path(script).resolve()
        self._began_s = time.time()
        self.revision = _git("rev-parse", "HEAD")
        self.changed = bool(_git("status", "--porcelain", "--untracked-files=no"))

    def write(self, what: str, problems: Sequence[str], *, args: str = "", **found: Any) -> int:
        """Writes its result, and says where; returns the exit status, 1 where there are problems."""
        name = self._script.relative_to(TESTS.parent)
        result = {
            "what": what,
            "command": f"python {name} {args}".rstrip(),
            "revision": self.revision,
            "changed": self.changed,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began_s)),
            "minutes": round((time.time() - self._began_s) / 60, 1),
            "ok": not problems,
            "problems": list(problems),
            **found,
        }
        file = self._script.parent / "results" / f"{self._script.stem}.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        sys.stdout.write("\n".join([*(problems or ["all held"]), str(file)]) + "\n")
        return 1 if problems else 0


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=TESTS, capture_output=True, text=True, check=True)
    return done.stdout.strip()
