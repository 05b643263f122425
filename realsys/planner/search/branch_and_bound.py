"""Exhaustive search over all plans that no bound or symmetry excludes (pure apart from the clock).

Calls are placed one after the other, the longest first. Below a partial plan no step can be shorter than

- the graph's longest chain, every call that is not placed yet at its fastest, and
- the work of the busiest worker, and of all workers together spread evenly, every call that is not
  placed yet at its least product of workers and seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from realsys.planner.meshes import Mesh, is_twin
from realsys.planner.search.plan_judge import PlanJudge

CHECK_EVERY = 256  # plans between two looks at the clock
EPSILON = 1e-9


class BranchAndBound:
    """One exhaustive search."""

    def __init__(self, judge: PlanJudge, fits: Callable[[Sequence[int]], bool]) -> None:
        self._judge, self._fits = judge, fits
        own_s = judge.own_s
        self._sizes = [[len(p.workers) for p in options] for options in judge.options]
        self._meshes: list[list[Mesh]] = [
            [(p.workers[0], len(p.workers)) for p in options] for options in judge.options
        ]
        self._fastest = [min(seconds) for seconds in own_s]
        self._least_work = [
            min(s * n for s, n in zip(seconds, sizes, strict=True))
            for seconds, sizes in zip(own_s, self._sizes, strict=True)
        ]
        calls = range(len(own_s))
        self._order = sorted(calls, key=lambda c: -self._least_work[c])
        # Fast options first: good early plans tighten the bound.
        self._tries = [sorted(range(len(own_s[c])), key=own_s[c].__getitem__) for c in calls]
        self._topological = _topological(judge.parents)
        self._best: list[int] | None = None
        self._best_s = float("inf")
        self._until, self._visited = 0.0, 0

    def run(self, start: list[int] | None, *, until: float) -> tuple[list[int] | None, bool]:
        """Returns the best plan, and whether all were considered before ``until`` (``time.monotonic``)."""
        self._until = until
        if start is not None:
            self._best, self._best_s = list(start), self._judge.step_s(start)
        try:
            self._place(0, [-1] * len(self._order), [0.0] * self._judge.num_workers)
        except _OutOfTime:
            return self._best, False
        return self._best, True

    def _place(self, depth: int, plan: list[int], load: list[float]) -> None:
        self._visited += 1
        if self._visited % CHECK_EVERY == 0 and time.monotonic() > self._until:
            raise _OutOfTime
        if depth == len(plan):
            self._take(plan)
            return
        call = self._order[depth]
        used = [self._meshes[c][plan[c]] for c in self._order[:depth]]
        rest = sum(self._least_work[c] for c in self._order[depth + 1 :])
        twins: dict[Mesh, bool] = {}
        for option in self._tries[call]:
            mesh = self._meshes[call][option]
            if mesh not in twins:
                twins[mesh] = is_twin(mesh, used, self._judge.num_workers)
            if twins[mesh]:
                continue
            plan[call] = option
            if self._bound(plan, call, option, load, rest) < self._best_s - EPSILON:
                own = self._judge.own_s[call][option]
                first, length = mesh
                below = load[:first] + [x + own for x in load[first : first + length]]
                self._place(depth + 1, plan, below + load[first + length :])
        plan[call] = -1

    def _take(self, plan: list[int]) -> None:
        step_s = self._judge.step_s(plan)
        if step_s < self._best_s - EPSILON and self._fits(plan):
            self._best, self._best_s = list(plan), step_s

    def _bound(
        self, plan: list[int], call: int, option: int, load: list[float], rest: float
    ) -> float:
        own, size = self._judge.own_s[call][option], self._sizes[call][option]
        first, length = self._meshes[call][option]
        busiest = max(load[first : first + length]) + own
        spread = (sum(load) + own * size + rest) / self._judge.num_workers
        if self._judge.ahead:  # a call that runs ahead is in no chain of its step
            return max(busiest, spread)
        return max(busiest, spread, self._chain(plan))

    def _chain(self, plan: list[int]) -> float:
        ends = [0.0] * len(plan)
        call_s = self._judge.costs.overheads.call_s
        for call in self._topological:
            option = plan[call]
            own = self._fastest[call] if option < 0 else self._judge.own_s[call][option]
            begin = max((ends[p] for p in self._judge.parents[call]), default=0.0)
            ends[call] = begin + own + call_s
        overheads = self._judge.costs.overheads
        return max(ends) + overheads.load_s + overheads.step_s


class _OutOfTime(Exception):
    """The deadline has passed."""


def _topological(parents: Sequence[Sequence[int]]) -> list[int]:
    order: list[int] = []
    while len(order) < len(parents):
        order += [
            c for c in range(len(parents)) if c not in order and all(p in order for p in parents[c])
        ]
    return order
