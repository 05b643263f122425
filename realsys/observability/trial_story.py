"""What a trial folder says about its run: read once, leniently, for the report.

A running or a killed trial lacks files and may hold damaged ones; what can't be read becomes a note
and the rest is told. Reads the trial's folder only: no name resolution, no workers.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from realsys.api.errors import NoSuchTrial, RealsysError
from realsys.api.plan import LaunchPlan, PhasePlan, read_plan
from realsys.api.trial import (
    AttemptFiles,
    AttemptRecord,
    ExitMarker,
    Failure,
    PhaseFiles,
    Result,
    TrialFiles,
    TrialRecord,
    is_alive,
    read_record,
)
from realsys.observability.events import Event, parse_events
from realsys.observability.jsonl import parse_jsonl

T = TypeVar("T")

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
TAIL_LINES = 40


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase's files, read."""

    name: str
    files: PhaseFiles
    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TrialStory:
    """Everything the report tells."""

    root: Path
    trial: str
    outcome: Outcome
    plan: LaunchPlan | None
    record: TrialRecord | None
    attempts: tuple[tuple[AttemptRecord, ExitMarker | None], ...]
    main: Phase
    preparing: tuple[Phase, ...]
    failure: Failure | None
    other_failures: tuple[Failure, ...]
    duration_s: float | None
    notes: tuple[str, ...]

    @property
    def main_plan(self) -> PhasePlan | None:
        """The plan of the trial's own phase."""
        return self.plan.phases[-1] if self.plan and self.plan.phases else None

    @property
    def marker(self) -> ExitMarker | None:
        """The newest attempt's exit marker."""
        return self.attempts[-1][1] if self.attempts else None


def read_story(trial_dir: Path) -> TrialStory:
    """Reads a trial folder.

    Raises:
        NoSuchTrial: the folder is not there, or holds nothing of a trial.
    """
    files = TrialFiles(trial_dir)
    main_files = PhaseFiles(trial_dir)
    if not any(p.exists() for p in (files.plan, files.record, files.attempts, main_files.metrics)):
        raise NoSuchTrial(
            "this folder holds no trial",
            where=str(trial_dir),
            fix="give <file root>/runs/<user>/<experiment>/<trial>; `realsys ls` names them",
        )
    reader = _Reader()
    plan = reader.attempt(lambda: read_plan(files.plan)) if files.plan.exists() else None
    record = reader.attempt(lambda: read_record(TrialRecord, files.record))
    attempts = _attempts(files, reader)
    main = reader.phase("main", trial_dir)
    failure, others = _failures(files, attempts, reader)
    return TrialStory(
        root=trial_dir,
        trial=_trial_name(trial_dir, plan, record),
        outcome=_outcome(attempts),
        plan=plan,
        record=record,
        attempts=attempts,
        main=main,
        preparing=_preparing(trial_dir, plan, reader),
        failure=failure,
        other_failures=others,
        duration_s=_duration(attempts, main),
        notes=tuple(dict.fromkeys(reader.notes)),
    )


def _trial_name(root: Path, plan: LaunchPlan | None, record: TrialRecord | None) -> str:
    if plan:
        return plan.trial
    if record:
        return f"{record.experiment_name}/{record.trial_name}"
    return f"{root.parent.name}/{root.name}"


def _preparing(root: Path, plan: LaunchPlan | None, reader: _Reader) -> tuple[Phase, ...]:
    if plan:
        folders = [(p.name, Path(p.folder)) for p in plan.phases[:-1]]
    else:
        prepare = root / "prepare"
        folders = [(p.name, p) for p in sorted(prepare.iterdir())] if prepare.is_dir() else []
    # A folder that was moved with its trial is found beside it.
    places = [(n, f if f.exists() else root / "prepare" / f.name) for n, f in folders]
    return tuple(reader.phase(name, folder) for name, folder in places)


