"""Event log of a run: calls, steps and periodic work, one JSON line each.

Written by the master only, read by the timeline and the report. Times are seconds since the epoch on the
master's clock, except ``compute_s``, a duration that the worker measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from realsys.api.errors import ConfigError, DataError
from realsys.api.plain import from_plain
from realsys.observability.jsonl import JsonlAppender, read_jsonl

PeriodicKind = Literal["save", "evaluate", "checkpoint"]


@dataclass(frozen=True, kw_only=True)
class MfcEvent:
    """A model function call on one worker (or on several, joined by commas).

    Attributes:
        queued: its inputs were complete.
        start, end: the request left the master, the reply came back.
        compute_s: seconds inside the interface, measured by the worker.
        tokens: tokens of its input, 0 if not counted.
    """

    step: int
    name: str
    worker: str
    queued: float
    start: float
    end: float
    compute_s: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class MoveEvent:
    """Weights moved between two copies of a model (or to CPU memory), on one worker.

    Attributes:
        name: ``weights actor@0 → actor@1``.
        num_bytes: received from other workers.
    """

    step: int
    name: str
    worker: str
    start: float
    end: float
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """A finished step."""

    step: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class PeriodicEvent:
    """Saving, evaluating or checkpointing after a step."""

    kind: PeriodicKind
    step: int
    start: float
    end: float


Event = MfcEvent | MoveEvent | StepEvent | PeriodicEvent
_KINDS: dict[str, type[Event]] = {
    "mfc": MfcEvent,
    "move": MoveEvent,
    "step": StepEvent,
    "periodic": PeriodicEvent,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class EventLog(JsonlAppender):
    """Appends events, each flushed to the operating system at once.

    Open it after MetricsWriter, which may replace the file when a run resumes.
    """

    def note(self, event: Event) -> None:
        """Appends one event."""
        self.append({"event": _NAMES[type(event)], **vars(event)})


def read_events(path: Path) -> list[Event]:
    """Reads the events of a file, in order of writing; none if there is no file.

    Raises:
        DataError: a damaged line (a torn last one is left out), or a row that is no event.
    """
    return parse_events(read_jsonl(path), where=str(path))


def parse_events(rows: Iterable[Mapping[str, Any]], *, where: str) -> list[Event]:
    """Converts rows to events. Raises DataError naming the first invalid row."""
    events: list[Event] = []
    for number, row in enumerate(rows, 1):
        kind = _KINDS.get(str(row.get("event")))
        try:
            if kind is None:
                raise ValueError(f"no event is called {row.get('event')!r}")
            known = {f.name for f in dataclasses.fields(kind)}  # a newer writer may say more
            values = {k: v for k, v in row.items() if k in known}
            events.append(from_plain(kind, values))
        except (TypeError, ValueError, ConfigError) as error:
            raise DataError(
                f"row {number} is no event: {getattr(error, 'what', error)}",
                where=where,
                fix="remove that line, or restore the file",
            ) from error
    return events
