"""Data types of simulated runs: work to be done, and the resulting spans (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

SpanKind = Literal["call", "realloc", "load"]


@dataclass(frozen=True, kw_only=True)
class MovementWork:
    """A weight movement between two copies, which occupies all ``workers`` together.

    ``role``: it only happens when the role has been trained since the movement of this name happened
    last; empty: every time.
    """

    name: str
    workers: tuple[int, ...]
    seconds: float
    role: str = ""


@dataclass(frozen=True, kw_only=True)
class CallWork:
    """One call of the graph with its place and durations.

    Attributes:
        workers: the model workers that run it.
        seconds: inside the interface, on each of them.
        fetch_s: before that, to get inputs from other workers; the worker is occupied.
        release_s: after it, before the reply (offload).
        together: its workers enter collectives, so none computes before the last has come.
        before, after: weight movements of its hooks, in order.
        trains: the role whose weights it updates; empty: none.
    """

    call: str
    workers: tuple[int, ...]
    seconds: float
    fetch_s: float = 0.0
    release_s: float = 0.0
    together: bool = True
    before: tuple[MovementWork, ...] = ()
    after: tuple[MovementWork, ...] = ()
    trains: str = ""

    @property
    def own_s(self) -> float:
        """Seconds for which it occupies one of its workers."""
        return self.fetch_s + self.seconds + self.release_s


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Overheads of a step besides its calls.

    Attributes:
        call_s: of each call, from issue to the request's start plus from its end to the inputs of the
            next; no worker is occupied.
        step_s: from the last reply of a step to the first request of the next.
        load_s: reading the step's records, on the workers of the first source call.
    """

    call_s: float = 0.0
    step_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True)
class SimulatedSpan:
    """A worker is occupied from ``start`` to ``end`` and computes from ``busy_from`` (before: waits
    for peers).

    ``cause`` is the index of the span that had to end first, -1 for the beginning of all.
    """

    step: int
    name: str
    kind: SpanKind
    worker: int
    issued: float
    start: float
    busy_from: float
    end: float
    cause: int


@dataclass(frozen=True)
class Timeline:
    """Result of a simulation. Times in seconds from 0; steps from 1."""

    spans: tuple[SimulatedSpan, ...]
    step_starts: tuple[float, ...]
    step_ends: tuple[float, ...]
    num_workers: int

    @property
    def step_s(self) -> float:
        """Seconds of one step in the steady state: the median after the first step."""
        ends = self.step_ends
        return median(b - a for a, b in pairwise(ends)) if len(ends) > 1 else ends[0]

    @property
    def wall_s(self) -> float:
        """The same without the time between steps, as the metric ``time/step_s`` of a run."""
        bounds = zip(self.step_starts, self.step_ends, strict=True)
        walls = [end - start for start, end in bounds]
        return median(walls[1:] or walls)
