"""Every metric of real runs has its line in the catalogue, every line is written by something, and the page
is written from it.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from realsys.observability.metric_catalogue import (
    METRICS,
    Metric,
    current_name,
    with_current_names,
)
from realsys.observability.metrics import read_metrics
from realsys.observability.write_metrics_page import PAGE, text

ROOT = Path(__file__).parents[3]
RUNS = json.loads((ROOT / "tests/by_hand/acceptance/results/bits.json").read_text())["runs"]
ADD = "add a line to realsys/observability/metric_catalogue.py, then write_metrics_page"


@cache
def metric_of(name: str) -> Metric | None:
    """Returns the catalogue's row of a metric; None if it has none."""
    return next((metric for metric in METRICS if _pattern(metric.name).fullmatch(name)), None)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    several = re.sub(r"<(part|figure)>", ".+", re.escape(name))
    return re.compile(re.sub(r"<\w+>", "[^/]+", several))


@pytest.mark.parametrize("run", RUNS)
def test_every_metric_of_a_real_run_is_in_the_catalogue(run: str) -> None:
    """PPO, GRPO, split, asynchronous and replayed runs, with evaluation and the fine-tuning before."""
    for phase in RUNS[run]["phases"].values():
        unknown = [name for name in with_current_names(phase["metrics"]) if metric_of(name) is None]
        assert unknown == [], ADD


def test_every_statistic_of_an_interface_is_in_the_catalogue() -> None:
    """Also those that only some settings have: `reward/overlong_penalty`, `groups/compared`, ..."""
    found = {
        name
        for file in (ROOT / "realsys/interfaces").rglob("*.py")
        for name in re.findall(
            r'^\s+(?:\S.*)?f?"([a-z_0-9]+/[a-z_0-9/]+)":?', file.read_text(), re.M
        )
    }
    assert {"mismatch/kl_k3", "staleness/max", "groups/compared", "return/mean"} <= found
    ways = ("actor_train/", "critic_train/", "eval/")
    names = {name: [metric_of(current_name(way + name)) for way in ways] for name in found}
    assert [name for name, metrics in names.items() if not any(metrics)] == [], ADD


def test_every_line_of_the_catalogue_is_written_by_something() -> None:
    files = [p for p in (ROOT / "realsys").rglob("*.py") if "observability" not in p.parts]
    words = {word for p in files for word in re.findall(r"\w+", p.read_text())}
    for metric in METRICS:
        written = metric.written or metric.name
        fixed = re.sub(r"<\w+>", "/", written.partition("/")[2] or written)
        missing = set(filter(None, fixed.split("/"))) - words
        assert not missing, f"{metric.name}: nothing writes {missing}; remove its line"


def test_no_metric_is_there_twice_or_hidden_by_one_before() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    hidden = [m.name for m in METRICS if "<" not in m.name and metric_of(m.name) is not m]
    assert hidden == []


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == text(), "python -m realsys.observability.write_metrics_page"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("actor_train/reward/mean", "critic/score/mean"),
        ("actor_train/clip_ratio", "actor/pg_clipfrac"),
        ("critic_train/value_loss", "critic/vf_loss"),
        ("actor_train/mismatch/ess", "actor/mismatch/ess"),
        ("my_call/clip_ratio", "my_call/clip_ratio"),
        ("critic/score/mean", "critic/score/mean"),
    ],
)
def test_a_former_name_has_todays(written: str, name: str) -> None:
    assert current_name(written) == name
    assert current_name(name) == name


def test_rows_of_an_older_revision_are_read_under_todays_names(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"actor_train/reward/mean": 0.5, "step": 1}\n{"critic/score/mean": 1.0, "step": 2}\n'
    )
    assert [row["critic/score/mean"] for row in read_metrics(path)] == [0.5, 1.0]


def test_a_metric_of_ones_own_interface_is_not_in_the_catalogue() -> None:
    assert metric_of("my_call/anything") is None
    assert metric_of("time/my_call_s") is not None
