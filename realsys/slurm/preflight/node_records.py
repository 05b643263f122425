"""Reassembles the records that the node program printed, and parses nvidia-smi's output in them (pure)."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MARK = "REALSYS-PREFLIGHT "  # as node_program.py has it
_PIECE = re.compile(rf"{MARK}(\S+) (\d+)/(\d+) (.*)")
_NOTHING = ("", "[n/a]", "n/a", "[not supported]", "not supported", "[unknown error]", "unknown")
_UNIT = re.compile(r" \[.*\]$")


@dataclass(frozen=True, kw_only=True)
class StepSeen:
    """Outcome of one step.

    Attributes:
        is_late: it was ended at its deadline.
        said: last lines of srun, the container runtime or Python.
    """

    name: str
    nodes: tuple[str, ...]
    begun: float
    limit_s: float
    is_late: bool = False
    said: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProbeRecords:
    """All records of a preflight."""

    records: tuple[Mapping[str, Any], ...] = ()
    steps: tuple[StepSeen, ...] = ()


def records(lines: Iterable[tuple[float, str]]) -> list[dict[str, Any]]:
    """Returns the complete records among the lines, in the order of their ends; truncated ones are
    skipped.

    Args:
        lines: (time received, text); the time is in seconds since the epoch on our clock and becomes
            ``heard`` of the record.
    """
    parts: dict[str, dict[int, str]] = {}
    found = []
    for heard, line in lines:
        match = _PIECE.search(line)
        if match is None:
            continue
        name, piece, count, text = match.groups()
        have = parts.setdefault(name, {})
        have[int(piece)] = text
        if len(have) == int(count):
            whole = "".join(have[i] for i in sorted(have))
            try:
                found.append({**json.loads(whole), "heard": heard})
            except ValueError:  # a line of somebody else in between
                continue
    return found


def other_lines(lines: Iterable[str]) -> list[str]:
    """Returns the other output of srun, the container runtime or Python."""
    return [line.strip() for line in lines if line.strip() and MARK not in line]


def smi_rows(text: str) -> list[dict[str, str]]:
    """Parses rows of `nvidia-smi --query-… --format=csv`: field → value, without missing values.

    The header repeats the requested fields with a unit: ``clocks.current.sm [MHz]``. A value that a GPU
    does not have is ``[N/A]``, in older drivers ``[Not Supported]``; one that fails with
    ``[Unknown Error]`` is skipped as well.
    """
    rows = list(csv.reader(text.splitlines(), skipinitialspace=True))
    if not rows:
        return []
    head = [_UNIT.sub("", name.strip()) for name in rows[0]]
    found = []
    for row in rows[1:]:
        if len(row) == len(head):
            pairs = zip(head, (value.strip() for value in row), strict=True)
            found.append({n: value for n, value in pairs if value.lower() not in _NOTHING})
    return found


def own_rows(rows: list[dict[str, str]], visible: str | None) -> list[dict[str, str]]:
    """Returns the rows of the GPUs in CUDA_VISIBLE_DEVICES: nvidia-smi ignores it, and also lists GPUs of
    other jobs if Slurm does not hide them. All rows if they can't be matched."""
    entries = [entry.strip() for entry in (visible or "").split(",") if entry.strip()]
    if not entries or len(rows) <= len(entries):
        return rows
    mine = [row for row in rows if row.get("index") in entries or row.get("uuid") in entries]
    return mine or rows


def number(row: Mapping[str, str], field: str) -> float | None:
    """Returns a number of a row, with or without its unit; None if it is missing."""
    match = re.match(r"-?\d+(\.\d+)?", row.get(field, ""))
    return float(match[0]) if match else None


def able(nodes: Sequence[str], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the nodes that completed their own checks without a failed or silent process: the others
    would only spoil an all-reduce (pure)."""
    ended = {r["node"] for r in found if r["what"] == "end"}
    bad = {r["node"] for r in found if r["what"] in ("broken", "silent")}
    return [node for node in nodes if node in ended - bad]
