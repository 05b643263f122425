"""Reads a trial folder once, leniently, for the report.

A running or killed trial lacks files and may contain damaged ones; what can't be read becomes a note and
the rest is shown. Reads only the trial's folder: no name resolution, no workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from realsys.api.errors import NoSuchTrial, RealsysError
from realsys.api.plan import LaunchPlan, PhasePlan, read_plan
from realsys.observability.evaluations import metric_rows
from realsys.observability.events import Event, parse_events
from realsys.observability.jsonl import parse_jsonl
from realsys.observability.report.attempt_outcomes import (
    Attempt,
    AttemptOutcome,
    duration_s,
    first_failure,
    outcome,
)
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    ExitMarker,
    Failure,
    PhaseFiles,
    PredictionRecord,
    TrialFiles,
    TrialRecord,
    read_record,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase's files, read."""

    name: str
    files: PhaseFiles
    metrics: list[dict[str, Any]]
    events: list[Event]
    samples: list[dict[str, Any]]
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # of saved checkpoints

    @property
    def all_metrics(self) -> list[dict[str, Any]]:
        """Returns the master's rows and those of evaluations."""
        return [*self.metrics, *metric_rows(self.evaluations)]


@dataclass(frozen=True, kw_only=True)
class TrialReport:
    """Everything that the report shows."""

    root: Path
    trial: str
    outcome: AttemptOutcome
    plan: LaunchPlan | None
    record: TrialRecord | None
    attempts: tuple[Attempt, ...]
    main: Phase
    preparing: tuple[Phase, ...]
    failure: Failure | None
    duration_s: float | None
    notes: tuple[str, ...]
    prediction: PredictionRecord | None = None

    @property
    def main_plan(self) -> PhasePlan | None:
        """The plan of the main phase."""
        return self.plan.phases[-1] if self.plan and self.plan.phases else None

    @property
    def marker(self) -> ExitMarker | None:
        """The newest attempt's exit marker."""
        return self.attempts[-1].marker if self.attempts else None


def read_trial_report(trial_dir: Path) -> TrialReport:
    """Reads a trial folder.

    Raises:
        NoSuchTrial: the folder is missing, or contains no trial.
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
    plan = reader.try_to(lambda: read_plan(files.plan)) if files.plan.exists() else None
    record = reader.try_to(lambda: read_record(TrialRecord, files.record))
    read = [reader.attempt(a) for a in files.all_attempts()]
    attempts = tuple(a for a in read if a is not None)
    main = reader.phase("main", trial_dir)
    return TrialReport(
        root=trial_dir,
        trial=_trial_name(trial_dir, plan, record),
        outcome=outcome(attempts),
        plan=plan,
        record=record,
        attempts=attempts,
        main=main,
        preparing=_preparing(trial_dir, plan, reader),
        failure=first_failure(files, attempts),
        duration_s=duration_s(attempts, main.events),
        prediction=reader.try_to(lambda: read_record(PredictionRecord, files.prediction)),
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
    # Of a trial that was moved, the plan still names the old place.
    places = [(n, f if f.exists() else root / "prepare" / f.name) for n, f in folders]
    return tuple(reader.phase(name, folder) for name, folder in places)


class _Reader:
    """Reads what it can and collects a note for each failure."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def try_to(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (OSError, ValueError, TypeError, RealsysError) as error:
            self.notes.append(str(error))
            return None

    def attempt(self, files: AttemptFiles) -> Attempt | None:
        record = self.try_to(lambda: read_record(AttemptRecord, files.record))
        marker = self.try_to(lambda: read_record(ExitMarker, files.exit))
        return Attempt(record, marker) if record else None

    def phase(self, name: str, folder: Path) -> Phase:
        files = PhaseFiles(folder)
        return Phase(
            name=name,
            files=files,
            metrics=self._rows(files.metrics),
            events=self._events(files.events),
            samples=self._rows(files.samples),
            evaluations=self._rows(files.evaluations),
        )

    def _rows(self, path: Path) -> list[dict[str, Any]]:
        """Returns the rows that have a step."""
        data = self.try_to(path.read_bytes) if path.exists() else None
        content = parse_jsonl(data or b"")
        if content.damaged:
            lines = ", ".join(map(str, content.damaged[:5]))
            self.notes.append(f"{path}: damaged lines left out: {lines}")
        return [row for row in content.rows if type(row.get("step")) is int]

    def _events(self, path: Path) -> list[Event]:
        """Parses events one by one, so that an invalid row does not hide the others."""
        events: list[Event] = []
        for row in self._rows(path):
            try:
                events += parse_events([row], where=str(path))
            except RealsysError as error:
                self.notes.append(str(error))
        return events
