"""Lower sections of the report: time, dataflow, settings. From a TrialStory to HTML.

All text of the trial is escaped.
"""

from __future__ import annotations

from html import escape

from realsys.api.errors import RealsysError
from realsys.observability.pictures.graph_picture import graph_png, graph_text
from realsys.observability.pictures.step_picture import step_png
from realsys.observability.predicted import STEP, error_text, predicted_rows
from realsys.observability.report.option_rows import ReportOptionRow, option_rows
from realsys.observability.report.report_page import drawn, rows_table, section
from realsys.observability.report.trial_report import TrialReport
from realsys.observability.timeline import mean_ratio, mfc_summary, role_of, typical_step


def time_spent(trial: TrialReport) -> str:
    """Renders seconds and share of each call, and the picture of a typical step."""
    events = trial.main.events
    summary, ratio = mfc_summary(events), mean_ratio(events)
    if not summary or ratio is None:
        return ""
    roles = mfc_roles(trial)
    rows = [
        (
            f"<code>{escape(m.name)}</code>",
            escape(role_of(m.name, roles)),
            f'<div style="width:{min(100.0, m.share * 100):.1f}%"></div>',
            f"{m.share * 100:.1f} %",
            f"{m.mean_s:.3f}",
            f"{m.wait_s:.3f}",
            f"{m.tokens_per_s:,.0f}" if m.tokens_per_s else "–",
        )
        for m in summary
    ]
    head = ("call", "role", "", "share of step time", "seconds a step", "waited", "tokens/s")
    spent = rows_table(head, rows, numbers=4).replace("<td><div", '<td class="bar"><div')
    words = (
        f"<p>Calls computed for <b>{ratio * 100:.1f} %</b> of the steps' wall time"
        f"{' (calls that ran at the same time count each)' if ratio > 1 else ''}; the rest is "
        "the master, messages and data.</p>"
    )
    gantt = ""
    if (step := typical_step(events)) is not None:
        gantt = drawn(lambda: step_png(events, step, roles=roles), f"timeline of step {step}")
    return section("Where the time went", words + f'<div class="card">{spent}</div><br>{gantt}')


def predicted(trial: TrialReport) -> str:
    """Renders the launch's prediction beside the measurement."""
    record = trial.prediction
    rows = predicted_rows(record, trial.main.events) if record else []
    if record is None or not rows:
        return ""
    body = rows_table(
        ("", "predicted", "measured", "error"),
        [
            (
                f"<b>{escape(r.name)}</b>" if r.name == STEP else f"<code>{escape(r.name)}</code>",
                f"{r.predicted_s:.3f} s",
                f"{r.measured_s:.3f} s",
                error_text(r),
            )
            for r in rows
        ],
        numbers=3,
    )
    words = f"<p>{escape(record.basis)}; measured: medians without the first step.</p>"
    return section("Predicted and measured", words + f'<div class="card">{body}</div>')


def mfc_roles(trial: TrialReport) -> dict[str, str]:
    """Returns call → role, from the plan."""
    plan = trial.main_plan
    return {rpc.name: rpc.role for rpc in plan.config.model_rpcs} if plan else {}


def dataflow(trial: TrialReport) -> str:
    """Renders the graph as a picture, and as text for screen readers."""
    plan = trial.main_plan
    if plan is None:
        return ""
    try:
        graph = plan.config.graph()
    except RealsysError as error:
        return section("Dataflow", f'<p class="empty">{escape(str(error))}</p>')
    text = f"<details><summary>As text</summary><pre>{escape(graph_text(graph))}</pre></details>"
    return section("Dataflow", drawn(lambda: graph_png(graph), "dataflow graph") + text)


def settings(trial: TrialReport) -> str:
    """Renders the settings that differ from defaults, and all options, folded."""
    if trial.plan is None or not trial.plan.options:
        return ""
    rows = option_rows(trial.plan.options, trial.plan.experiment_name)
    changed = [row for row in rows if row.differs]
    if changed:
        body = _option_table(changed)
    elif any(row.default is not None for row in rows):
        body = "<p>All options have their defaults.</p>"
    else:
        body = '<p class="soft">The defaults of this experiment are not known here.</p>'
    full = f"<details><summary>All {len(rows)} options</summary>{_option_table(rows)}</details>"
    return section("Settings", f'<div class="card">{body}{full}</div>')


def _option_table(rows: list[ReportOptionRow]) -> str:
    return rows_table(
        ("option", "value", "default", "meaning"),
        [
            (
                f"<code>{escape(r.name)}</code>",
                f"<b>{escape(r.value)}</b>" if r.differs else escape(r.value),
                escape(r.default if r.default is not None else "?"),
                escape(f"{r.meaning} ({r.unit})" if r.unit else r.meaning),
            )
            for r in rows
        ],
    )
