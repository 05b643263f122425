"""Renders a sweep as a table, one row per trial, and as a JSON document (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.terminal.text import headline
from launcher.trials.trial_view import TrialView
from realsys.api.plain import to_plain

Row = tuple[Mapping[str, str], TrialView]  # the trial's values and its state


def sweep_table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Builds (columns, rows): trial, a column per setting that differs, state, step, metrics, reason."""
    axes = list(dict.fromkeys(name for point, _ in rows for name in point))
    columns = ("trial", *axes, "state", "step", "last metrics", "reason")
    return columns, [
        (
            view.trial,
            *(point.get(name, "") for name in axes),
            view.state.value,
            _step(view),
            headline(view.progress.headline) if view.progress else "",
            view.reason,
        )
        for point, view in rows
    ]


def sweep_document(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the trials as plain values: those of `status TRIAL --json`, and ``point``."""
    return [{"point": dict(point), **to_plain(view)} for point, view in rows]


def _step(view: TrialView) -> str:
    if view.progress:
        return f"{view.step}/{view.total_steps or '?'}"
    return str(view.step or "")
