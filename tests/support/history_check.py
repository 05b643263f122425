"""Checks a history against realsys' guarantees about attempts, fencing and detection (pure).

    python tests/support/history_check.py TRIAL_DIR

For chaos tests and the simulation (tests/simulation). A violation is a sentence with worker, time and
operation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from realsys.api.errors import RealsysError
from realsys.observability.history import Op
from realsys.observability.jsonl import read_jsonl
from realsys.trial.lineage import Lineage
from realsys.trial.records import Resumed, TrialFiles

Row = Mapping[str, Any]

FENCED = (Op.CHECKPOINT, Op.SAVE, Op.DONE)
SUPERVISOR = "supervisor"
HARNESS = (Op.DIED, Op.CUT_OFF, Op.HUNG)
DETECT_WITHIN_S = 60.0


def read_history(trial_dir: Path) -> list[dict[str, Any]]:
    """Reads all rows of all attempts, oldest first.

    Raises:
        DataError: a damaged line; a torn last one of a killed process is left out.
    """
    rows: list[dict[str, Any]] = []
    for attempt in TrialFiles(trial_dir).all_attempts():
        for path in sorted(attempt.history.glob("*.jsonl")):
            rows += read_jsonl(path)
    return sorted(rows, key=lambda row: float(row["at"]))


def check_history(
    rows: Iterable[Row],
    *,
    detect_within_s: float = DETECT_WITHIN_S,
    faults_known: bool = False,
    until: float = float("inf"),
    slack_s: float = 0.0,
) -> list[str]:
    """Returns the violations, grouped by rule; none for a valid history.

    Args:
        rows: as read_history returns them, in any order.
        detect_within_s: a death must be detected within this time.
        faults_known: all faults are in the history (``died``, ``cut_off``, ``hung``): then any other
            worker that was declared lost is a violation.
        until: when the history was read; deaths just before can't have been detected yet.
        slack_s: how far clocks of two hosts may differ.
    """
    ordered = sorted(rows, key=lambda row: float(row["at"]))
    found = [*_attempts_only_grow(ordered), *_one_writer_a_step(ordered)]
    found += _no_write_after_a_newer_attempt(ordered, slack_s)
    found += _deaths_are_noticed(ordered, detect_within_s, until)
    if faults_known:
        found += _nobody_is_lost_wrongly(ordered)
    return found


def lineages(rows: Iterable[Row]) -> dict[str, Lineage]:
    """Returns phase → its lineage, by the attempts' resume records."""
    resumed: dict[str, dict[int, Resumed]] = {}
    for row in rows:
        if row["op"] == Op.RESUMED:
            phase, attempt = _branch(row)
            step, of = int(row["step"]), int(row.get("of", 0))
            record = Resumed(attempt=attempt, phase=phase, step=step, of_attempt=of)
            resumed.setdefault(phase, {})[attempt] = record
    return {phase: Lineage.of(records) for phase, records in resumed.items()}


def _counts(row: Row, found: Mapping[str, Lineage]) -> bool:
    phase, attempt = _branch(row)
    return found.get(phase, Lineage({})).counts(attempt, int(row["step"]))


def _branch(row: Row) -> tuple[str, int]:
    """Returns (phase, attempt): steps are counted separately in each phase."""
    return str(row.get("phase", "")), int(row["attempt"])


def _attempts_only_grow(rows: Sequence[Row]) -> Iterator[str]:
    newest, tokens = 0, dict[int, str]()
    for row in rows:
        if row["op"] != Op.TOOK_ATTEMPT:
            continue
        number, token = int(row["attempt"]), str(row["token"])
        if number <= newest:
            why = "again" if tokens.get(number, token) == token else "twice, by two supervisors"
            was = f"attempt {number} was taken {why}" if number in tokens else ""
            yield f"{was or f'attempt {number} was taken after attempt {newest}'} ({_when(row)})"
        newest = max(newest, number)
        tokens.setdefault(number, token)


def _one_writer_a_step(rows: Sequence[Row]) -> Iterator[str]:
    lineage = lineages(rows)
    for op in (Op.STEP, Op.CHECKPOINT):
        writers: dict[tuple[str, int], Row] = {}
        for row in rows:
            if row["op"] != op or not _counts(row, lineage):
                continue
            if (first := writers.setdefault((_branch(row)[0], row["step"]), row)) is not row:
                yield (
                    f"{op} {row['step']} has two writers in the final lineage: "
                    f"{_who(first)} ({_when(first)}) and {_who(row)} ({_when(row)})"
                )


def _no_write_after_a_newer_attempt(rows: Sequence[Row], slack_s: float) -> Iterator[str]:
    """Checks that fenced writes were sent before a newer attempt was claimed. A metrics row is not
    fenced: it must not count once a newer attempt has written."""
    lineage = lineages(rows)
    writes = [row for row in rows if row["op"] in (Op.STEP, *FENCED)]
    taken = _first_of_each([row for row in rows if row["op"] == Op.TOOK_ATTEMPT])
    written = _first_of_each(writes)
    for row in writes:
        attempt, sent = int(row["attempt"]), float(row.get("began", row["at"])) - slack_s
        fenced = row["op"] in FENCED
        if not fenced and not _counts(row, lineage):
            continue  # of a dead branch, which is never read
        for number, newer in (taken if fenced else written).items():
            if number > attempt and float(newer["at"]) < sent:
                yield (
                    f"{row['op']} {row['step']} of {_who(row)} was accepted ({_when(row)}) after "
                    f"{newer['op']} of attempt {number} ({_when(newer)})"
                )
                break


def _first_of_each(rows: Iterable[Row]) -> dict[int, Row]:
    """Returns attempt → its first row."""
    first: dict[int, Row] = {}
    for row in rows:
        first.setdefault(int(row["attempt"]), row)
    return first


def _deaths_are_noticed(rows: Sequence[Row], within_s: float, until: float) -> Iterator[str]:
    for row in rows:
        # A supervisor's own death is for Slurm to notice, and after it there is nobody in the attempt.
        if row["op"] != Op.DIED or row["worker"] == SUPERVISOR:
            continue
        deadline = float(row["at"]) + within_s
        attempt = int(row["attempt"])
        if deadline > until or any(_ends_the_watch(r, attempt, deadline) for r in rows):
            continue
        notices = [r for r in rows if _notices(r, row) and float(r["at"]) >= float(row["at"])]
        first = min((float(r["at"]) for r in notices), default=None)
        if first is None:
            yield f"the death of {_who(row)} was not noticed ({_when(row)})"
        elif first > deadline:
            late_s = first - float(row["at"])
            yield f"{_who(row)} died ({_when(row)}), noticed after {late_s:.1f} s, allowed {within_s:g} s"


def _notices(row: Row, death: Row) -> bool:
    return (
        row["op"] in (Op.LOST, Op.EXITED)
        and row["worker"] == death["worker"]
        and row["attempt"] == death["attempt"]
    )


def _ends_the_watch(row: Row, attempt: int, deadline: float) -> bool:
    """Returns whether by then the attempt has ended, or has no supervisor."""
    if float(row["at"]) > deadline:
        return False
    if row["op"] == Op.TOOK_ATTEMPT:
        return int(row["attempt"]) > attempt
    mine = int(row["attempt"]) == attempt
    watcher_ended = row["op"] in (Op.EXITED, Op.DIED) and row["worker"] == SUPERVISOR
    return mine and (watcher_ended or row["op"] == Op.DONE)


def _nobody_is_lost_wrongly(rows: Sequence[Row]) -> Iterator[str]:
    troubled: set[tuple[str, int]] = set()
    for row in rows:
        who = (str(row["worker"]), int(row["attempt"]))
        if row["op"] in HARNESS or row["op"] == Op.EXITED:
            troubled.add(who)
        elif row["op"] == Op.LOST and who not in troubled:
            yield f"{_who(row)} was declared lost ({_when(row)}) and nothing was wrong with it"


def _who(row: Row) -> str:
    return f"{row['worker']} of attempt {row['attempt']}"


def _when(row: Row) -> str:
    return f"at {float(row['at']):.3f}"


def main(arguments: Sequence[str]) -> int:
    """Prints the violations in a trial's history; returns 1 if there are any."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python tests/support/history_check.py TRIAL_DIR\n")
        return 2
    try:
        rows = read_history(Path(arguments[0]))
    except RealsysError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    found = check_history(rows)
    attempts = {int(row["attempt"]) for row in rows}
    sys.stdout.write("".join(f"violation: {violation}\n" for violation in found))
    sys.stdout.write(f"{len(rows)} rows, {len(attempts)} attempts, {len(found)} violations\n")
    return 1 if found or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
