"""Selects the curves of the report from the metrics. Pure: rows in, named series out.

A curve is found by patterns on metric names, the most specific first, so that other interfaces and
experiments get curves too; metrics without a pattern are shown under "all other metrics".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from realsys.observability.metrics import WALL_CLOCK_PREFIXES

Points = tuple[tuple[int, float], ...]
Table = dict[str, Points]

MAX_SERIES = 3
# Told beside the training's own figure, not instead.
_ASIDE = ("eval*", "auto_eval/*", "*/first_minibatch/*")


@dataclass(frozen=True, kw_only=True)
class CurveKind:
    """A curve's title and the patterns of its metrics."""

    title: str
    patterns: tuple[str, ...]
    without: tuple[str, ...] = ()
    percent: bool = False


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A chart to draw: one or more series under one title."""

    title: str
    series: Table
    percent: bool = False


REWARD = CurveKind(
    title="Reward",
    patterns=(
        "critic/score/mean",
        "*/reward/mean",
        "*/reward",
        "reward",
        "*/reward_mean",
        "*/score*",
        "*reward*",
    ),
    without=("*std", "*min", "*max", "*kl*", "*clip*", "*coef*", *_ASIDE),
)
ACCURACY = CurveKind(
    title="Held-out accuracy",
    patterns=("eval/accuracy", "eval*/accuracy", "*eval*accuracy*", "*accuracy*"),
    without=("auto_eval/*",),
    percent=True,
)
HELD_OUT_REWARD = CurveKind(
    title="Held-out mean reward", patterns=("eval/mean_reward", "auto_eval/*mean_reward")
)
SAVED_ACCURACY = CurveKind(
    title="Accuracy of saved checkpoints", patterns=("auto_eval/*accuracy",), percent=True
)
KINDS = (
    REWARD,
    ACCURACY,
    HELD_OUT_REWARD,
    SAVED_ACCURACY,
    CurveKind(title="pass@k of saved checkpoints", patterns=("auto_eval/*pass@*",), percent=True),
    CurveKind(
        title="KL to the reference",
        patterns=("*/kl_ref/per_sequence", "*/kl_ref*", "*kl_to_ref*", "*ref_kl*", "*/kl", "kl"),
        without=("*coef*", "*ctl*", "*reward*", *_ASIDE),
    ),
    CurveKind(
        title="Entropy",
        patterns=("*/entropy", "entropy", "*entropy*"),
        without=("*coef*", "*loss*", *_ASIDE),
    ),
    CurveKind(
        title="Loss",
        patterns=("loss", "*/loss", "*/policy_loss", "*/actor_loss", "*/pg_loss"),
        without=("*critic*", "*value*", *_ASIDE),
    ),
    CurveKind(
        title="Value loss",
        patterns=("*/value_loss", "critic*/loss", "*value_loss*", "*vf_loss*"),
        without=_ASIDE,
    ),
    CurveKind(
        title="Response length",
        patterns=(
            "response_length/mean",
            "*/response_length/mean",
            "*/response_length",
            "*response_len*",
            "*gen_len*",
            "*answer_len*",
            "*seq_len*",
        ),
        without=("*min", "*max", "*std", *_ASIDE),
    ),
    CurveKind(
        title="Clip ratio",
        patterns=(
            "*/pg_clipfrac",
            "actor*/clip_fraction",
            "actor*/*clip_ratio*",
            "*clip_frac*",
            "*clip_ratio*",
        ),
        without=("*value*", "*dual*", "*_lower", "critic*", *_ASIDE),
        percent=True,
    ),
)
LOSS = CurveKind(title="Loss", patterns=("loss", "*/loss", "*loss*"))


def table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Returns metric → (step, value) in order of steps. Text is skipped, except "nan" and "inf"."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        for key, value in row.items():
            number = _number(value)
            if key != "step" and number is not None:
                points.setdefault(key, {})[int(row["step"])] = number
    return {key: tuple(sorted(found.items())) for key, found in points.items()}


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def find(metrics: Table, kind: CurveKind) -> Table:
    """Returns the series of the first pattern that any metric matches, at most three; else empty.

    Of series with equal values (calls that report on the same batch) only the first is used.
    """
    for pattern in kind.patterns:
        keys = [
            key
            for key in sorted(metrics)
            if fnmatchcase(key, pattern)
            and not key.startswith(WALL_CLOCK_PREFIXES)
            and not any(fnmatchcase(key, w) for w in kind.without)
        ]
        if keys:
            different = {metrics[key]: key for key in reversed(keys)}
            chosen = sorted(different.values())[:MAX_SERIES]
            return {key: metrics[key] for key in chosen}
    return {}


def main_curves(metrics: Table, step_seconds: Points) -> list[Curve]:
    """Returns the main curves for which there are metrics; step time comes from the events."""
    curves = [
        Curve(title=kind.title, series=series, percent=kind.percent)
        for kind in KINDS
        if (series := find(metrics, kind))
    ]
    if step_seconds:
        curves.append(Curve(title="Step time, seconds", series={"step": step_seconds}))
    return curves


def other_curves(metrics: Table, shown: Sequence[Curve]) -> list[Curve]:
    """Returns a curve for each metric that is not in ``shown``."""
    taken = {key for curve in shown for key in curve.series}
    return [Curve(title=key, series={key: metrics[key]}) for key in sorted(metrics.keys() - taken)]


def first_and_last(metrics: Table, kind: CurveKind) -> tuple[float, float] | None:
    """Returns the first and last finite value of a kind's first series; None if there is none."""
    for points in find(metrics, kind).values():
        finite = [value for _, value in points if math.isfinite(value)]
        if finite:
            return finite[0], finite[-1]
    return None


def thinned(points: Points, limit: int = 400) -> Points:
    """Returns at most ``limit`` points: means of equal groups. A group with a NaN stays NaN."""
    if len(points) <= limit:
        return points
    size = math.ceil(len(points) / limit)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return tuple((g[-1][0], sum(v for _, v in g) / len(g)) for g in groups)


def smoothed(points: Points) -> Points:
    """Returns the mean over a twentieth of the points on either side, which does not lag.

    Near the ends the window shrinks equally on both sides. NaN and infinities are excluded.
    """
    finite = [p for p in points if math.isfinite(p[1])]
    reach = max(1, len(finite) // 20)
    result = []
    for i, (step, _) in enumerate(finite):
        near = min(reach, i, len(finite) - 1 - i)
        window = finite[i - near : i + near + 1]
        result.append((step, sum(value for _, value in window) / len(window)))
    return tuple(result)
