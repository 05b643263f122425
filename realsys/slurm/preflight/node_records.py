"""What the node program printed, put together again, and what the driver's program says in it (pure)."""

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
    """How one step went.

    Attributes:
        is_late: it was ended at its deadline.
        said: by srun, the container runtime or Python, its last lines.
    """

    name: str
    nodes: tuple[str, ...]
    begun: float
    limit_s: float
    is_late: bool = False
    said: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProbeRecords:
    """Everything that was said."""

    records: tuple[Mapping[str, Any], ...] = ()
    steps: tuple[StepSeen, ...] = ()


def records(lines: Iterable[tuple[float, str]]) -> list[dict[str, Any]]:
    """The whole records among the lines, in the order of their ends; what was cut off is left out.

    Args:
        lines: when each was heard (seconds since the epoch, our clock: ``heard`` of its record), and it.
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
    """What srun, the container runtime or Python said besides."""
    return [line.strip() for line in lines if line.strip() and MARK not in line]


def smi_rows(text: str) -> list[dict[str, str]]:
    """Rows of `nvidia-smi --query-… --format=csv`: field → value, without what is not told.

    The head line repeats the fields as they were asked for, with a unit: ``clocks.current.sm [MHz]``. A
    value that a GPU does not have is ``[N/A]``, in older drivers ``[Not Supported]``; one that fails
    ``[Unknown Error]`` is left out as well.
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
    """Those of the GPUs that are ours by CUDA_VISIBLE_DEVICES: nvidia-smi knows nothing of it, and lists
    those of other jobs, too, where Slurm does not hide them. All, where it can't be told."""
    entries = [entry.strip() for entry in (visible or "").split(",") if entry.strip()]
    if not entries or len(rows) <= len(entries):
        return rows
    mine = [row for row in rows if row.get("index") in entries or row.get("uuid") in entries]
    return mine or rows


def number(row: Mapping[str, str], field: str) -> float | None:
    """A number of a row, whether or not its unit was left out; None if it is not told."""
    match = re.match(r"-?\d+(\.\d+)?", row.get(field, ""))
    return float(match[0]) if match else None


def able(nodes: Sequence[str], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Nodes that have looked at themselves to the end, and none of whose processes broke or fell silent:
    the others would only spoil an all-reduce (pure)."""
    ended = {r["node"] for r in found if r["what"] == "end"}
    bad = {r["node"] for r in found if r["what"] in ("broken", "silent")}
    return [node for node in nodes if node in ended - bad]
