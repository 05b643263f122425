"""Statistics of a simulated run: critical path, idle workers (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from realsys.planner.time.simulated_timeline import SimulatedSpan, Timeline


@dataclass(frozen=True, kw_only=True)
class PathPart:
    """A stretch of the critical path: what ran, and for how long."""

    name: str
    step: int
    worker: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Statistics of a timeline.

    Attributes:
        step_s: seconds a step, wall_s: from its first request to its last reply.
        call_s: per call, from its first worker's start to its last worker's end, mean over steps.
        path: the critical path through the last step, first part first.
        idle: per worker, the share of the time in which it neither computes nor moves weights.
    """

    step_s: float
    wall_s: float
    call_s: Mapping[str, float]
    path: tuple[PathPart, ...]
    idle: tuple[float, ...]

    @property
    def mean_idle(self) -> float:
        """Idle fraction over all workers."""
        return sum(self.idle) / len(self.idle)


def figures(timeline: Timeline) -> StepFigures:
    """Computes the statistics of a timeline."""
    total = timeline.step_ends[-1]
    busy = [0.0] * timeline.num_workers
    lasts: dict[tuple[str, int], list[float]] = {}
    for span in timeline.spans:
        busy[span.worker] += span.end - span.busy_from
        if span.kind == "call":
            known = lasts.setdefault((span.name, span.step), [span.start, span.end])
            known[0], known[1] = min(known[0], span.start), max(known[1], span.end)
    calls: dict[str, list[float]] = {}
    for (name, _), (start, end) in lasts.items():
        calls.setdefault(name, []).append(end - start)
    return StepFigures(
        step_s=timeline.step_s,
        wall_s=timeline.wall_s,
        call_s={name: sum(each) / len(each) for name, each in calls.items()},
        path=critical_path(timeline),
        idle=tuple(1 - b / total if total else 0.0 for b in busy),
    )


def critical_path(timeline: Timeline) -> tuple[PathPart, ...]:
    """Traces from the end of the last step back to its beginning, each part the cause of the next.

    Time between two parts (messages, the master) belongs to neither.
    """
    last_step = len(timeline.step_ends)
    begin = timeline.step_starts[-1]
    index = _ender(timeline.spans, last_step)
    found: list[PathPart] = []
    while index >= 0:
        span = timeline.spans[index]
        if span.end <= begin:
            break
        found.append(
            PathPart(
                name=span.name,
                step=span.step,
                worker=span.worker,
                seconds=span.end - max(span.busy_from, begin),
            )
        )
        index = span.cause
    return tuple(reversed(found))


def _ender(spans: Sequence[SimulatedSpan], step: int) -> int:
    own = [i for i, s in enumerate(spans) if s.step == step]
    return max(own, key=lambda i: (spans[i].end, -i))
