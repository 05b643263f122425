"""What all programs of this folder share: which scenario, what the client saw, and being killed.

The programs run in environments of their own, so this imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

Scenario = Callable[["Report"], None]

SECONDS_TO_LIVE = 0.2  # of a program that is killed, from its first question
OPERATORS: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
}


def calculate(operation: str, a: float, b: float) -> str:
    """The tool that every client offers."""
    operator = OPERATORS.get(operation)
    return str(operator(a, b)) if operator is not None else f"no operation {operation!r}"


CALCULATOR = {
    "type": "object",
    "properties": {
        "operation": {"type": "string", "enum": sorted(OPERATORS)},
        "a": {"type": "number"},
        "b": {"type": "number"},
    },
    "required": ["operation", "a", "b"],
}


class Report:
    """The texts that a client's user gets to see, and its question."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.notes: list[str] = []
        self.reward: float | None = None  # None: by the digits in what was seen
        path = os.environ.get("REALSYS_TASK_FILE")
        task = json.loads(Path(path).read_text()) if path else {}
        self.question = str(task.get("prompt") or "What is 17 and 25?")

    def saw(self, text: str | None) -> None:
        """Notes the text of one answer."""
        self.seen.append(text or "")

    def note(self, text: str) -> None:
        """Notes something that happened, for the reader of the results."""
        self.notes.append(text)

    def write(self) -> None:
        """Writes the report for the test, and a reward for the run, where they are asked for."""
        if path := os.environ.get("AGENT_REPORT_FILE"):
            Path(path).write_text(json.dumps({"seen": self.seen, "notes": self.notes}))
        if path := os.environ.get("REALSYS_REWARD_FILE"):
            digits = sum(c.isdigit() for text in self.seen for c in text)
            reward = min(1.0, digits / 10) if self.reward is None else self.reward
            Path(path).write_text(json.dumps({"reward": reward}))


def run(scenarios: Mapping[str, Scenario]) -> None:
    """Runs the scenario that the command line names.

    ``kill`` is ``plain``, over and over, until SIGKILL comes in the middle of it. It comes to the program
    that makes ``$AGENT_KILLED_FILE``; others do as ``plain`` does.
    """
    name, report = sys.argv[1], Report()
    if name == "kill":
        if _is_first(Path(os.environ["AGENT_KILLED_FILE"])):
            threading.Timer(SECONDS_TO_LIVE, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                scenarios["plain"](report)
        name = "plain"
    scenarios[name](report)
    report.write()


def _is_first(path: Path) -> bool:
    try:
        with path.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True
