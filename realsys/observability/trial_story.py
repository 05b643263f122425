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


class Outcome(StrEnum):
    """How the trial stands."""

    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"  # its supervisor is gone and left no exit marker
    UNKNOWN = "unknown"  # its supervisor is on another host, or no attempt began


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


class _Reader:
    """Reads what it can and collects a note for what it can't."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def attempt(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (OSError, ValueError, TypeError, RealsysError) as error:
            self.notes.append(str(error))
            return None

    def rows(self, path: Path) -> list[dict[str, Any]]:
        try:
            content = parse_jsonl(path.read_bytes())
        except FileNotFoundError:
            return []
        except OSError as error:
            self.notes.append(str(error))
            return []
        if content.damaged:
            lines = ", ".join(map(str, content.damaged[:5]))
            self.notes.append(f"{path}: damaged lines left out: {lines}")
        return list(content.rows)

    def phase(self, name: str, folder: Path) -> Phase:
        files = PhaseFiles(folder)
        events: list[Event] = []
        for row in self.rows(files.events):  # one by one: a strange row must not cost the others
            events += self.attempt(lambda: parse_events([row], where=str(files.events))) or []  # noqa: B023
        metrics = [row for row in self.rows(files.metrics) if _is_step(row.get("step"))]
        samples = [row for row in self.rows(files.samples) if _is_step(row.get("step"))]
        return Phase(name=name, files=files, metrics=metrics, events=events, samples=samples)


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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


def _attempts(
    files: TrialFiles, reader: _Reader
) -> tuple[tuple[AttemptRecord, ExitMarker | None], ...]:
    found = []
    for attempt in files.all_attempts():
        record = reader.attempt(lambda a=attempt: read_record(AttemptRecord, a.record))  # type: ignore[misc]
        marker = reader.attempt(lambda a=attempt: read_record(ExitMarker, a.exit))  # type: ignore[misc]
        if record:
            found.append((record, marker))
    return tuple(found)


def _preparing(root: Path, plan: LaunchPlan | None, reader: _Reader) -> tuple[Phase, ...]:
    if plan:
        folders = [(p.name, Path(p.folder)) for p in plan.phases[:-1]]
    else:
        prepare = root / "prepare"
        folders = [(p.name, p) for p in sorted(prepare.iterdir())] if prepare.is_dir() else []
    # A folder that was moved with its trial is found beside it.
    places = [(n, f if f.exists() else root / "prepare" / f.name) for n, f in folders]
    return tuple(reader.phase(name, folder) for name, folder in places)


def _outcome(attempts: tuple[tuple[AttemptRecord, ExitMarker | None], ...]) -> Outcome:
    if not attempts:
        return Outcome.UNKNOWN
    record, marker = attempts[-1]
    if marker:
        return {
            Result.COMPLETED: Outcome.COMPLETED,
            Result.STOPPED: Outcome.STOPPED,
            Result.FAILED: Outcome.FAILED,
        }[marker.result]
    if record.host != socket.gethostname():
        return Outcome.UNKNOWN
    alive = is_alive(record.supervisor_pid, record.supervisor_start)
    return Outcome.RUNNING if alive else Outcome.LOST


def _failures(
    files: TrialFiles,
    attempts: tuple[tuple[AttemptRecord, ExitMarker | None], ...],
    reader: _Reader,
) -> tuple[Failure | None, tuple[Failure, ...]]:
    """The first failure with its log's last lines; made up from the logs when nobody wrote one."""
    if not attempts:
        return None, ()
    record, marker = attempts[-1]
    attempt = files.attempt(record.number)
    if marker and marker.first_failure:
        first = marker.first_failure
        if not first.log_tail:
            tail = _tail(attempt.log(first.worker), reader)
            first = Failure(**{**vars(first), "log_tail": tail})
        return first, marker.other_failures
    if _outcome(attempts) is not Outcome.LOST:
        return None, ()
    return _lost(record, attempt, reader), ()


def _lost(record: AttemptRecord, attempt: AttemptFiles, reader: _Reader) -> Failure:
    log = attempt.log("supervisor")
    return Failure(
        worker="supervisor",
        host=record.host,
        pid=record.supervisor_pid,
        why="it ended without an exit marker: killed, or the machine went down",
        at=log.stat().st_mtime if log.exists() else record.started_at,
        log=str(log),
        log_tail=_tail(log, reader),
    )


def _tail(log: Path, reader: _Reader) -> tuple[str, ...]:
    if not log.exists():
        return ()
    data = reader.attempt(log.read_bytes) or b""
    return tuple(data[-64_000:].decode(errors="replace").splitlines()[-TAIL_LINES:])


def without_colours(line: str) -> str:
    """A log line without terminal escapes and control characters."""
    return "".join(c for c in _ANSI.sub("", line) if c == "\t" or c.isprintable())


def _duration(
    attempts: tuple[tuple[AttemptRecord, ExitMarker | None], ...], main: Phase
) -> float | None:
    """Seconds in attempts, idle time between them left out; one without an end ends at its last event."""
    if not attempts:
        return main.events[-1].end - main.events[0].start if main.events else None
    total = 0.0
    for i, (record, marker) in enumerate(attempts):
        if marker:
            end = marker.ended_at
        elif i == len(attempts) - 1 and _outcome(attempts) is Outcome.RUNNING:
            end = time.time()
        else:
            limit = attempts[i + 1][0].started_at if i + 1 < len(attempts) else float("inf")
            end = max((e.end for e in main.events if e.end <= limit), default=record.started_at)
        total += max(0.0, end - record.started_at)
    return total
