"""Simulates steps of a dataflow graph in virtual time: what each worker computes, when, and what it
waits for.

The rules are those of the run (realsys/master/graph/function_executor.py, model_workers.py): a call is
issued as soon as its inputs are complete, calls that are ready together in the order of the graph; a call
is numbered together with the weight movements of its hooks; every worker runs its requests one at a time in
the order of their numbers. So a request's start is known when it is issued, and one pass over the issues in
order of time is enough.

Numbers in, spans out. costs.py supplies the seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from realsys.api.errors import InternalError
from realsys.planner.time.simulated_timeline import (
    CallWork,
    MovementWork,
    Overheads,
    SimulatedSpan,
    SpanKind,
    Timeline,
)


@dataclass
class _Simulation:
    """State of one pass."""

    works: Sequence[CallWork]
    parents: Mapping[str, frozenset[str]]
    overheads: Overheads
    free: list[float]
    last: list[int]  # per worker, its latest span
    spans: list[SimulatedSpan] = field(default_factory=list)
    # (when, index in works): of one step at a time
    issues: list[tuple[float, int]] = field(default_factory=list)
    loaded: dict[int, _Moment] = field(default_factory=dict)
    finished: dict[tuple[int, str], _Moment] = field(default_factory=dict)
    trained: dict[str, int] = field(default_factory=dict)  # role → train steps issued
    copied: dict[str, int] = field(default_factory=dict)  # movement → of which of these


_Moment = tuple[float, int]  # when, and the span that ended then


def simulate(
    works: Sequence[CallWork],
    parents: Mapping[str, frozenset[str]],
    *,
    num_workers: int,
    steps: int = 1,
    ahead: Collection[str] = (),
    overheads: Overheads | None = None,
) -> Timeline:
    """Simulates ``steps`` steps.

    Args:
        works: every call of the graph, in its order.
        parents: call → calls whose outputs it reads (``DataflowGraph.parents``).
        ahead: source calls that are issued a step ahead, before the rest of the step before
            (``schedule=one_step_off``).
    Raises:
        InternalError: a call that can never start, or a worker that is not there.
    """
    for work in works:
        if not work.workers or max(work.workers) >= num_workers:
            raise InternalError(
                f"{work.call} runs on {work.workers} of {num_workers}", where="simulate"
            )
    state = _Simulation(
        works,
        parents,
        overheads or Overheads(),
        free=[0.0] * num_workers,
        last=[-1] * num_workers,
    )
    starts: list[float] = []
    ends: list[float] = []
    opening: _Moment = (0.0, -1)
    for step in range(1, steps + 1):
        starts.append(opening[0])
        open_ = opening
        for begun in (step, step + 1) if ahead else (step,):
            if begun <= steps and begun not in state.loaded:
                open_ = max(open_, _begin(state, begun, opening, ahead))
        ended = _run_rest(state, step, open_ if ahead else opening)
        ends.append(ended[0])
        opening = (ended[0] + state.overheads.step_s, ended[1])
    return Timeline(tuple(state.spans), tuple(starts), tuple(ends), num_workers)


def _begin(state: _Simulation, step: int, at: _Moment, ahead: Collection[str]) -> _Moment:
    """Loads a step's records and issues its calls that run ahead; returns when that is done."""
    sources = [i for i, w in enumerate(state.works) if not state.parents[w.call]]
    state.loaded[step] = at
    if state.overheads.load_s:
        load_s, workers = state.overheads.load_s, state.works[sources[0]].workers
        state.loaded[step] = _occupy(state, step, "load", "load", workers, load_s, at)
    for index in sources:
        if state.works[index].call in ahead:
            _issue(state, state.works[index], step, state.loaded[step])
    return state.loaded[step]


def _run_rest(state: _Simulation, step: int, opening: _Moment) -> _Moment:
    """Issues the step's other calls in order of time; returns when the last reply arrives."""
    for index, work in enumerate(state.works):
        if (step, work.call) not in state.finished:
            _push_if_ready(state, step, index, opening)
    while state.issues:
        _, index = heapq.heappop(state.issues)
        work = state.works[index]
        _issue(state, work, step, max(_inputs(state, step, work) or opening, opening))
        for child, other in enumerate(state.works):
            if work.call in state.parents[other.call]:
                _push_if_ready(state, step, child, opening)
    if missing := [w.call for w in state.works if (step, w.call) not in state.finished]:
        raise InternalError(f"{missing} never start", where="simulate")
    return max(state.finished[step, work.call] for work in state.works)


def _push_if_ready(state: _Simulation, step: int, index: int, opening: _Moment) -> None:
    inputs = _inputs(state, step, state.works[index])
    if inputs is not None:
        heapq.heappush(state.issues, (max(inputs[0], opening[0]), index))


def _inputs(state: _Simulation, step: int, work: CallWork) -> _Moment | None:
    """Returns when a call's inputs are complete; None while that is unknown."""
    parents = state.parents[work.call]
    known = [state.finished[step, p] for p in parents if (step, p) in state.finished]
    if not parents:
        return state.loaded[step]
    return max(known) if len(known) == len(parents) else None


def _issue(state: _Simulation, work: CallWork, step: int, at: _Moment) -> None:
    """Appends a call with its movements to its workers' queues."""
    half = state.overheads.call_s / 2
    moment = (at[0] + half, at[1])
    for movement in work.before:
        moment = _copy(state, movement, step, moment)
    moment = _occupy(
        state, step, work.call, "call", work.workers, work.own_s, moment, together=work.together
    )
    if work.trains:
        state.trained[work.trains] = state.trained.get(work.trains, 0) + 1
    for movement in work.after:
        moment = _copy(state, movement, step, moment)
    state.finished[step, work.call] = (moment[0] + half, moment[1])


def _copy(state: _Simulation, movement: MovementWork, step: int, at: _Moment) -> _Moment:
    """Adds a movement, unless its copy already has the newest weights."""
    if movement.role:
        version = state.trained.get(movement.role, 0)
        if state.copied.get(movement.name) == version:
            return at
        state.copied[movement.name] = version
    return _occupy(state, step, movement.name, "realloc", movement.workers, movement.seconds, at)


def _occupy(
    state: _Simulation,
    step: int,
    name: str,
    kind: SpanKind,
    workers: Sequence[int],
    seconds: float,
    at: _Moment,
    *,
    together: bool = True,
) -> _Moment:
    """Occupies each worker once it is free, or all once the last is; returns the last span's end."""
    issued, cause = at
    starts = {w: max(issued, state.free[w]) for w in workers}
    latest = max(workers, key=lambda w: starts[w])
    spans = []
    for worker, start in starts.items():
        awaited = latest if together else worker
        begin = starts[awaited]
        why = state.last[awaited] if begin > issued else cause
        end = begin + seconds
        spans.append(SimulatedSpan(step, name, kind, worker, issued, start, begin, end, why))
    done, index = -1.0, len(state.spans)
    for i, span in enumerate(spans, len(state.spans)):
        state.free[span.worker], state.last[span.worker] = span.end, i
        if span.end > done:
            done, index = span.end, i
    state.spans += spans
    return done, index
