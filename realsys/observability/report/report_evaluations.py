"""Evaluations in the report: a table of those of saved checkpoints, failed ones with their reasons.

Also sample answers of the first and the last evaluation of the run, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from realsys.observability.evaluations import newest_rows
from realsys.observability.report.report_page import duration_text, rows_table, section
from realsys.observability.report.svg_chart import number_text
from realsys.observability.report.trial_report import TrialReport

MANY = 50
SHOWN = 10
_LONGEST = 1500  # characters of a text; a page of samples must stay readable

Sample = Mapping[str, Any]


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
        reason = f'<span class="bad">failed</span> {escape(str(row.get("error") or ""))}'
        text = f"{text}<br>{reason}" if text else reason
    seconds = row.get("seconds")
    spent = duration_text(float(seconds)) if isinstance(seconds, int | float) else ""
    return str(row["step"]), escape(str(row.get("role"))), text, spent, str(row.get("tries", ""))


def _number(value: Any) -> str:
    return number_text(float(value)) if isinstance(value, int | float) else escape(str(value))


def samples(trial: TrialReport) -> str:
    """Renders the first prompts in file order, so that none is selected by its answer."""
    rows = trial.main.samples
    if not rows:
        return ""
    steps = sorted({row["step"] for row in rows})
    before = {str(r.get("prompt")): r for r in rows if r["step"] == steps[0]}
    after = {str(r.get("prompt")): r for r in rows if r["step"] == steps[-1]}
    if len(steps) == 1:
        cards = [_card(p, [(steps[0], r)]) for p, r in list(before.items())[:SHOWN]]
        return section("Sample answers", f"<p>After step {steps[0]}.</p>{''.join(cards)}")
    shared = [p for p in before if p in after]
    cards = [
        _card(p, [(steps[0], before[p]), (steps[-1], after[p])]) for p in shared[:SHOWN]
    ]  # fmt: skip
    if not shared:
        cards = [_card(p, [(steps[-1], r)]) for p, r in list(after.items())[:SHOWN]]
    return section(
        "Sample answers, before and after", _count(before, after, shared) + "".join(cards)
    )


def _count(before: Mapping[str, Sample], after: Mapping[str, Sample], shared: Sequence[str]) -> str:
    def turned(was: bool, now: bool) -> int:
        return sum(
            bool(before[p].get("correct")) is was and bool(after[p].get("correct")) is now
            for p in shared
        )

    return (
        f"<p>Of {len(shared)} questions asked both times: {turned(False, True)} went from wrong to "
        f"right, {turned(True, False)} from right to wrong, {turned(True, True)} stayed right, "
        f"{turned(False, False)} stayed wrong. The first {min(SHOWN, len(shared))}:</p>"
    )


def _card(prompt: str, sides: Sequence[tuple[int, Sample]]) -> str:
    answer = escape(str(sides[0][1].get("answer", "")))
    expected = f' <span class="soft small">answer: {answer}</span>' if answer else ""
    columns = "".join(_side(step, sample) for step, sample in sides)
    return (
        f'<div class="card sample"><p class="answer"><b>{escape(_cut(prompt))}</b>{expected}</p>'
        f'<div class="sides">{columns}</div></div>'
    )


def _side(step: int, sample: Sample) -> str:
    right = bool(sample.get("correct"))
    tick = (
        f'<span class="tick {"yes" if right else "no"}">{"✓ right" if right else "✗ wrong"}</span>'
    )
    text = escape(_cut(str(sample.get("response", ""))))
    return f'<div><h3>step {step} {tick}</h3><div class="answer">{text}</div></div>'


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text)} characters)"
