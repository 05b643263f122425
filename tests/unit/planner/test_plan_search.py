"""The plan search against all plans of small spaces, its limits, and the formulas behind it."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from itertools import product
from types import SimpleNamespace as Parts

import golden
import pytest

from realsys.api.dataflow import DataflowGraph, MFCDef, build_graph
from realsys.api.errors import ConfigError, ConfigErrors
from realsys.api.model import (
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ProcessTopology,
)
from realsys.planner.allocation import CallAllocation
from realsys.planner.meshes import Degrees, is_equivalent, layouts, meshes, places
from realsys.planner.search import branch_and_bound
from realsys.planner.search.branch_and_bound import BranchAndBound
from realsys.planner.search.plan_evaluator import PlanEvaluator
from realsys.planner.search.search import Limits, options_of, search
from realsys.planner.time.costs import TableCosts, works_of
from realsys.planner.time.simulate_steps import simulate
from realsys.planner.time.simulated_timeline import Overheads


def call(
    name: str, kind: str, role: str, reads: tuple[str, ...], writes: tuple[str, ...] = ()
) -> MFCDef:
    return MFCDef(
        name=name,
        n_seqs=8,
        interface_type=ModelInterfaceType(kind),
        interface_impl=ModelInterfaceAbstraction("any"),
        model_name=ModelName(role),
        input_keys=reads,
        output_keys=writes,
    )


GEN = call("actor_gen", "generate", "actor", ("prompts",), ("seq",))
REW = call("rew_inf", "inference", "reward", ("seq",), ("rewards",))
REF = call("ref_inf", "inference", "ref", ("seq",), ("ref_logprobs",))
CRITIC = call("critic_inf", "inference", "critic", ("seq",), ("values",))
EXPERIENCE = ("seq", "rewards", "ref_logprobs", "values")


def six_calls() -> DataflowGraph:
    actor_train = call("actor_train", "train_step", "actor", EXPERIENCE)
    critic_train = call("critic_train", "train_step", "critic", EXPERIENCE)
    nodes = [GEN, REW, REF, CRITIC, actor_train, critic_train]
    return build_graph(nodes, dataset_keys=["prompts"])


def three_calls() -> DataflowGraph:
    train = call("actor_train", "train_step", "actor", ("seq", "values"))
    return build_graph([GEN, CRITIC, train], dataset_keys=["prompts"])


def random_table(graph: DataflowGraph, num_workers: int, draw: random.Random) -> TableCosts:
    """Calls that get faster with more workers, some hardly, each layout by another factor."""
    calls = {}
    for node in graph.nodes:
        base, scaling = draw.uniform(1, 10), draw.uniform(0, 1)
        for topo in {place.topology for place in places(num_workers, Degrees())}:
            calls[node.name, str(topo)] = base / topo.world_size**scaling * draw.uniform(0.8, 1.5)
    return TableCosts(
        calls=calls,
        fetch=draw.uniform(0, 0.3),
        realloc={"actor": draw.uniform(0, 1), "critic": draw.uniform(0, 1)},
        overheads=Overheads(call_s=0.02, step_s=0.1, load_s=0.05),
        synchronous=frozenset(n.name for n in graph.nodes if draw.random() < 0.7),
    )


def best_of_all(graph: DataflowGraph, costs: TableCosts, num_workers: int) -> float:
    options = [places(num_workers, Degrees())] * len(graph.nodes)
    judge = PlanEvaluator(graph, costs, options, num_workers=num_workers)
    return min(judge.step_s(plan) for plan in product(*(range(len(o)) for o in options)))


# ---- the space ------------------------------------------------------------------------------------


def test_meshes_of_eight_workers_are_aligned_runs() -> None:
    found = meshes(8)
    assert found[:3] == [(0, 8), (0, 4), (4, 4)]
    assert len(found) == 15
    assert meshes(3) == [(0, 3), (0, 2), (0, 1), (1, 1), (2, 1)]
    assert (4, 2) in meshes(6)
    assert (0, 4) in meshes(6)


def test_layouts_have_all_degrees_up_to_the_limits() -> None:
    assert sorted(map(str, layouts(4, Degrees()))) == sorted(
        ["d4t1p1", "d2t2p1", "d1t4p1", "d2t1p2", "d1t2p2", "d1t1p4"]
    )
    assert sorted(map(str, layouts(4, Degrees(tensor=2, pipeline=1)))) == ["d2t2p1", "d4t1p1"]
    assert layouts(4, Degrees(data=1, tensor=2, pipeline=1)) == []


def test_only_one_of_two_unused_halves_is_tried() -> None:
    assert not is_equivalent((0, 4), [], 8)
    assert is_equivalent((4, 4), [], 8)
    assert is_equivalent((5, 1), [], 8)
    assert not is_equivalent((4, 4), [(0, 2)], 8)
    assert is_equivalent((6, 2), [(0, 4)], 8)
    assert is_equivalent((4, 4), [(0, 8)], 8)  # who is on all of them makes no difference
    assert not is_equivalent((2, 1), [], 3)  # halves of unequal length


# ---- against brute force ----------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_two_workers_six_calls_the_optimum_is_found(seed: int) -> None:
    graph = six_calls()
    costs = random_table(graph, 2, random.Random(seed))
    found = search(graph, costs, Limits(num_workers=2, degrees={}), deadline_s=240)
    assert found.exact
    assert found.step_s == pytest.approx(best_of_all(graph, costs, 2))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_four_workers_three_calls_the_optimum_is_found(seed: int) -> None:
    graph = three_calls()
    costs = random_table(graph, 4, random.Random(seed))
    best_s, began = best_of_all(graph, costs, 4), time.monotonic()
    found = search(graph, costs, Limits(num_workers=4, degrees={}), deadline_s=240)
    assert 0 < found.seconds <= time.monotonic() - began
    assert (found.exact, found.plans) == (True, len(places(4, Degrees())) ** 3)
    assert found.step_s == pytest.approx(best_s)
    # Without the local search before it, and from the worst plan.
    options = [places(4, Degrees())] * 3
    evaluator = PlanEvaluator(graph, costs, options, num_workers=4)
    for start in (None, [0, 0, 0]):
        plan, complete = BranchAndBound(evaluator, lambda plan: True).run(start, until=math.inf)
        assert complete
        assert evaluator.step_s(plan or ()) == pytest.approx(best_s)
    plan, complete = BranchAndBound(evaluator, lambda plan: False).run(None, until=math.inf)
    assert (plan, complete) == (None, True)
    plan, complete = BranchAndBound(evaluator, lambda plan: plan[0] > 3).run(None, until=math.inf)
    fitting = (p for p in product(*(range(len(o)) for o in options)) if p[0] > 3)
    assert evaluator.step_s(plan or ()) == pytest.approx(min(map(evaluator.step_s, fitting)))


def test_calls_side_by_side_are_found_where_symmetry_is_left_out(monkeypatch) -> None:
    """Three of 4 s beside one another: none may be on the worker of another."""
    train = call("actor_train", "train_step", "actor", EXPERIENCE)
    graph = build_graph([GEN, REW, REF, CRITIC, train], dataset_keys=["prompts"])
    seconds = {"actor_gen": 1.0, "actor_train": 1.0}
    costs = TableCosts(calls={(n.name, "*"): seconds.get(n.name, 4.0) for n in graph.nodes})
    places_of = [places(4, Degrees(tensor=1, pipeline=1))] * 5
    evaluator = PlanEvaluator(graph, costs, places_of, num_workers=4)
    everywhere = [0] * 5
    plan, complete = BranchAndBound(evaluator, lambda plan: True).run(None, until=math.inf)
    assert (evaluator.step_s(plan or ()), complete) == (6.0, True)
    plan, complete = BranchAndBound(evaluator, lambda plan: False).run(everywhere, until=math.inf)
    assert (plan, complete) == (everywhere, True)
    monkeypatch.setattr(branch_and_bound, "CHECK_EVERY", 3)
    looks = list[int]()
    monkeypatch.setattr(branch_and_bound, "time", Parts(monotonic=lambda: looks.append(1) or 9.0))
    exact = BranchAndBound(evaluator, lambda plan: False)
    assert exact.run(everywhere, until=8.0) == (everywhere, False)
    assert (exact._visited, len(looks)) == (3, 1)


def test_the_fast_judge_says_what_the_simulator_says() -> None:
    graph, draw = six_calls(), random.Random(3)
    for num_workers in (2, 3, 8):
        costs = random_table(graph, num_workers, draw)
        options = [places(num_workers, Degrees())] * 6
        judge = PlanEvaluator(graph, costs, options, num_workers=num_workers)
        for _ in range(100):
            plan = [draw.randrange(len(options[0])) for _ in range(6)]
            timeline = simulate(
                works_of(graph, judge.allocation(plan), costs),
                graph.parents,
                num_workers=num_workers,
                steps=3,
                overheads=costs.overheads,
            )
            assert judge.step_s(plan) == pytest.approx(timeline.step_s)


def test_a_search_without_time_still_gives_a_good_plan_and_says_that_it_is_not_exact() -> None:
    graph = six_calls()
    costs = random_table(graph, 8, random.Random(0))
    found = search(graph, costs, Limits(num_workers=8, degrees={}), deadline_s=1.0)
    assert not found.exact
    everywhere = CallAllocation(workers=tuple(range(8)), topology=ProcessTopology(data=8))
    plain = works_of(graph, dict.fromkeys(costs_names(graph), everywhere), costs)
    step = simulate(plain, graph.parents, num_workers=8, steps=2, overheads=costs.overheads)
    assert found.step_s < step.step_s


def costs_names(graph: DataflowGraph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_running_ahead_changes_what_is_best() -> None:
    # Generation 4 s on one worker or two, training 4 s likewise: ahead, side by side is twice as fast.
    train = call("actor_train", "train_step", "actor", ("seq",))
    graph = build_graph([GEN, train], dataset_keys=["prompts"])
    costs = TableCosts(calls={("actor_gen", "*"): 4.0, ("actor_train", "*"): 4.0})
    limits = Limits(num_workers=2, degrees={})
    assert search(graph, costs, limits).step_s == 8.0
    found = search(graph, costs, limits, ahead=("actor_gen",))
    assert found.step_s == 4.0
    taken = [set(found.allocation[n].workers) for n in ("actor_gen", "actor_train")]
    assert taken[0].isdisjoint(taken[1])


# ---- limits -----------------------------------------------------------------------------------------


def test_no_plan_breaks_a_limit() -> None:
    graph, draw = six_calls(), random.Random(5)

    def refusal(node: MFCDef, place: CallAllocation) -> str | None:
        if node.role == "reward" and place.topology.world_size > 1:
            return "a rule runs on one worker"
        return "3 layers do not cut in 2" if place.topology.pipeline == 2 else None

    def bytes_per_worker(allocation: dict[str, CallAllocation]) -> dict[int, float]:
        needs: dict[int, float] = {}
        for place in allocation.values():
            for worker in place.workers:
                needs[worker] = needs.get(worker, 0.0) + 12.0 / len(place.workers)
        return needs

    costs = random_table(graph, 4, draw)
    limits = Limits(
        num_workers=4,
        degrees={"actor": Degrees(tensor=2)},
        refusal=refusal,
        memory_bytes=30.0,
        bytes_per_worker=bytes_per_worker,
    )
    found = search(graph, costs, limits, deadline_s=3)
    assert max(bytes_per_worker(dict(found.allocation)).values()) <= 30.0
    for node in graph.nodes:
        place = found.allocation[node.name]
        assert refusal(node, place) is None
        assert node.role != "actor" or place.topology.tensor <= 2


def test_no_possible_plan_names_the_rule_that_leaves_none() -> None:
    graph = three_calls()
    costs = TableCosts(calls={(n.name, "*"): 1.0 for n in graph.nodes})
    reasons = iter(["7 heads", "5 layers", "7 heads", "3 rows", "5 layers"] + ["2 rules"] * 99)
    limits = Limits(
        num_workers=4,
        degrees={"actor": Degrees(data=1, tensor=1, pipeline=1)},
        refusal=lambda node, place: next(reasons) if node.name == "critic_inf" else None,
    )
    with golden.raises(ConfigError):
        search(graph, costs, limits)
    with golden.raises(ConfigErrors):
        options_of(graph, replace(limits, degrees={"": Degrees(data=0)}, refusal=lambda *of: None))


def test_too_little_memory_names_what_would_be_needed() -> None:
    graph = three_calls()
    costs = TableCosts(calls={(n.name, "*"): 1.0 for n in graph.nodes})
    limits = Limits(
        num_workers=2,
        degrees={},
        memory_bytes=1 << 20,
        bytes_per_worker=lambda allocation: {0: 3 << 20, 1: 2 << 20},
    )
    with golden.raises(ConfigError):
        search(graph, costs, limits, deadline_s=1)


def test_a_table_that_does_not_say_names_the_layout() -> None:
    graph = three_calls()
    with golden.raises(ConfigError):
        search(graph, TableCosts(calls={}), Limits(num_workers=1, degrees={}))
