"""Text chart of a simulated step: one line per group of equal workers, bars with call names (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realsys.planner.allocation import workers_text
from realsys.planner.time.simulated_timeline import SimulatedSpan, Timeline


@dataclass(frozen=True)
class BarPiece:
    """A stretch of a line. ``call`` is "" if nothing runs."""

    text: str
    call: str


@dataclass(frozen=True)
class Lane:
    """A line of the chart and its workers."""

    label: str
    pieces: tuple[BarPiece, ...]

    @property
    def text(self) -> str:
        """The line without colours."""
        return f"{self.label} │{''.join(p.text for p in self.pieces)}│"


def gantt(timeline: Timeline, *, width: int = 100) -> list[Lane]:
    """Charts the last step but one (or the only one), so that a step ahead is visible as well.

    ``width`` is that of a whole line.
    """
    step = max(0, len(timeline.step_ends) - 2)
    begin, end = timeline.step_starts[step], timeline.step_ends[step]
    groups: dict[tuple[object, ...], list[int]] = {}
    for worker in range(timeline.num_workers):
        own = [s for s in timeline.spans if s.worker == worker and s.end > begin and s.start < end]
        key = tuple((s.name, s.start, s.busy_from, s.end) for s in own)
        groups.setdefault(key, []).append(worker)
    labels = [f"workers {workers_text(group)}" for group in groups.values()]
    room = max(20, width - max(map(len, labels)) - 3)
    longest = max(map(len, labels))
    return [
        Lane(label.ljust(longest), _line(timeline.spans, group[0], begin, end, room, step + 1))
        for label, group in zip(labels, groups.values(), strict=True)
    ]


def _line(
    spans: Sequence[SimulatedSpan], worker: int, begin: float, end: float, room: int, step: int
) -> tuple[BarPiece, ...]:
    scale = room / (end - begin) if end > begin else 0.0
    pieces: list[BarPiece] = []
    at = 0
    for span in sorted((s for s in spans if s.worker == worker), key=lambda s: s.start):
        first, last = (
            min(room, max(0, round((t - begin) * scale))) for t in (span.busy_from, span.end)
        )
        first = max(first, at)
        if last <= first:
            continue
        if first > at:
            pieces.append(BarPiece("·" * (first - at), ""))
        name = span.name if span.kind == "call" else "⇄"
        if span.step > step:
            name += " +1"
        pieces.append(BarPiece(_bar(name, last - first), span.name if span.kind == "call" else "⇄"))
        at = last
    if at < room:
        pieces.append(BarPiece("·" * (room - at), ""))
    return tuple(pieces)


def _bar(name: str, width: int) -> str:
    """Formats a bar, ``├actor_gen──``, whose start mark separates equal neighbours."""
    return ("├" + name[: width - 1]).ljust(width, "─")
