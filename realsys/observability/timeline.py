"""Analyses where the time of a step went: events in, rows and traces out. Pure but for
``write_perfetto``.

step_picture.py draws the picture of one step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from realsys.api.errors import DataError
from realsys.observability.events import Event, MfcEvent, MoveEvent, PeriodicEvent, StepEvent
from realsys.observability.jsonl import write_errors


@dataclass(frozen=True, kw_only=True)
class MfcTiming:
    """One call of one step. A call on several workers counts once, with its slowest worker's time."""

    wait_s: float  # from inputs complete to request sent
    wall_s: float  # from first request to last reply
    compute_s: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """One finished step. ``ratio`` exceeds 1 if calls ran at the same time."""

    wall_s: float
    compute_s: float
    ratio: float
    per_mfc: Mapping[str, MfcTiming]


@dataclass(frozen=True, kw_only=True)
class MfcSummary:
    """A call's mean over steps; ``share`` is its compute time over the steps' wall time."""

    name: str
    steps: int
    mean_s: float
    share: float
    wait_s: float
    tokens_per_s: float


def finished_steps(events: Iterable[Event]) -> list[int]:
    """Returns the steps that have ended, in order."""
    return sorted({e.step for e in events if isinstance(e, StepEvent)})


def overhead(events: Iterable[Event], step: int) -> StepTiming:
    """Returns how much of a step's wall time its calls computed.

    Raises:
        DataError: the step has not finished.
    """
    events = list(events)
    steps = [e for e in events if isinstance(e, StepEvent) and e.step == step]
    if not steps:
        known = finished_steps(events)
        raise DataError(
            f"step {step} has not finished",
            where="events",
            fix=f"use a step from {known[0]} to {known[-1]}" if known else "wait for a first step",
        )
    wall_s = steps[-1].end - steps[-1].start
    calls: dict[str, list[MfcEvent]] = {}
    for event in events:
        if isinstance(event, MfcEvent) and event.step == step:
            calls.setdefault(event.name, []).append(event)
    per_mfc = {name: _timing(parts) for name, parts in calls.items()}
    compute_s = sum(t.compute_s for t in per_mfc.values())
    ratio = compute_s / wall_s if wall_s > 0 else 0.0
    return StepTiming(wall_s=wall_s, compute_s=compute_s, ratio=ratio, per_mfc=per_mfc)


def _timing(parts: Sequence[MfcEvent]) -> MfcTiming:
    start = min(e.start for e in parts)
    computed: dict[str, float] = {}
    for part in parts:  # several of a worker with dynamic sampling, whose rounds run a call again
        computed[part.worker] = computed.get(part.worker, 0.0) + part.compute_s
    return MfcTiming(
        wait_s=start - min(e.queued for e in parts),
        wall_s=max(e.end for e in parts) - start,
        compute_s=max(computed.values()),
        tokens=sum(e.tokens for e in parts),
    )


def step_timings(events: Iterable[Event]) -> dict[int, StepTiming]:
    """Returns how each finished step spent its time, in order; reads the events once."""
    by_step: dict[int, list[Event]] = {}
    for event in events:
        by_step.setdefault(event.step, []).append(event)
    return {
        step: overhead(own, step)
        for step, own in sorted(by_step.items())
        if any(isinstance(e, StepEvent) for e in own)
    }


def step_rows(events: Iterable[Event]) -> list[dict[str, float]]:
    """Returns a row per finished step: ``step``, ``wall_s``, ``compute_s``, ``ratio``, ``<mfc>_s`` …"""
    return [
        {
            "step": step,
            "wall_s": t.wall_s,
            "compute_s": t.compute_s,
            "ratio": t.ratio,
            **{f"{name}_s": m.compute_s for name, m in t.per_mfc.items()},
        }
        for step, t in step_timings(events).items()
    ]


def mean_ratio(events: Iterable[Event]) -> float | None:
    """Returns compute time over wall time of all finished steps together; None before the first."""
    timings = step_timings(events).values()
    wall_s = sum(t.wall_s for t in timings)
    return sum(t.compute_s for t in timings) / wall_s if wall_s > 0 else None


def mfc_summary(events: Iterable[Event]) -> list[MfcSummary]:
    """Returns a row per call over all finished steps, in the order in which calls first ran."""
    timings = step_timings(events)
    wall_s = sum(t.wall_s for t in timings.values())
    calls: dict[str, list[MfcTiming]] = {}
    for timing in timings.values():
        for name, call in timing.per_mfc.items():
            calls.setdefault(name, []).append(call)
    rows = []
    for name, parts in calls.items():
        compute_s = sum(p.compute_s for p in parts)
        rows.append(
            MfcSummary(
                name=name,
                steps=len(parts),
                mean_s=compute_s / len(parts),
                share=compute_s / wall_s if wall_s > 0 else 0.0,
                wait_s=fmean(p.wait_s for p in parts),
                tokens_per_s=sum(p.tokens for p in parts) / compute_s if compute_s > 0 else 0.0,
            )
        )
    return rows


def typical_step(events: Iterable[Event]) -> int | None:
    """Returns the finished step whose wall time is nearest the median; the first one (warm-up) only if
    alone."""
    walls = {step: t.wall_s for step, t in step_timings(events).items() if t.per_mfc}
    later = dict(list(walls.items())[1:]) or walls
    if not later:
        return None
    middle = median(later.values())
    return min(later, key=lambda step: (abs(later[step] - middle), step))


def role_of(mfc: str, roles: Mapping[str, str] | None = None) -> str:
    """Returns a call's role: from ``roles`` (call → role), else its name up to the first underscore."""
    return (roles or {}).get(mfc) or mfc.partition("_")[0]


def perfetto_trace(
    events: Sequence[Event], *, roles: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns Chrome trace JSON: a process per worker, a thread per role; times in µs from the first
    event."""
    starts = [e.queued if isinstance(e, MfcEvent) else e.start for e in events]
    zero = min(starts, default=0.0)
    lanes: dict[str, dict[str, int]] = {"master": {"steps": 0, "periodic": 1}}
    trace: list[dict[str, Any]] = []
    for event in events:
        worker, role, name, args = _lane(event, roles)
        threads = lanes.setdefault(worker, {})
        place = {
            "pid": list(lanes).index(worker),
            "tid": threads.setdefault(role, len(threads)),
            "ts": round((event.start - zero) * 1e6),
            "dur": round((event.end - event.start) * 1e6),
        }
        trace.append({"ph": "X", "name": name, "cat": role, "args": args, **place})
    names: list[dict[str, Any]] = []
    for pid, (worker, threads) in enumerate(lanes.items()):
        names.append(_name("process_name", pid, 0, worker))
        names += [_name("thread_name", pid, tid, role) for role, tid in threads.items()]
    return {"traceEvents": names + trace, "displayTimeUnit": "ms"}


def _lane(
    event: Event, roles: Mapping[str, str] | None
) -> tuple[str, str, str, dict[str, float | int]]:
    if isinstance(event, MfcEvent):
        waited_s = event.start - event.queued
        args = {
            "step": event.step,
            "compute_s": event.compute_s,
            "waited_s": waited_s,
            "tokens": event.tokens,
        }
        return event.worker, role_of(event.name, roles), event.name, args
    if isinstance(event, MoveEvent):
        return event.worker, "weights", event.name, {"step": event.step, "bytes": event.num_bytes}
    if isinstance(event, PeriodicEvent):
        return "master", "periodic", event.kind, {"step": event.step}
    return "master", "steps", f"step {event.step}", {"step": event.step}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def write_perfetto(
    events: Sequence[Event], path: Path, *, roles: Mapping[str, str] | None = None
) -> None:
    """Writes the trace; it opens in ui.perfetto.dev and chrome://tracing."""
    with write_errors(path):
        path.write_text(json.dumps(perfetto_trace(events, roles=roles)) + "\n", encoding="utf-8")
