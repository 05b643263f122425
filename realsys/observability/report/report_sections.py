"""Top sections of the report: headline, failure, curves. From a TrialStory to HTML.

All text of the trial is escaped.
"""

from __future__ import annotations

import time
from html import escape

from realsys.observability.report.attempt_outcomes import without_colours
from realsys.observability.report.curves import (
    ACCURACY,
    LOSS,
    REWARD,
    SAVED_ACCURACY,
    Curve,
    Table,
    find,
    first_and_last,
    main_curves,
    other_curves,
    table,
)
from realsys.observability.report.report_page import duration_text, rows_table, section
from realsys.observability.report.svg_chart import chart, number_text
from realsys.observability.report.trial_report import TrialReport
from realsys.observability.timeline import finished_steps, mean_ratio, step_rows
from realsys.trial.records import Failure
from realsys.trial.trial_state import State

LOG_LINES = 15

BADGE = {
    State.COMPLETED: "good",
    State.RUNNING: "info",
    State.STOPPED: "warn",
    State.FAILED: "bad",
    State.LOST: "bad",
    State.UNKNOWN: "warn",
}


def headline(trial: TrialReport) -> str:
    """Renders trial, result and the main figures."""
    metrics = table(trial.main.all_metrics)
    figures = [_steps_figure(trial), _duration_figure(trial)]
    accuracy = first_and_last(metrics, ACCURACY) or first_and_last(metrics, SAVED_ACCURACY)
    if ends := accuracy:
        figures.append(_accuracy_figure(*ends))
    if ends := first_and_last(metrics, REWARD):
        change = f"reward, from {number_text(ends[0])}"
        figures.append((number_text(ends[1]), change))
    if (ratio := mean_ratio(trial.main.events)) is not None:
        figures.append((f"{ratio * 100:.0f} %", "of step time in model function calls"))
    cells = "".join(
        f'<div class="card figure"><b>{escape(big)}</b><span>{escape(small)}</span></div>'
        for big, small in figures
    )
    badge = f'<span class="badge {BADGE[trial.state]}">{trial.state.value}</span>'
    return (
        f"<header><h1>{escape(trial.trial)} {badge}</h1>"
        f'<p class="soft small">{escape(_origin(trial))}</p></header>'
        f'<div class="figures">{cells}</div>'
    )


def _origin(trial: TrialReport) -> str:
    parts = []
    if trial.record:
        parts.append(f"launched {_clock(trial.record.created_at)} by {trial.record.user}")
        parts.append(f"on {trial.record.launch_host}, cluster {trial.record.cluster}")
        if trial.record.realsys_version:
            parts.append(f"realsys {trial.record.realsys_version}")
    if len(trial.attempts) > 1:
        parts.append(f"{len(trial.attempts)} attempts")
    for change in trial.record.changes if trial.record else ():
        if change.settings:
            parts.append(f"{', '.join(change.settings)} changed at attempt {change.from_attempt}")
    return " · ".join(parts) or str(trial.root)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _steps_figure(trial: TrialReport) -> tuple[str, str]:
    done = finished_steps(trial.main.events)
    rows = [row["step"] for row in trial.main.metrics]
    last = max([*done, *rows], default=0)
    plan = trial.main_plan
    total = plan.config.exp_ctrl.benchmark_steps if plan else None
    return str(last), f"steps of {total}" if total else "steps"


def _duration_figure(trial: TrialReport) -> tuple[str, str]:
    if trial.duration_s is None:
        return "–", "duration"
    return duration_text(trial.duration_s), "duration, all phases"


def _accuracy_figure(first: float, last: float) -> tuple[str, str]:
    points = (last - first) * 100
    return (
        f"{last * 100:.1f} %",
        f"held-out accuracy, {points:+.1f} points from {first * 100:.1f} %",
    )


def failure_box(trial: TrialReport) -> str:
    """Renders the first failure: worker, host, reason, last log lines; nothing if there is none."""
    if trial.failure is None:
        return ""
    first = trial.failure
    place = f"{first.worker} on {first.host}, process {first.pid}, {_clock(first.at)}"
    if trial.marker:
        place += f", phase {trial.marker.phase}, after step {trial.marker.step}"
    parts = [f"<p><b>{escape(first.worker)}</b> {escape(first.why)}</p>"]
    parts.append(f'<p class="small soft">{escape(place)}</p>')
    if first.fix:
        parts.append(f"<p>What to do: {escape(first.fix)}</p>")
    if first.log_tail:
        parts.append(_log(first))
    if followed := trial.marker.other_failures if trial.marker else ():
        others = rows_table(
            ("worker", "why"), [(escape(f.worker), escape(f.why)) for f in followed]
        )
        parts.append(f"<details><summary>{len(followed)} that followed</summary>{others}</details>")
    return section("What failed first", f'<div class="box bad">{"".join(parts)}</div>')


def _log(failure: Failure) -> str:
    """Renders the last lines openly and those before folded."""
    lines = [escape(without_colours(line)) for line in failure.log_tail]
    earlier, last = lines[:-LOG_LINES], lines[-LOG_LINES:]
    name = f"Last lines of <code>{escape(failure.log)}</code>" if failure.log else "Last log lines"
    folded = ""
    if earlier:
        before = "\n".join(earlier)
        folded = f"<details><summary>{len(earlier)} before</summary><pre>{before}</pre></details>"
    shown = "\n".join(last)
    return f'<p class="small">{name}</p>{folded}<pre>{shown}</pre>'


def notes_box(trial: TrialReport) -> str:
    """Lists files that could not be read."""
    if not trial.notes:
        return ""
    lines = "".join(f"<p>{escape(note)}</p>" for note in trial.notes[:10])
    if len(trial.notes) > 10:
        lines += f"<p>and {len(trial.notes) - 10} more</p>"
    return section("Not readable", f'<div class="box warn small">{lines}</div>')


def curves(trial: TrialReport) -> str:
    """Renders the main curves, then every other metric, folded."""
    metrics = table(trial.main.all_metrics)
    seconds = tuple((int(r["step"]), r["wall_s"]) for r in step_rows(trial.main.events))
    shown = main_curves(metrics, seconds)
    if not shown and not metrics:
        return section("Curves", '<p class="empty">No step has finished yet.</p>')
    others = other_curves(metrics, shown)
    folded = ""
    if others:
        folded = (
            f"<details><summary>All other metrics ({len(others)})</summary>"
            f"{_cards(others)}</details>"
        )
    return section("Curves", _cards(shown) + folded)


def _cards(shown: list[Curve]) -> str:
    return f'<div class="grid">{"".join(map(_card, shown))}</div>'


def _card(curve: Curve) -> str:
    lasts = []
    for number, (key, points) in enumerate(curve.series.items()):
        last = number_text(points[-1][1], percent=curve.percent) if points else ""
        lasts.append(f'<span><i class="s{number % 3}"></i>{escape(key)} {last}</span>')
    return (
        f'<div class="card"><h3>{escape(curve.title)}</h3>{chart(curve)}'
        f'<div class="legend">{"".join(lasts)}</div></div>'
    )


def preparing(trial: TrialReport) -> str:
    """Renders a small loss curve per preparing phase; a cached one is marked as such."""
    cards = []
    for phase in trial.preparing:
        metrics = table(phase.metrics)
        series: Table = find(metrics, LOSS)
        if series:
            cards.append(_card(Curve(title=f"{phase.name}: loss", series=series)))
            continue
        text = "nothing written yet" if phase.files.root.exists() else "taken from the cache"
        cards.append(
            f'<div class="card"><h3>{escape(phase.name)}</h3><p class="empty">{text}</p></div>'
        )
    return section("Preparing phases", f'<div class="grid">{"".join(cards)}</div>' if cards else "")
