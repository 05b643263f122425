"""Reads a trial folder once for the report: its records as everyone does, and the rows of its phases.

A running or killed trial lacks files and may contain damaged ones; what can't be read becomes a note and
the rest is shown. Reads only the trial's folder: no name resolution, no workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realsys.api.errors import NoSuchTrial
from realsys.api.plan import LaunchPlan, PhasePlan
from realsys.observability.evaluations import metric_rows
from realsys.observability.events import Event, parse_events
from realsys.observability.jsonl import Jsonl, parse_jsonl
from realsys.observability.metric_catalogue import with_current_names
from realsys.observability.report.attempt_outcomes import duration_s, first_failure, state_of
from realsys.trial.records import (
    ExitMarker,
    Failure,
    PhaseFiles,
    PredictionRecord,
    TrialFiles,
    TrialRecord,
)
from realsys.trial.trial_reader import MAX_ROWS_BYTES, Attempt, TrialReader, check_regular
from realsys.trial.trial_state import State


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
    state: State
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
    reader = TrialReader(files, wording=str)
    plan = reader.plan if files.plan.exists() else None
    record = reader.record(TrialRecord, files.record)
    attempts = reader.attempts()
    main = _phase("main", trial_dir, reader)
    return TrialReport(
        root=trial_dir,
        trial=_trial_name(trial_dir, plan, record),
        state=state_of(attempts),
        plan=plan,
        record=record,
        attempts=attempts,
        main=main,
        preparing=_preparing(trial_dir, plan, reader),
        failure=first_failure(attempts),
        duration_s=duration_s(attempts, main.events),
        prediction=reader.record(PredictionRecord, files.prediction),
        notes=tuple(reader.notes),
    )


def _trial_name(root: Path, plan: LaunchPlan | None, record: TrialRecord | None) -> str:
    if plan:
        return plan.trial
    if record:
        return f"{record.experiment_name}/{record.trial_name}"
    return f"{root.parent.name}/{root.name}"


def _preparing(root: Path, plan: LaunchPlan | None, reader: TrialReader) -> tuple[Phase, ...]:
    if plan:
        folders = [(p.name, Path(p.folder)) for p in plan.phases[:-1]]
    else:
        prepare = root / "prepare"
        folders = [(p.name, p) for p in sorted(prepare.iterdir())] if prepare.is_dir() else []
    # Of a trial that was moved, the plan still names the old place.
    places = [(n, f if f.exists() else root / "prepare" / f.name) for n, f in folders]
    return tuple(_phase(name, folder, reader) for name, folder in places)


def _phase(name: str, folder: Path, reader: TrialReader) -> Phase:
    files = PhaseFiles(folder)
    return Phase(
        name=name,
        files=files,
        metrics=[with_current_names(row) for row in _rows(files.metrics, reader)],
        events=_events(files.events, reader),
        samples=_rows(files.samples, reader),
        evaluations=_rows(files.evaluations, reader),
    )


def _rows(path: Path, reader: TrialReader) -> list[dict[str, Any]]:
    """Returns the rows that have a step."""
    if not path.exists():
        return []
    content = Jsonl()
    with reader.noted():
        check_regular(path, max_bytes=MAX_ROWS_BYTES)
        content = parse_jsonl(path.read_bytes())
    if content.damaged:
        lines = ", ".join(map(str, content.damaged[:5]))
        reader.note(f"{path}: damaged lines left out: {lines}")
    return [row for row in content.rows if type(row.get("step")) is int]


def _events(path: Path, reader: TrialReader) -> list[Event]:
    """Parses events one by one, so that an invalid row does not hide the others."""
    events: list[Event] = []
    for row in _rows(path, reader):
        with reader.noted():
            events += parse_events([row], where=str(path))
    return events
