"""Searches a place for every call that minimises the step time (pure apart from the clock).

After ReaL (arXiv:2406.14088): a plan gives each call a mesh and a topology, a simulation evaluates
it. First a
seeded local search from simple plans; then, if the space is small enough, branch and bound covers
all of it, which proves the best plan.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from realsys.api.dataflow import DataflowGraph, MFCDef
from realsys.api.errors import ConfigError, Problems, raise_all
from realsys.planner.allocation import CallAllocation
from realsys.planner.meshes import Degrees, leftmost, places
from realsys.planner.search.branch_and_bound import EPSILON, BranchAndBound
from realsys.planner.search.plan_evaluator import PlanEvaluator
from realsys.planner.time.costs import Allocation, Costs

BytesPerWorker = Callable[[Allocation], Mapping[int, float]]
MiB = 1 << 20
LARGE = 1e11  # number of plans above which branch and bound rarely finishes
TOO_LARGE = 1e12  # seconds: longer than any step


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Constraints on plans.

    Attributes:
        num_workers: number of model workers (GPUs).
        degrees: largest degrees per role; ``""`` for other roles.
        refusal: (call, place) → why the model, batch or backend does not support it; None if it does.
        memory_bytes: limit of one worker; None: not checked.
        bytes_per_worker: bytes that an allocation needs on each worker.
    """

    num_workers: int
    degrees: Mapping[str, Degrees]
    refusal: Callable[[MFCDef, CallAllocation], str | None] = lambda call, place: None
    memory_bytes: float | None = None
    bytes_per_worker: BytesPerWorker = lambda allocation: {}


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """The best plan found.

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
    slack: float = 0.0,
) -> FoundPlan:
    """Searches the plan with the shortest step.

    Args:
        ahead: calls that run a step ahead, see ``simulate``.
        deadline_s: time limit, after which the best plan so far is returned and ``exact`` is False.
        slack: a plan of fewer places may take longer by this share of the best one's time.
    Raises:
        ConfigErrors: no plan satisfies the limits; names the binding limit.
    """
    began = time.monotonic()
    options = options_of(graph, limits)
    evaluator = PlanEvaluator(graph, costs, options, num_workers=limits.num_workers, ahead=ahead)

    def over(choice: Sequence[int]) -> float:
        """Returns by which fraction the fullest worker exceeds the limit; 0 if none does."""
        if limits.memory_bytes is None:
            return 0.0
        needs = limits.bytes_per_worker(evaluator.allocation(choice))
        return max(0.0, max(needs.values(), default=0.0) / limits.memory_bytes - 1)

    plans = math.prod(len(each) for each in options)
    local = _LocalSearch(evaluator, over, random.Random(seed))
    # The larger the space, the less branch and bound gains.
    best = local.run(began + deadline_s * (0.5 if plans < LARGE else 0.9))
    exact = BranchAndBound(evaluator, lambda choice: over(choice) == 0)
    best, complete = exact.run(best, until=began + deadline_s)
    if best is None:
        raise _too_large(limits, local.least_over, evaluator.allocation(local.smallest))
    best = local.simplest(best, longest_s=evaluator.step_s(best) * (1 + slack) + 1e-9)
    return FoundPlan(
        allocation=leftmost(evaluator.allocation(best), limits.num_workers),
        step_s=evaluator.step_s(best),
        exact=complete,
        evaluated=evaluator.evaluated,
        plans=plans,
        seconds=time.monotonic() - began,
    )


def options_of(graph: DataflowGraph, limits: Limits) -> list[list[CallAllocation]]:
    """Lists, per call in the graph's order, the places that the limits allow.

    Raises:
        ConfigErrors: every call without an allowed place, with the rules that exclude them.
    """
    problems = Problems()
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
            problems.add(
                f"no layout of {call.name} is possible on {limits.num_workers} GPUs: "
                + (why or "no topology has such small degrees"),
                where=f"plan search, {call.name}",
                fix="change the batch, the model or the number of GPUs, or allow more axes",
            )
        found.append(allowed)
    raise_all(problems)
    return found


class _LocalSearch:
    """Local search: simple plans first, each improved call by call; then perturbations of the best.

    A plan that exceeds the memory counts as longer than any that fits, in proportion to the excess.
    """

    def __init__(
        self, evaluator: PlanEvaluator, over: Callable[[Sequence[int]], float], draw: random.Random
    ) -> None:
        self._evaluator, self._over, self._draw = evaluator, over, draw
        self._sizes = [len(options) for options in evaluator.options]
        self.least_over = math.inf
        self.smallest: Sequence[int] = [0] * len(self._sizes)  # the plan of which that is true

    def run(self, until: float) -> list[int] | None:
        """Returns the best plan found; None if none fits."""
        best, best_value = None, math.inf
        starts = self._plain_plans()
        quiet = 0
        # One plan is valued however late it is: a refusal says how much the smallest would need.
        while (best is None and starts) or (
            time.monotonic() < until and quiet < 4 * len(self._sizes) + 8
        ):
            if starts:
                plan = self._descend(starts.pop(), until)
            else:
                assert best is not None  # a simple plan exists
                plan = self._descend(self._shaken(best), until)
            quiet += not starts
            value = self._value(plan)
            if value < best_value - EPSILON:
                best, best_value, quiet = plan, value, 0
        return best if best_value < TOO_LARGE else None

    def simplest(self, plan: list[int], *, longest_s: float) -> list[int]:
        """Returns a plan of fewer places and fewer weight movements within the given step time."""
        plan, better = list(plan), True
        while better:
            better = False
            places = dict.fromkeys(self._evaluator.options[i][o] for i, o in enumerate(plan))
            for group in self._evaluator.groups():
                for place in places:
                    moved = self._at(plan, group, place)
                    if (
                        moved is not None
                        and self._evaluator.parts(moved) < self._evaluator.parts(plan)
                        and self._value(moved) <= longest_s
                    ):
                        plan, better = moved, True
        return plan

    def _value(self, plan: Sequence[int], below: float = math.inf) -> float:
        """Returns seconds per step, more than any fitting plan if too large; infinite if not below
        ``below``.
        """
        step_s = self._evaluator.step_s(plan)
        if step_s >= below - EPSILON:
            return math.inf
        over = self._over(plan)
        if over < self.least_over:
            self.least_over, self.smallest = over, list(plan)
        return step_s if not over else TOO_LARGE * (1 + over)

    def _plain_plans(self) -> list[list[int]]:
        """Plans with all calls at one place, as far as allowed; the most promising last."""
        every = dict.fromkeys(place for each in self._evaluator.options for place in each)
        plans = []
        for place in every:
            plan = [
                each.index(place) if place in each else self._cheapest(i)
                for i, each in enumerate(self._evaluator.options)
            ]
            plans.append((self._evaluator.step_s(plan), plan))
        plans.sort(key=lambda pair: -pair[0])
        return [plan for _, plan in plans[-12:]]

    def _cheapest(self, call: int) -> int:
        return min(range(self._sizes[call]), key=lambda o: self._evaluator.own_s[call][o])

    def _descend(self, plan: list[int], until: float) -> list[int]:
        """Moves single calls, and all calls of a role, while that improves the plan."""
        plan, value = list(plan), self._value(plan)
        better = True
        while better and time.monotonic() < until:
            better = False
            for group in self._evaluator.groups():
                for option in self._draw.sample(
                    range(self._sizes[group[0]]), self._sizes[group[0]]
                ):
                    moved = self._at(plan, group, self._evaluator.options[group[0]][option])
                    if moved is None or moved == plan:
                        continue
                    found = self._value(moved, below=value)
                    if found < value:
                        plan, value, better = moved, found, True
        return plan

    def _at(self, plan: list[int], group: Sequence[int], place: CallAllocation) -> list[int] | None:
        """Returns the plan with these calls at ``place``; None if one of them can't be there."""
        moved = list(plan)
        for call in group:
            index = self._evaluator.index_of[call].get(place)
            if index is None:
                return None
            moved[call] = index
        return moved

    def _shaken(self, plan: list[int]) -> list[int]:
        shaken = list(plan)
        for call in self._draw.sample(range(len(plan)), min(len(plan), self._draw.choice((2, 3)))):
            shaken[call] = self._draw.randrange(self._sizes[call])
        return shaken


class NoPlanFits(ConfigError):
    """Every plan is larger than the workers' memory; ``smallest`` is the one that lacks least."""

    smallest: Allocation


def _too_large(limits: Limits, least_over: float, smallest: Allocation) -> NoPlanFits:
    """Makes the error for a binding memory limit: how much the smallest plan would need."""
    limit = limits.memory_bytes or 0.0
    error = NoPlanFits(
        f"no plan on {limits.num_workers} GPUs fits into {limit / MiB:,.0f} MiB a GPU; the least "
        f"that was found needs {limit * (1 + least_over) / MiB:,.0f} MiB",
        where="plan search, memory",
        fix="use more or larger GPUs",
    )
    error.smallest = smallest
    return error
