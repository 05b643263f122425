"""Parses squeue's and sacct's output into JobInfo: pure functions of text that never raise.

Both programs print fields between control characters, which users do not type (a job's comment may hold
"|" and line breaks), with SLURM_TIME_FORMAT=%s, so that times are seconds since 1970. Tested against
recorded output of 22.05 and the sources of 23.02 to 26.11 (tests/unit/slurm_outputs/).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from launcher.slurm.query import reasons
from launcher.slurm.query.states import job_state
from realsys.trial.trial_state import JobState

FIELD_END = "\x1f"
ROW_END = "\x1e"
# Slurm's name of a field: ours. squeue -O: one with a suffix and no width is printed in full. The free text
# comes last.
SQUEUE_FIELDS = {
    "JobArrayID": "job_id", "JobID": "raw_id", "State": "state", "Reason": "reason", "NodeList": "nodes",
    "StartTime": "start", "SubmitTime": "submit", "EndTime": "end", "TimeLimit": "limit",
    "RestartCnt": "restarts", "exit_code": "exit", "Cluster": "cluster", "Comment": "comment",
}  # fmt: skip
SACCT_FIELDS = {
    "JobID": "job_id", "JobIDRaw": "raw_id", "State": "state", "Reason": "reason", "NodeList": "nodes",
    "Start": "start", "Submit": "submit", "End": "end", "TimelimitRaw": "limit", "ExitCode": "exit",
    "Comment": "comment",
}  # fmt: skip

_ROW_ID = re.compile(r"\d+(?:_(?:\d+|\[[^\x1f\n]*\])|\+\d+)?", re.ASCII)
_SACCT_ROW = re.compile(rf"\n(?={_ROW_ID.pattern}\x1f)")
_BEFORE_ROW = re.compile(r"\A\n?(?:CLUSTER: [^\n]*\n)?")  # the latter with several SLURM_CLUSTERS
_TIME = re.compile(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,6}):(\d{1,2})", re.ASCII)
_EXIT = re.compile(r"(\d{1,5}):(\d{1,3})", re.ASCII)
_NOTHING = frozenset({"", "(null)", "N/A", "None", "NONE", "None assigned", "Unknown"})
_BEFORE_START = frozenset({JobState.WAITING, JobState.HELD})


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """Slurm's record of one job, of a task of an array, or of a component of a heterogeneous job.

    Attributes:
        job_id: Slurm's id: ``12``, ``12_3``, ``12+0``.
        slurm_state, reason: Slurm's own words; a reason without information is empty.
        fix: what to do about the reason, if more is known than the reason itself.
        expected_start: Slurm's estimated or earliest start; only before the start.
        submitted_at, started_at, ended_at: seconds since 1970 by the controller's clock; for a requeued
            job, those of its present run.
        time_limit_s: None: unlimited, or unknown.
        nodes: a hostlist; empty before the start.
        restarts: number of requeues.
        exit_code: 0 is accepted only with COMPLETED.
        source: ``squeue``, ``sacct``, or ``none`` if neither knows the job.
        cluster: its cluster's name; empty in accounting.
        earlier: accounting's former rows of the id, oldest first: runs before a requeue, or other jobs
            that had the id before.
        namesakes: jobs of the same id on other clusters.
        doubt: why what Slurm says of the id is not believed (own_job.py).
    """

    job_id: str
    state: JobState
    slurm_state: str = ""
    reason: str = ""
    reason_words: str = ""
    fix: str = ""
    expected_start: float | None = None
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    time_limit_s: int | None = None
    nodes: str = ""
    restarts: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    comment: str = ""
    source: str = "none"
    cluster: str = ""
    earlier: tuple[JobInfo, ...] = ()
    namesakes: tuple[JobInfo, ...] = ()
    doubt: str = ""


@dataclass(frozen=True)
class Rows:
    """Parsed jobs by each of their names, the number of unreadable rows and the first of those."""

    jobs: Mapping[str, JobInfo] = field(default_factory=dict)
    unreadable: int = 0
    example: str = ""


def read_squeue(text: str) -> Rows:
    """Parses the output of ``squeue -h -r -O`` with SQUEUE_FIELDS."""
    rows = (_BEFORE_ROW.sub("", row) for row in text.split(ROW_END))
    good, bad = _split((row for row in rows if row.strip()), SQUEUE_FIELDS)
    found = [(row["raw_id"], _info(row, _seconds(row["limit"]), "squeue")) for row in good]
    return Rows(_by_name(found), len(bad), bad[0][:80] if bad else "")


def read_sacct(text: str) -> Rows:
    """Parses the output of ``sacct -X -P -n -D`` with SACCT_FIELDS; of a job's rows the latest counts.

    A requeued job has one row per run (the earlier ones REQUEUED, PREEMPTED, NODE_FAIL …). A job that
    lost a node and continued has an additional RESIZING row, which is not counted as a restart.
    """
    runs: dict[str, list[JobInfo]] = defaultdict(list)
    raw_ids: dict[str, str] = {}
    rows = _SACCT_ROW.split(text.removesuffix("\n")) if text.strip() else ()
    good, bad = _split(rows, SACCT_FIELDS)
    for row in good:
        minutes = _number(row["limit"])
        info = _info(row, None if minutes is None else minutes * 60, "sacct")
        runs[info.job_id].append(info)
        raw_ids[info.job_id] = row["raw_id"]
    latest = []
    for job_id, found in runs.items():
        found.sort(key=lambda info: (info.submitted_at or 0, info.started_at or float("inf")))
        over = [info.slurm_state != "RESIZING" for info in found[:-1]]
        restarts = sum(over) + (found[-1].slurm_state == "REQUEUED")  # its next row will follow
        last = replace(found[-1], restarts=restarts, earlier=tuple(found[:-1]))
        latest.append((raw_ids[job_id], last))
    return Rows(_by_name(latest), len(bad), bad[0][:80] if bad else "")


def _split(
    rows: Iterable[str], fields: Mapping[str, str]
) -> tuple[list[dict[str, str]], list[str]]:
    """Returns the rows by our names of their fields, and those that can't be read."""
    good, bad = [], []
    for row in rows:
        values = row.split(FIELD_END, len(fields) - 1)
        if len(values) < len(fields) or not _ROW_ID.fullmatch(values[0]):
            bad.append(row)
        else:
            good.append(dict(zip(fields.values(), values, strict=True)))
    return good, bad


def _info(row: Mapping[str, str], time_limit_s: int | None, source: str) -> JobInfo:
    state, reason = job_state(row["state"]), row["reason"]
    if state is JobState.WAITING and reasons.is_hold(reason):
        state = JobState.HELD
    waits = state in _BEFORE_START
    if source == "sacct" and not waits:
        reason = ""  # sacct keeps the reason of an earlier wait
    ending = state.has_ended or state is JobState.FINISHING
    code, signal = (ending and _exit_status(row["exit"])) or (0, 0)
    restarts = _number(row.get("restarts", ""))
    return JobInfo(
        job_id=row["job_id"],
        state=state,
        slurm_state=row["state"],
        reason=_text(reason),
        reason_words=reasons.reason_sentence(reason, restarts=restarts or 0),
        expected_start=_epoch(row["start"]) if state is JobState.WAITING else None,
        submitted_at=_epoch(row["submit"]),
        started_at=None if waits else _epoch(row["start"]),
        ended_at=_epoch(row["end"]) if ending else None,
        time_limit_s=time_limit_s,
        nodes="" if waits else _text(row["nodes"]),
        restarts=restarts,
        exit_code=code if (code or (state is JobState.DONE and not signal)) else None,
        signal=signal or None,
        comment="" if row["comment"] == "(null)" else row["comment"],
        source=source,
        cluster=_text(row.get("cluster", "")),
    )


def _by_name(found: Iterable[tuple[str, JobInfo]]) -> dict[str, JobInfo]:
    """Indexes each job by its own name and raw id, and a whole by its most significant part.

    For a heterogeneous job that is component 0, which runs the batch script; for an array a running
    task, else a pending one.
    """
    jobs: dict[str, JobInfo] = {}
    wholes: dict[str, JobInfo] = {}
    for raw_id, info in found:
        jobs[info.job_id] = info
        whole, sign, _ = re.split(r"([_+])|$", info.job_id, maxsplit=1)
        if sign == "+" or (sign == "_" and raw_id != whole):
            jobs.setdefault(raw_id, info)
        if sign == "_" and (whole not in wholes or _life(info) > _life(wholes[whole])):
            wholes[whole] = info
    return wholes | jobs


def _life(info: JobInfo) -> int:
    if info.state.has_ended or info.state is JobState.UNKNOWN:
        return 0
    return 1 if info.state in _BEFORE_START else 2


def parts_of(job_id: str, jobs: Mapping[str, JobInfo]) -> Iterator[tuple[str, JobInfo]]:
    """Yields the tasks of an array or the components of a heterogeneous job, by their own names."""
    for name, info in jobs.items():
        if name.startswith((f"{job_id}_", f"{job_id}+")):
            yield name, info


def _text(value: str) -> str:
    return "" if value.strip() in _NOTHING else value.strip()


def _number(value: str) -> int | None:
    return int(value) if re.fullmatch(r"\d{1,9}", value, re.ASCII) else None


def _epoch(value: str) -> float | None:
    """Parses seconds since 1970, or a local time like ``2026-09-21T12:31:28``."""
    if re.fullmatch(r"\d{1,11}", value, re.ASCII):
        return float(value) or None
    try:
        return datetime.fromisoformat(value).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _seconds(value: str) -> int | None:
    """Parses a time limit as squeue prints it: ``1:00`` is a minute, ``1-02:03:04`` more than a day."""
    found = _TIME.fullmatch(value)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _exit_status(value: str) -> tuple[int, int] | None:
    """Parses (code, signal) from ``3:0``, or from the wait status 768 that squeue printed before 23.02."""
    if found := _EXIT.fullmatch(value):
        return int(found[1]), int(found[2])
    status = _number(value)
    return None if status is None else ((status >> 8) & 0xFF, status & 0x7F)
