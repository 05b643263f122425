"""How a trial's attempts went: result, first failure with its log's tail, time spent.

Judged from the trial's folder, and from /proc for a supervisor of this host. What can't be known is
``UNKNOWN``, never "fine".
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from realsys.observability.events import Event
from realsys.trial.last_lines import last_lines
from realsys.trial.records import AttemptRecord, ExitMarker, Failure, Result, TrialFiles, is_alive

TAIL_LINES = 40
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class AttemptOutcome(StrEnum):
    """How the trial stands."""

    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"  # its supervisor is gone and left no exit marker
    UNKNOWN = "unknown"  # its supervisor is on another host, or no attempt began


_OUTCOMES = {
    Result.COMPLETED: AttemptOutcome.COMPLETED,
    Result.STOPPED: AttemptOutcome.STOPPED,
    Result.FAILED: AttemptOutcome.FAILED,
}


@dataclass(frozen=True)
class Attempt:
    """One attempt; ``marker`` is None until its supervisor's last act."""

    record: AttemptRecord
    marker: ExitMarker | None


def outcome(attempts: Sequence[Attempt]) -> AttemptOutcome:
    """How the newest attempt stands."""
    if not attempts:
        return AttemptOutcome.UNKNOWN
    record, marker = attempts[-1].record, attempts[-1].marker
    if marker:
        return _OUTCOMES[marker.result]
    if record.host != socket.gethostname():
        return AttemptOutcome.UNKNOWN
    alive = is_alive(record.supervisor_pid, record.supervisor_start)
    return AttemptOutcome.RUNNING if alive else AttemptOutcome.LOST


def first_failure(files: TrialFiles, attempts: Sequence[Attempt]) -> Failure | None:
    """The newest attempt's first failure with its last log lines; None when nothing failed.

    A supervisor that was killed could not say so: then its log is all there is.
    """
    if not attempts:
        return None
    record, marker = attempts[-1].record, attempts[-1].marker
    attempt = files.attempt(record.number)
    if marker and marker.first_failure:
        first = marker.first_failure
        if first.log_tail:
            return first
        return replace(first, log_tail=_tail(attempt.log(first.worker)))
    if outcome(attempts) is not AttemptOutcome.LOST:
        return None
    log = attempt.log("supervisor")
    return Failure(
        worker="supervisor",
        host=record.host,
        pid=record.supervisor_pid,
        why="ended without an exit marker: it was killed, or the machine went down",
        at=log.stat().st_mtime if log.exists() else record.started_at,
        log=str(log) if log.exists() else "",
        log_tail=_tail(log),
    )


def _tail(log: Path) -> tuple[str, ...]:
    return tuple(last_lines(log)[-TAIL_LINES:])


def without_colours(line: str) -> str:
    """A log line without terminal escapes and control characters."""
    return "".join(c for c in _ANSI.sub("", line) if c == "\t" or c.isprintable())


def duration_s(attempts: Sequence[Attempt], events: Sequence[Event]) -> float | None:
    """Seconds in attempts, the idle time between them left out; None before the first.

    An attempt that left no exit marker ended at its last event; a running one ends now.
    """
    if not attempts:
        return events[-1].end - events[0].start if events else None
    total = 0.0
    for i, attempt in enumerate(attempts):
        is_last = i == len(attempts) - 1
        start = attempt.record.started_at
        if attempt.marker:
            end = attempt.marker.ended_at
        elif is_last and outcome(attempts) is AttemptOutcome.RUNNING:
            end = time.time()
        else:
            limit = float("inf") if is_last else attempts[i + 1].record.started_at
            end = max((e.end for e in events if e.end <= limit), default=start)
        total += max(0.0, end - start)
    return total
