"""Draws the Gantt chart of one step: a lane per worker and call, with matplotlib but without pyplot."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from realsys.api.errors import DataError
from realsys.observability.events import Event, MfcEvent, PeriodicEvent, StepEvent
from realsys.observability.pictures.palette import GRID, INK, MUTED, WAITING, RoleColours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Lane = tuple[str, str]  # worker, call


def step_png(
    events: Sequence[Event], step: int, *, roles: Mapping[str, str] | None = None
) -> bytes:
    """Draws a step and returns PNG bytes. ``roles`` (call → role) gives the colours.

    Raises DataError when no call of that step is known.
    """
    out = io.BytesIO()
    step_figure(events, step, roles=roles).savefig(out, format="png", dpi=150)
    return out.getvalue()


def step_figure(
    events: Sequence[Event], step: int, *, roles: Mapping[str, str] | None = None
) -> Figure:
    """Draws bars from request to reply: solid while the worker computed, thin while inputs waited."""
    from matplotlib.figure import Figure

    own = [e for e in events if e.step == step]
    calls = sorted((e for e in own if isinstance(e, MfcEvent)), key=lambda e: e.start)
    if not calls:
        raise DataError(
            f"no call of step {step} is known", where="events", fix="choose a finished step"
        )
    zero = min([e.start for e in own if isinstance(e, StepEvent)] or [c.queued for c in calls])
    lanes = _lanes(calls, own)
    figure = Figure(figsize=(10, 1.3 + 0.42 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    colours = RoleColours(roles)
    for call in calls:
        _draw_call(axes, call, lanes.index((call.worker, call.name)), zero, colours)
    for event in own:
        if isinstance(event, PeriodicEvent):
            _draw_periodic(axes, event, lanes.index(("master", event.kind)), zero)
    _draw_frame(axes, lanes, own, step, zero)
    return figure


def _lanes(calls: Sequence[MfcEvent], own: Sequence[Event]) -> list[Lane]:
    """Returns the lanes: workers by name, each one's calls by start; the master's own work last."""
    lanes = sorted(dict.fromkeys((c.worker, c.name) for c in calls), key=lambda lane: lane[0])
    periodic = [e for e in own if isinstance(e, PeriodicEvent)]
    return lanes + list(dict.fromkeys(("master", str(e.kind)) for e in periodic))


def _draw_call(axes: Any, call: MfcEvent, row: int, zero: float, colours: RoleColours) -> None:
    colour = colours.of_call(call.name)
    start, end = call.start - zero, call.end - zero
    waited = call.start - call.queued
    if waited > 0:
        axes.barh(row, waited, left=call.queued - zero, height=0.16, color=WAITING, zorder=2)
    computed = min(call.compute_s, end - start)
    # Light for the whole call, solid for the compute: what shows is transfer and messages.
    axes.barh(row, end - start, left=start, height=0.62, color=colour, alpha=0.35, zorder=2)
    axes.barh(row, computed, left=start, height=0.62, color=colour, zorder=3)
    label = f" {call.compute_s:.2f} s" if call.compute_s >= 0.01 else f" {call.compute_s:.3f} s"
    axes.text(end, row, label, va="center", ha="left", fontsize=8, color=INK, zorder=4)


def _draw_periodic(axes: Any, event: PeriodicEvent, row: int, zero: float) -> None:
    start, end = event.start - zero, event.end - zero
    axes.barh(row, end - start, left=start, height=0.62, color=MUTED, zorder=3)
    axes.text(end, row, f" {end - start:.2f} s", va="center", fontsize=8, color=INK, zorder=4)


def _draw_frame(
    axes: Any, lanes: Sequence[Lane], own: Sequence[Event], step: int, zero: float
) -> None:
    labels, previous = [], ""
    for row, (worker, name) in enumerate(lanes):
        labels.append(f"{worker}   {name}" if worker != previous else name)
        if previous and worker != previous:
            axes.axhline(row - 0.5, color=MUTED, linewidth=0.8)
        previous = worker
    axes.set_yticks(range(len(lanes)), labels, fontsize=9)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    last = max(e.end for e in own) - zero
    ends = [e.end - zero for e in own if isinstance(e, StepEvent)]
    for end in ends[-1:]:
        axes.axvline(end, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xlim(min(0.0, *(_begin(e) - zero for e in own)), last * 1.1 or 1.0)
    wall = f", {ends[-1]:.2f} s" if ends else ", not finished"
    axes.set_title(f"Step {step}{wall}", fontsize=11, loc="left", color=INK)
    axes.set_xlabel(
        "seconds since the step began  (solid: compute; pale: request and reply; thin: waiting)",
        fontsize=9,
        color=INK,
    )
    axes.grid(axis="x", color=GRID, zorder=0)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)


def _begin(event: Event) -> float:
    return event.queued if isinstance(event, MfcEvent) else event.start
