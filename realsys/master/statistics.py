"""Converts a step's report to numbers: the metrics line and the live view's headline (pure)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean

from realsys.api.basics.reward import CORRECT, PARTS, is_count
from realsys.api.dataflow import DataflowGraph
from realsys.master.graph.function_executor import StepReport
from realsys.master.graph.model_function_call import CallReport
from realsys.observability.metric_catalogue import current_name

# What a person looks at first, by the end of a metric's name; the first that there is counts.
HEADLINES = {
    "reward": ("critic/score/mean", "/reward/mean", "rollout/reward"),
    "kl": ("/kl_ref/per_sequence",),
    "accuracy": ("eval/accuracy",),
    "held_out_reward": ("eval/mean_reward",),
    "loss": ("/loss",),
}


def metrics_row(report: StepReport, graph: DataflowGraph, *, epoch: int) -> dict[str, float]:
    """Returns every call's statistics under their metrics' names, and times under ``time/`` and ``perf/``.

    Everything outside those two is a function of the seed.
    """
    row: dict[str, float] = {"epoch": epoch}
    compute_s = 0.0
    for name, call in report.calls.items():
        row |= {current_name(f"{name}/{key}"): value for key, value in call.stats.items()}
        row |= {f"{name}/reward/{part}": mean for part, mean in reward_parts(call).items()}
        row[f"time/{name}_s"] = call.compute_s
        if call.moves:
            row[f"time/{name}_weights_s"] = call.moving_s
        compute_s += call.compute_s
    row["time/step_s"] = report.wall_s
    wall_s = max(report.wall_s, 1e-6)  # the clock may have been set back
    row["perf/compute_ratio"] = compute_s / wall_s
    if report.sampled is not None:
        row |= report.sampled.metrics()
    row |= {f"perf/idle/{pool}": share for pool, share in report.idle.items()}
    row["perf/tokens_per_s"] = report.calls[graph.nodes[0].name].tokens / wall_s
    return row


def reward_parts(call: CallReport) -> dict[str, float]:
    """Returns the mean of each named part of the scores that a call gave, over the answers that have it; of
    parts that are counts (``raised``) their sum."""
    given: dict[str, list[float]] = defaultdict(list)
    for _, answers in _scored(call):
        for parts in answers:
            for part, value in parts.items():
                given[part].append(value)
    return {
        part: sum(values) if is_count(part) else fmean(values)
        for part, values in sorted(given.items())
    }


def success_rates(report: StepReport, source_of: Callable[[str], str]) -> dict[str, float]:
    """Returns which share of the answers to each datapoint is correct, of those that were scored.

    Args:
        source_of: id → source of the mixture.
    """
    found = {}
    for call in report.calls.values():
        for id, answers in _scored(call):
            name = f"{source_of(id)}/{CORRECT}"
            if correct := [parts[name] for parts in answers if name in parts]:
                found[id] = fmean(correct)
    return found


def _scored(call: CallReport) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """Yields the datapoints that a call scored by named parts, with those of each answer."""
    for reply in (reply for run in call.runs for reply in run.replies.values()):
        if reply.is_head and reply.meta is not None:
            for id, text in zip(reply.meta.ids, reply.meta.metadata.get(PARTS, ()), strict=False):
                yield id, json.loads(text)


def headline(row: Mapping[str, float], last: Mapping[str, float]) -> dict[str, float]:
    """Returns reward, KL, held-out figures and loss from ``row``, else their last values."""
    found = dict(last)
    for name, endings in HEADLINES.items():
        values = [v for ending in endings for key, v in row.items() if key.endswith(ending)]
        if values:
            found[name] = values[0]
    return found
