"""Evaluations of saved checkpoints as metrics (pure): lines of ``evaluations.jsonl`` → rows by step.

The evaluator writes those lines, the master the metrics: two files with one writer each, presented as
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PREFIX = "auto_eval/"


def newest_rows(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the last line of each role and step, in order of steps: a checkpoint saved again with other
    weights has several. Lines without a step are skipped."""
    newest = {(r["step"], str(r.get("role"))): r for r in rows if type(r.get("step")) is int}
    return [newest[key] for key in sorted(newest)]


def metric_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns ``{"step": 200, "auto_eval/accuracy": 0.5}`` for each row that has figures."""
    found = []
    for row in newest_rows(rows):
        figures = row.get("figures")
        if isinstance(figures, Mapping) and figures:
            found.append({"step": row["step"], **{PREFIX + k: v for k, v in figures.items()}})
    return found


def last_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the newest checkpoint's figures, with its step as ``auto_eval/step``, and as
    ``auto_eval/error`` what went wrong; empty if there are none."""
    found = metric_rows(rows)
    if not found:
        return {}
    last = found[-1]
    shown = {PREFIX + "step": last["step"], **{k: v for k, v in last.items() if k != "step"}}
    errors = {row["step"]: row.get("error") for row in newest_rows(rows)}
    return shown | ({PREFIX + "error": errors[last["step"]]} if errors.get(last["step"]) else {})
