"""The report's parts, each from the trial's story to HTML. Every text of the trial is escaped."""

from __future__ import annotations

import time
from html import escape

from realsys.api.errors import RealsysError
from realsys.observability.curves import (
    ACCURACY,
    LOSS,
    REWARD,
    Curve,
    Table,
    find,
    first_and_last,
    main_curves,
    other_curves,
    table,
)
from realsys.observability.graph_picture import graph_png, graph_text
from realsys.observability.option_rows import OptionRow, option_rows
from realsys.observability.report_page import duration_text, picture, rows_table, section
from realsys.observability.step_picture import step_png
from realsys.observability.svg_chart import chart, number_text
from realsys.observability.timeline import (
    finished_steps,
    mean_ratio,
    mfc_summary,
    role_of,
    step_rows,
    typical_step,
)
from realsys.observability.trial_story import Outcome, TrialStory, without_colours

BADGE = {
    Outcome.COMPLETED: "good",
    Outcome.RUNNING: "info",
    Outcome.STOPPED: "warn",
    Outcome.FAILED: "bad",
    Outcome.LOST: "bad",
    Outcome.UNKNOWN: "warn",
}


def headline(story: TrialStory) -> str:
    """Trial, result and the figures that one looks for first."""
    metrics = table(story.main.metrics)
    figures = [_steps_figure(story), _duration_figure(story)]
    if ends := first_and_last(metrics, ACCURACY):
        figures.append(_accuracy_figure(*ends))
    if ends := first_and_last(metrics, REWARD):
        change = f"reward, from {number_text(ends[0])}"
        figures.append((number_text(ends[1]), change))
    if (ratio := mean_ratio(story.main.events)) is not None:
        figures.append((f"{ratio * 100:.0f} %", "of step time in model function calls"))
    cells = "".join(
        f'<div class="card figure"><b>{escape(big)}</b><span>{escape(small)}</span></div>'
        for big, small in figures
    )
    badge = f'<span class="badge {BADGE[story.outcome]}">{story.outcome.value}</span>'
    return (
        f"<header><h1>{escape(story.trial)} {badge}</h1>"
        f'<p class="soft small">{escape(_origin(story))}</p></header>'
        f'<div class="figures">{cells}</div>'
    )


def _origin(story: TrialStory) -> str:
    parts = []
    if story.record:
        parts.append(f"launched {_clock(story.record.created_at)} by {story.record.user}")
        parts.append(f"on {story.record.launch_host}, cluster {story.record.cluster}")
        if story.record.realsys_version:
            parts.append(f"realsys {story.record.realsys_version}")
    if len(story.attempts) > 1:
        parts.append(f"{len(story.attempts)} attempts")
    return " · ".join(parts) or str(story.root)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _steps_figure(story: TrialStory) -> tuple[str, str]:
    done = finished_steps(story.main.events)
    rows = [row["step"] for row in story.main.metrics]
    last = max([*done, *rows], default=0)
    plan = story.main_plan
    total = plan.config.exp_ctrl.benchmark_steps if plan else None
    return str(last), f"steps of {total}" if total else "steps"


def _duration_figure(story: TrialStory) -> tuple[str, str]:
    if story.duration_s is None:
        return "–", "duration"
    return duration_text(story.duration_s), "duration, all phases"


def _accuracy_figure(first: float, last: float) -> tuple[str, str]:
    points = (last - first) * 100
    return (
        f"{last * 100:.1f} %",
        f"held-out accuracy, {points:+.1f} points from {first * 100:.1f} %",
    )


def failure_box(story: TrialStory) -> str:
    """Which worker, where, why, its last log lines; nothing when nothing failed."""
    if story.failure is None:
        return ""
    first = story.failure
    place = f"{first.worker} on {first.host}, process {first.pid}, {_clock(first.at)}"
    parts = [f"<p><b>{escape(first.worker)}</b> {escape(first.why)}</p>"]
    parts.append(f'<p class="small soft">{escape(place)}</p>')
    if first.fix:
        parts.append(f"<p>What to do: {escape(first.fix)}</p>")
    if first.log_tail:
        lines = "\n".join(without_colours(line) for line in first.log_tail)
        log = f"Last lines of <code>{escape(first.log)}</code>" if first.log else "Last log lines"
        parts.append(f'<p class="small">{log}</p><pre class="log">{escape(lines)}</pre>')
    if story.other_failures:
        others = rows_table(
            ("worker", "why"),
            [(escape(f.worker), escape(f.why)) for f in story.other_failures],
        )
        count = len(story.other_failures)
        parts.append(f"<details><summary>{count} that followed</summary>{others}</details>")
    return section("What failed first", f'<div class="box bad">{"".join(parts)}</div>')


def notes_box(story: TrialStory) -> str:
    """Files that could not be read."""
    if not story.notes:
        return ""
    lines = "".join(f"<p>{escape(note)}</p>" for note in story.notes)
    return section("Not readable", f'<div class="box warn small">{lines}</div>')


def curves(story: TrialStory) -> str:
    """The main curves, then every other metric, folded."""
    metrics = table(story.main.metrics)
    seconds = tuple((int(r["step"]), r["wall_s"]) for r in step_rows(story.main.events))
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


def preparing(story: TrialStory) -> str:
    """A small loss curve per phase that made the start; one that was cached says so."""
    cards = []
    for phase in story.preparing:
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


def time_spent(story: TrialStory) -> str:
    """Seconds and share of each call, and the picture of a typical step."""
    events = story.main.events
    summary, ratio = mfc_summary(events), mean_ratio(events)
    if not summary or ratio is None:
        return ""
    roles = mfc_roles(story)
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
        gantt = picture(step_png(events, step, roles=roles), f"timeline of step {step}")
    return section("Where the time went", words + f'<div class="card">{spent}</div><br>{gantt}')


def mfc_roles(story: TrialStory) -> dict[str, str]:
    """Call → role, as planned."""
    plan = story.main_plan
    return {rpc.name: rpc.role for rpc in plan.config.model_rpcs} if plan else {}


def dataflow(story: TrialStory) -> str:
    """Picture of the graph, and its text for those who can't see it."""
    plan = story.main_plan
    if plan is None:
        return ""
    try:
        graph = plan.config.graph()
    except RealsysError as error:
        return section("Dataflow", f'<p class="empty">{escape(str(error))}</p>')
    text = f"<details><summary>As text</summary><pre>{escape(graph_text(graph))}</pre></details>"
    return section("Dataflow", picture(graph_png(graph), "dataflow graph") + text)


def settings(story: TrialStory) -> str:
    """What differs from the defaults; every option, folded."""
    if story.plan is None or not story.plan.options:
        return ""
    rows = option_rows(story.plan.options, story.plan.experiment_name)
    changed = [row for row in rows if row.differs]
    if changed:
        body = _option_table(changed)
    elif any(row.default is not None for row in rows):
        body = "<p>All options have their defaults.</p>"
    else:
        body = '<p class="soft">The defaults of this experiment are not known here.</p>'
    full = f"<details><summary>All {len(rows)} options</summary>{_option_table(rows)}</details>"
    return section("Settings", f'<div class="card">{body}{full}</div>')


def _option_table(rows: list[OptionRow]) -> str:
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
