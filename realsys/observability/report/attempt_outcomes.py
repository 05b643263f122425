"""Summarises a trial's attempts: state, first failure with its log's tail, time spent."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from realsys.observability.events import Event
from realsys.trial.last_lines import last_lines
from realsys.trial.liveness import Liveness
from realsys.trial.records import Failure
from realsys.trial.trial_reader import Attempt
from realsys.trial.trial_state import State, TrialFacts, decide

TAIL_LINES = 40
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def state_of(attempts: Sequence[Attempt]) -> State:
    """Determines the trial's state from its folder and this host's processes; UNKNOWN before the first
    attempt, which may be queued."""
    if not attempts:
        return State.UNKNOWN
    last = attempts[-1]
    result = last.marker.result if last.marker else None
    return decide(TrialFacts(supervisor=last.supervisor, result=result, working=True))


def first_failure(attempts: Sequence[Attempt]) -> Failure | None:
    """Returns the newest attempt's first failure with its last log lines; None if nothing failed.

    A killed supervisor leaves no marker: then its log is the only source.
    """
    if not attempts:
        return None
    attempt, record, marker = attempts[-1].files, attempts[-1].record, attempts[-1].marker
    if marker and marker.first_failure:
        first = marker.first_failure
        if first.log_tail:
            return first
        return replace(first, log_tail=_tail(attempt.log(first.worker)))
    if record is None or state_of(attempts) is not State.LOST:
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
    """Removes terminal escapes and control characters from a log line."""
    return "".join(c for c in _ANSI.sub("", line) if c == "\t" or c.isprintable())


def duration_s(attempts: Sequence[Attempt], events: Sequence[Event]) -> float | None:
    """Returns the total seconds of the attempts, without the time between them; None before the first.

    An attempt that left no exit marker ended at its last event; a running one ends now.
    """
    started = [(a.record.started_at, a) for a in attempts if a.record]
    if not started:
        return events[-1].end - events[0].start if events else None
    total = 0.0
    for i, (start, attempt) in enumerate(started):
        is_last = i == len(started) - 1
        if attempt.marker:
            end = attempt.marker.ended_at
        elif is_last and attempt.supervisor is Liveness.ALIVE:
            end = time.time()
        else:
            limit = float("inf") if is_last else started[i + 1][0]
            end = max((e.end for e in events if e.end <= limit), default=start)
        total += max(0.0, end - start)
    return total
