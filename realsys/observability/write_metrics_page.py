"""Writes docs/metrics.md from the catalogue of metrics.

    python -m realsys.observability.write_metrics_page

Run it after a metric was added or renamed; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from realsys.observability.metric_catalogue import GROUPS, METRICS, Metric

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGINNING = """# Metrics

What each key of `metrics.jsonl` means, where it should be, and what to look at if it isn't. A range is
where runs that learn usually are, not a promise: compare with the first steps of your own. A dash: any
value is fine. In the last column "same" says that verl writes it under this name with this definition; a
text names verl's metric and how it differs. Written by `python -m
realsys.observability.write_metrics_page`.

A call named otherwise than `actor_train` and `critic_train`, and an interface of your own, writes
`<call>/<statistic>`, also where a name below is given without a call.
"""
END = """
## Rows of earlier revisions

`realsys report`, `status`, `replay` and `Trial.metrics()` show them under today's names, also of a trial
that was resumed since. Files keep the former ones; TensorBoard and Weights & Biases draw such a trial as
two curves.

| today | before |
|---|---|
"""


def text() -> str:
    """Renders the page."""
    parts = [BEGINNING]
    for title, metrics in GROUPS.items():
        parts.append(f"\n## {title}\n\n| metric | meaning | healthy | otherwise | verl |\n")
        parts += ["|---|---|---|---|---|\n", *map(_row, metrics)]
    renamed = [f"| `{m.name}` | `{m.written}` |\n" for m in METRICS if m.written]
    rest = "| `actor/…`, `critic/…`, all others | `actor_train/…`, `critic_train/…` |\n"
    return "".join([*parts, END, *renamed, rest])


def _row(metric: Metric) -> str:
    unit = f" ({metric.unit})" if metric.unit else ""

    columns = (metric.meaning + unit, metric.healthy or "–", metric.otherwise, metric.verl)
    return f"| `{metric.name}` | {' | '.join(columns)} |\n"


if __name__ == "__main__":
    PAGE.write_text(text())
