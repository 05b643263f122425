"""Measures quality and time of the plan search on random cost tables.

    python benchmarks/bench_plan_search.py [--tables 50] [--deadline 20]

For spaces small enough to enumerate: in how many tables the search finds the best plan, and how often
it proves so. For eight and more GPUs with the six calls of PPO: the distance to a lower bound of all
plans, and the time taken. Prints a markdown table. Starts nothing, needs no torch.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from itertools import product

from realsys.api.dataflow import DataflowGraph, MFCDef, build_graph
from realsys.api.model import ModelInterfaceAbstraction, ModelInterfaceType, ModelName
from realsys.planner.meshes import Degrees, places
from realsys.planner.search.plan_evaluator import PlanEvaluator
from realsys.planner.search.search import Limits, search
from realsys.planner.time.costs import TableCosts
from realsys.planner.time.simulated_timeline import Overheads

SMALL = ((2, 6), (4, 4), (8, 3))  # GPUs, calls
LARGE = ((8, 6), (16, 6), (64, 6))


def say(line: str) -> None:
    """A line of the answer, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def graph(num_calls: int) -> DataflowGraph:
    """PPO, or a part of it that still has both ends."""
    rows = {
        "actor_gen": ("generate", "actor", ("prompts",), ("seq",)),
        "critic_inf": ("inference", "critic", ("seq",), ("values",)),
        "actor_train": ("train_step", "actor", ("seq", "values"), ()),
        "critic_train": ("train_step", "critic", ("seq", "values"), ()),
        "ref_inf": ("inference", "ref", ("seq",), ("ref_logprobs",)),
        "rew_inf": ("inference", "reward", ("seq",), ("rewards",)),
    }
    names = list(rows)[:num_calls]
    more = ("ref_logprobs", "rewards")[: max(0, num_calls - 4)]
    nodes = []
    for name in names:
        kind, role, reads, writes = rows[name]
        nodes.append(
            MFCDef(
                name=name,
                n_seqs=64,
                interface_type=ModelInterfaceType(kind),
                interface_impl=ModelInterfaceAbstraction("any"),
                model_name=ModelName(role),
                input_keys=(*reads, *more) if kind == "train_step" else reads,
                output_keys=writes,
            )
        )
    return build_graph(nodes, dataset_keys=["prompts"])


def table(of: DataflowGraph, num_workers: int, draw: random.Random) -> TableCosts:
    """Calls that get faster with more workers, some hardly, each layout by another factor."""
    calls = {}
    for node in of.nodes:
        base, scaling = draw.uniform(1, 10), draw.uniform(0, 1)
        for topo in {place.topology for place in places(num_workers, Degrees())}:
            seconds = base / topo.world_size**scaling * draw.uniform(0.8, 1.5)
            calls[node.name, str(topo)] = seconds
    return TableCosts(
        calls=calls,
        fetch=draw.uniform(0, 0.3),
        realloc={"actor": draw.uniform(0, 1), "critic": draw.uniform(0, 1)},
        overheads=Overheads(call_s=0.02, step_s=0.1, load_s=0.05),
        synchronous=frozenset(n.name for n in of.nodes if draw.random() < 0.7),
    )


def best_of_all(of: DataflowGraph, costs: TableCosts, num_workers: int) -> float:
    """The shortest step, by looking at every plan."""
    options = [places(num_workers, Degrees())] * len(of.nodes)
    judge = PlanEvaluator(of, costs, options, num_workers=num_workers)
    return min(judge.step_s(plan) for plan in product(*(range(len(o)) for o in options)))


def small_spaces(tables: int, deadline_s: float) -> bool:
    """Prints a line a space; whether the best was found in at least 95 % of each one's tables."""
    say(
        "| GPUs | calls | plans | tables | best found | said so | search, median | all plans, median |"
    )
    say("|---:|---:|---:|---:|---:|---:|---:|---:|")
    good = True
    for num_workers, num_calls in SMALL:
        of, found, exact = graph(num_calls), 0, 0
        took: list[float] = []
        took_all: list[float] = []
        for seed in range(tables):
            costs = table(of, num_workers, random.Random(f"{num_workers} {num_calls} {seed}"))
            began = time.perf_counter()
            result = search(
                of, costs, Limits(num_workers=num_workers, degrees={}), deadline_s=deadline_s
            )
            took.append(time.perf_counter() - began)
            best = best_of_all(of, costs, num_workers)
            took_all.append(time.perf_counter() - began - took[-1])
            found += result.step_s <= best * (1 + 1e-9)
            exact += result.exact
        good = good and found >= 0.95 * tables
        plans = len(places(num_workers, Degrees())) ** num_calls
        say(
            f"| {num_workers} | {num_calls} | {plans:,} | {tables} | {found / tables:.1%} | "
            f"{exact / tables:.0%} | {statistics.median(took):.2f} s | "
            f"{statistics.median(took_all):.2f} s |",
        )
    return good


def large_spaces(tables: int, deadline_s: float) -> None:
    """Prints a line a space: step time with a tenth of the time, over that with all of it."""
    say("")
    say("| GPUs | calls | plans | tables | proven best | a tenth of the time, worst | median |")
    say("|---:|---:|---:|---:|---:|---:|---:|")
    for num_workers, num_calls in LARGE:
        of, exact, ratios = graph(num_calls), 0, []
        for seed in range(tables):
            costs = table(of, num_workers, random.Random(f"{num_workers} {num_calls} {seed}"))
            limits = Limits(num_workers=num_workers, degrees={})
            quick = search(of, costs, limits, deadline_s=deadline_s / 10)
            long = search(of, costs, limits, deadline_s=deadline_s, seed=2)
            exact += long.exact
            ratios.append(quick.step_s / long.step_s)
        plans = len(places(num_workers, Degrees())) ** num_calls
        say(
            f"| {num_workers} | {num_calls} | {plans:.1e} | {tables} | {exact / tables:.0%} | "
            f"{max(ratios):.3f} | {statistics.median(ratios):.3f} |",
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=70, help="random tables a small space")
    parser.add_argument("--large", type=int, default=5, help="random tables a large space")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds a search may take")
    given = parser.parse_args()
    good = small_spaces(given.tables, given.deadline)
    large_spaces(given.large, given.deadline)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
