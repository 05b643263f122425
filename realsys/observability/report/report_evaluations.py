"""The report's table of evaluations of saved checkpoints, failed ones with their reasons."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from realsys.observability.evaluations import newest_rows
from realsys.observability.report.report_page import duration_text, rows_table, section
from realsys.observability.report.svg_chart import number_text
from realsys.observability.report.trial_report import TrialReport

MANY = 50


def evaluations(trial: TrialReport) -> str:
    """Renders a row per checkpoint, newest first; nothing if there are none."""
    rows = newest_rows(trial.main.evaluations)
    if not rows:
        return ""
    failed = sum(row.get("result") != "done" for row in rows)
    words = f"{len(rows)} saved checkpoints evaluated beside the training"
    words += f", {failed} of them without success" if failed else ""
    body = rows_table(
        ("step", "role", "figures", "seconds", "tries"),
        [_row(row) for row in rows[: -MANY - 1 : -1]],
    )
    return section(
        "Saved checkpoints", f'<p class="small soft">{words}.</p><div class="card">{body}</div>'
    )


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    figures = row.get("figures")
    told = dict(figures) if isinstance(figures, Mapping) else {}
    text = " · ".join(f"{escape(str(k))} {_number(v)}" for k, v in told.items())
    if row.get("result") != "done":
        text = f'<span class="bad">failed</span> {escape(str(row.get("error") or ""))}'
    seconds = row.get("seconds")
    spent = duration_text(float(seconds)) if isinstance(seconds, int | float) else ""
    return str(row["step"]), escape(str(row.get("role"))), text, spent, str(row.get("tries", ""))


def _number(value: Any) -> str:
    return number_text(float(value)) if isinstance(value, int | float) else escape(str(value))
