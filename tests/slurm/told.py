"""docs/running_on_slurm.md's table of what is told when, as the tests' own expectation.

Each row of that table names a scenario; the test that brings it about looks the row up here, so the page
can't say anything that does not happen. ``…`` in a cell stands for any text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launcher.trials.explain import explain
from launcher.trials.trial_view import TrialView

PAGE = Path(__file__).parent.parent.parent / "docs" / "running_on_slurm.md"
HEADING = "What Slurm did, and what you are told"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    scenario: str
    slurm: str  # Slurm's own word for the job's state
    status: str
    why: str

    def check(self, view: TrialView) -> None:
        """Fails unless ``status`` and ``explain`` of the trial are as the page says."""
        said = f"{view.state.value}: {view.reason}  (job {view.job and view.job.slurm_state})"
        assert view.state.value == self.status, said
        assert fits(self.why, view.reason), said
        if self.slurm and view.job is not None:
            assert fits(self.slurm, view.job.slurm_state), said
        lines = list(explain(view))
        assert lines[0].startswith(f"{view.trial} is {self.status}"), lines


def row(scenario: str) -> Row:
    """The row of a scenario; fails when the page has none."""
    (found,) = [r for r in rows() if r.scenario == scenario]
    return found


def rows() -> list[Row]:
    """The whole table."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {HEADING}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [
        Row(*(cell.strip().strip("`") for cell in line.strip("|").split("|"))) for line in lines
    ]


def fits(pattern: str, text: str) -> bool:
    """Whether ``text`` is ``pattern`` with any text where the pattern has an ellipsis."""
    parts = [re.escape(part) for part in pattern.split("…")]
    return re.fullmatch(".*".join(parts), text, flags=re.DOTALL) is not None
