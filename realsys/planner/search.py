"""Searches a place for every call that makes a step as short as the costs allow (pure but for the clock).

After ReaL (arXiv:2406.14088): a plan gives each call a mesh and a layout, a simulation judges it. First a
seeded local search from plain plans; then, where the space is small enough, branch and bound goes over all
of it, so that what is found is the best there is.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from realsys.api.allocation import CallAllocation
from realsys.api.dataflow import DataflowGraph, MFCDef
from realsys.api.errors import ConfigError, ConfigErrors
from realsys.planner.branch_and_bound import BranchAndBound
from realsys.planner.costs import Allocation, Costs
from realsys.planner.judge import Judge
from realsys.planner.meshes import Degrees, places

BytesPerWorker = Callable[[Allocation], Mapping[int, float]]
MiB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a plan must keep to.

    Attributes:
        num_workers: model workers (GPUs) that there are.
        degrees: per role, the largest degrees; a role that is not named: those of ``""``.
        refusal: (call, place) → why the model, batch or backend can't be cut so; None: it can.
        memory_bytes: of one worker; None: not looked at.
        bytes_per_worker: what an allocation needs on each worker.
    """

    num_workers: int
    degrees: Mapping[str, Degrees]
    refusal: Callable[[MFCDef, CallAllocation], str | None] = lambda call, place: None
    memory_bytes: float | None = None
    bytes_per_worker: BytesPerWorker = lambda allocation: {}


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan that was found.

    ``exact``: no plan of the space is better. ``evaluated``: plans that were simulated.
    """

    allocation: Mapping[str, CallAllocation]
    step_s: float
    exact: bool
    evaluated: int
    plans: float
    seconds: float


def search(
    graph: DataflowGraph,
    costs: Costs,
    limits: Limits,
    *,
    ahead: Sequence[str] = (),
    deadline_s: float = 10.0,
    seed: int = 1,
) -> Found:
    """The plan of the shortest step.

    Args:
        ahead: calls that run a step ahead, see ``simulate``.
        deadline_s: after so long the best plan so far is taken, and ``exact`` says no.
    Raises:
        ConfigErrors: no plan keeps to the limits; says which limit binds.
    """
    began = time.monotonic()
    options = options_of(graph, limits)
    judge = Judge(graph, costs, options, num_workers=limits.num_workers, ahead=ahead)

    def fits(choice: Sequence[int]) -> bool:
        if limits.memory_bytes is None:
            return True
        needs = limits.bytes_per_worker(judge.allocation(choice))
        return max(needs.values(), default=0.0) <= limits.memory_bytes

    local = _LocalSearch(judge, fits, random.Random(seed))
    best = local.run(began + deadline_s / 2)
    exact = BranchAndBound(judge, fits)
    best, complete = exact.run(best, until=began + deadline_s)
    if best is None:
        raise _too_large(judge, limits, local)
    return Found(
        allocation=judge.allocation(best),
        step_s=judge.step_s(best),
        exact=complete,
        evaluated=judge.evaluated,
        plans=math.prod(len(each) for each in options),
        seconds=time.monotonic() - began,
    )


def options_of(graph: DataflowGraph, limits: Limits) -> list[list[CallAllocation]]:
    """Per call, in the graph's order, the places that the limits allow it.

    Raises:
        ConfigErrors: every call that has none, with the rules that leave none.
    """
    problems: list[ConfigError] = []
    found = []
    for call in graph.nodes:
        degrees = limits.degrees.get(call.role) or limits.degrees.get("", Degrees())
        every = places(limits.num_workers, degrees)
        reasons = [limits.refusal(call, place) for place in every]
        allowed = [p for p, reason in zip(every, reasons, strict=True) if reason is None]
        if not allowed:
            counts = Counter(reason for reason in reasons if reason)
            why = "; ".join(
                f"{reason} ({n} of {len(every)})" for reason, n in counts.most_common(3)
            )
            problems.append(
                ConfigError(
                    f"no layout of {call.name} is possible on {limits.num_workers} GPUs: "
                    + (why or "no layout has so small degrees"),
                    where=f"plan search, {call.name}",
                    fix="change the batch, the model or the number of GPUs, or allow more axes",
                )
            )
        found.append(allowed)
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigErrors(problems)
    return found


class _LocalSearch:
    """Plain plans first, each improved call by call; then from the best, shaken."""

    def __init__(
        self, judge: Judge, fits: Callable[[Sequence[int]], bool], draw: random.Random
    ) -> None:
        self._judge, self._fits, self._draw = judge, fits, draw
        self._sizes = [len(options) for options in judge.options]

    def run(self, until: float) -> list[int] | None:
        """The best plan that was met."""
        best: tuple[float, list[int]] | None = None
        starts = self._plain_plans()
        quiet = 0
        while time.monotonic() < until and quiet < 4 * len(self._sizes) + 8:
            if starts:
                plan = self._descend(starts.pop(), until)
            elif best is None:
                plan = self._descend([self._draw.randrange(n) for n in self._sizes], until)
            else:
                plan = self._descend(self._shaken(best[1]), until)
            quiet += not starts
            value = self._value(plan)
            if value < math.inf and (best is None or value < best[0] - 1e-9):
                best, quiet = (value, plan), 0
        return best[1] if best else None

    def _value(self, plan: Sequence[int], below: float = math.inf) -> float:
        """Seconds a step; infinite when it is not below ``below`` or does not fit."""
        step_s = self._judge.step_s(plan)
        return step_s if step_s < below - 1e-9 and self._fits(plan) else math.inf

    def _plain_plans(self) -> list[list[int]]:
        """All calls at one place, as far as they may be there; the most promising last."""
        every = dict.fromkeys(place for each in self._judge.options for place in each)
        plans = []
        for place in every:
            plan = [
                each.index(place) if place in each else self._cheapest(i)
                for i, each in enumerate(self._judge.options)
            ]
            plans.append((self._judge.step_s(plan), plan))
        plans.sort(key=lambda pair: -pair[0])
        return [plan for _, plan in plans[-12:]]

    def _cheapest(self, call: int) -> int:
        return min(range(self._sizes[call]), key=lambda o: self._judge.own_s[call][o])

    def _descend(self, plan: list[int], until: float) -> list[int]:
        """Moves single calls, and all calls of a role, while that helps."""
        plan, value = list(plan), self._value(plan)
        better = True
        while better and time.monotonic() < until:
            better = False
            for group in self._judge.groups():
                for option in self._draw.sample(
                    range(self._sizes[group[0]]), self._sizes[group[0]]
                ):
                    moved = self._moved(plan, group, option)
                    if moved is None or moved == plan:
                        continue
                    found = self._value(moved, below=value)
                    if found < value:
                        plan, value, better = moved, found, True
        return plan

    def _moved(self, plan: list[int], group: Sequence[int], option: int) -> list[int] | None:
        place = self._judge.options[group[0]][option]
        moved = list(plan)
        for call in group:
            index = self._judge.index_of[call].get(place)
            if index is None:
                return None
            moved[call] = index
        return moved

    def _shaken(self, plan: list[int]) -> list[int]:
        shaken = list(plan)
        for call in self._draw.sample(range(len(plan)), min(len(plan), self._draw.choice((2, 3)))):
            shaken[call] = self._draw.randrange(self._sizes[call])
        return shaken


def _too_large(judge: Judge, limits: Limits, local: _LocalSearch) -> ConfigError:
    """Memory is what binds: how much the leanest plan would need."""
    least = math.inf
    for plan in local._plain_plans():
        needs = limits.bytes_per_worker(judge.allocation(plan))
        least = min(least, max(needs.values(), default=math.inf))
    limit = limits.memory_bytes or 0.0
    return ConfigError(
        f"no plan on {limits.num_workers} GPUs fits into {limit / MiB:,.0f} MiB a GPU; the least "
        f"that was found needs {least / MiB:,.0f} MiB",
        where="plan search, memory",
        fix="use more or larger GPUs, smaller micro-batches, recompute=true or offload=true",
    )
