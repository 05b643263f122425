"""Evaluates plans for the search: seconds per step for a choice of places, fast (pure).

A plan is a list of option numbers, one per call. Results of costs.py are cached. For sequential steps,
``step_s`` computes the same as ``simulate`` for one step in a tenth of its time, without spans; a
test compares the two. With calls that run ahead, or weights that move to other roles, it simulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from heapq import heappop, heappush

from realsys.api.dataflow import DataflowGraph, ParamReallocHook
from realsys.planner.allocation import CallAllocation
from realsys.planner.time.costs import Costs, release_s, works_of
from realsys.planner.time.simulate_steps import simulate

STEPS_AHEAD = 5  # simulated steps where calls run ahead: the second is in stride, the last is not


class PlanJudge:
    """Evaluates plans of one graph over given options.

    Attributes:
        options: per call, its places. index_of: the same, place → number.
        own_s: per call and option, seconds of the call itself.
        evaluated: plans judged so far.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        costs: Costs,
        options: Sequence[Sequence[CallAllocation]],
        *,
        num_workers: int,
        ahead: Sequence[str] = (),
    ) -> None:
        self.graph, self.costs, self.options = graph, costs, options
        self.num_workers, self.ahead = num_workers, tuple(ahead)
        self._simulates = bool(ahead) or any(
            isinstance(hook, ParamReallocHook) for node in graph.nodes for hook in node.post_hooks
        )
        self.evaluated = 0
        nodes = graph.nodes
        number = {node.name: i for i, node in enumerate(nodes)}
        self.index_of = [{place: o for o, place in enumerate(each)} for each in options]
        self.own_s = [
            [costs.call_s(node, place) + release_s(node, place, costs) for place in each]
            for node, each in zip(nodes, options, strict=True)
        ]
        self.parents = [sorted(number[p] for p in graph.parents[n.name]) for n in nodes]
        self.children = [[number[c] for c in graph.children(n.name)] for n in nodes]
        trainers = {n.role: i for i, n in enumerate(nodes) if n.is_train}
        self.home = [trainers.get(n.role) for n in nodes]
        self._together = [
            [costs.together(node, place) for place in each]
            for node, each in zip(nodes, options, strict=True)
        ]
        numbers: dict[CallAllocation, int] = {}
        self._place = [[numbers.setdefault(p, len(numbers)) for p in each] for each in options]
        self._move_s = cache(self._ask_move_s)
        self._fetch_s = cache(self._ask_fetch_s)

    def groups(self) -> list[tuple[int, ...]]:
        """Lists sets of calls that are moved together: each alone, those of a role, all."""
        roles: dict[str, list[int]] = {}
        for i, node in enumerate(self.graph.nodes):
            roles.setdefault(node.role, []).append(i)
        every = tuple(range(len(self.options)))
        found = [(i,) for i in every] + [tuple(g) for g in roles.values()] + [every]
        return list(dict.fromkeys(found))

    def allocation(self, plan: Sequence[int]) -> dict[str, CallAllocation]:
        """Converts a plan to an allocation by call name."""
        return {node.name: self.options[i][plan[i]] for i, node in enumerate(self.graph.nodes)}

    def parts(self, plan: Sequence[int]) -> tuple[int, int]:
        """Measures a plan's complexity: copies of trained roles, places in use."""
        places = [self._place[call][option] for call, option in enumerate(plan)]
        copies = {
            (home, place)
            for place, home in zip(places, self.home, strict=True)
            if home is not None and place != places[home]
        }
        return len(copies), len(set(places))

    def step_s(self, plan: Sequence[int]) -> float:
        """Returns seconds per step."""
        self.evaluated += 1
        if self._simulates:
            return simulate(
                works_of(self.graph, self.allocation(plan), self.costs),
                self.graph.parents,
                num_workers=self.num_workers,
                steps=STEPS_AHEAD,
                ahead=self.ahead,
                overheads=self.costs.overheads,
            ).step_s
        return self._one_step_s(plan)

    def _one_step_s(self, plan: Sequence[int]) -> float:
        overheads = self.costs.overheads
        half = overheads.call_s / 2
        free = [0.0] * self.num_workers
        ready = [overheads.load_s] * len(plan)
        missing = [len(parents) for parents in self.parents]
        issues = [(overheads.load_s, i) for i, n in enumerate(missing) if not n]
        if overheads.load_s:
            first = issues[0][1]
            for worker in self.options[first][plan[first]].workers:
                free[worker] = overheads.load_s
        copied: set[tuple[int, int]] = set()
        latest = 0.0
        while issues:
            at, call = heappop(issues)
            at += half
            option = plan[call]
            workers = self.options[call][option].workers
            home = self.home[call]
            if home == call:
                copied = {copy for copy in copied if copy[0] != call}
            elif home is not None:
                at = self._copied(call, option, home, plan[home], at, free, copied)
            own = self.own_s[call][option] + self._inputs_s(call, plan)
            end = at
            if self._together[call][option]:
                for worker in workers:
                    end = max(end, free[worker])
                end += own
                for worker in workers:
                    free[worker] = end
            else:
                for worker in workers:
                    free[worker] = max(at, free[worker]) + own
                    end = max(end, free[worker])
            end += half
            latest = max(latest, end)
            for child in self.children[call]:
                missing[child] -= 1
                ready[child] = max(ready[child], end)
                if not missing[child]:
                    heappush(issues, (ready[child], child))
        return latest + overheads.step_s

    def _copied(
        self,
        call: int,
        option: int,
        home: int,
        home_option: int,
        at: float,
        free: list[float],
        copied: set[tuple[int, int]],
    ) -> float:
        """Time at which the call's copy has its weights. One copy per place and role, shared by its
        calls.
        """
        place, source = self._place[call][option], self._place[home][home_option]
        if place == source or (home, place) in copied:
            return at
        copied.add((home, place))
        taking = {*self.options[call][option].workers, *self.options[home][home_option].workers}
        for worker in taking:
            at = max(at, free[worker])
        at += self._move_s(call, option, home, home_option)
        for worker in taking:
            free[worker] = at
        return at

    def _ask_move_s(self, call: int, option: int, home: int, home_option: int) -> float:
        role = self.graph.nodes[call].role
        return self.costs.realloc_s(
            role, self.options[home][home_option], self.options[call][option]
        )

    def _inputs_s(self, call: int, plan: Sequence[int]) -> float:
        place = self._place[call][plan[call]]
        elsewhere = tuple(
            (p, plan[p]) for p in self.parents[call] if self._place[p][plan[p]] != place
        )
        return self._fetch_s(call, plan[call], elsewhere) if elsewhere else 0.0

    def _ask_fetch_s(self, call: int, option: int, elsewhere: tuple[tuple[int, int], ...]) -> float:
        sources = {self.graph.nodes[p].name: self.options[p][o] for p, o in elsewhere}
        return self.costs.fetch_s(self.graph.nodes[call], self.options[call][option], sources)
