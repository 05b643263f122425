"""Packing tasks onto equal nodes: never too much, as few nodes as brute force needs, fixes that fit."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import product

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.job.task_placement import Misfit, NodeShape, Packing, TaskDemand, place

NODE = NodeShape(cpus=64, memory_mib=1_000_000, gpus=8)


def group(name, count, cpus=1, memory_mib=1, gpus=0.0):
    return TaskDemand(name=name, count=count, cpus=cpus, memory_mib=memory_mib, gpus=gpus)


def placed(groups, node=NODE, max_nodes=None) -> Packing:
    found = place(groups, node, max_nodes=max_nodes)
    assert isinstance(found, Packing), found
    assert_holds(found, groups, node)
    return found


def gpus_used(tasks, gpus):
    return tasks * gpus if gpus >= 1 or not gpus else math.ceil(tasks / math.floor(1 / gpus + 1e-9))


def fits(tasks, groups, node):
    used = list(zip(tasks, groups, strict=True))
    return (
        sum(t * d.cpus for t, d in used) <= node.cpus
        and sum(t * d.memory_mib for t, d in used) <= node.memory_mib
        and sum(gpus_used(t, d.gpus) for t, d in used) <= node.gpus
    )


def counts_of(found):
    """Tasks of each group on node 0, 1, 2 …"""
    return {
        name: tuple(tasks for nodes, tasks in found.runs(name) for _ in range(nodes))
        for name in found.names
    }


def assert_holds(found, groups, node):
    counts = counts_of(found)
    assert {name: sum(tasks) for name, tasks in counts.items()} == {d.name: d.count for d in groups}
    assert {len(tasks) for tasks in counts.values()} == {found.num_nodes}
    for tasks in set(zip(*counts.values(), strict=True)):
        assert any(tasks)
        assert fits(tasks, groups, node)


def brute_force_nodes(groups, node, most=6):
    """Fewest nodes by trying every way to fill one after another; None when ``most`` are too few."""
    ways = [t for t in product(*(range(d.count + 1) for d in groups)) if fits(t, groups, node)]
    reached, goal = {tuple(0 for _ in groups)}, tuple(d.count for d in groups)
    for nodes in range(most + 1):
        if goal in reached:
            return nodes
        sums = {tuple(a + b for a, b in zip(r, w, strict=True)) for r in reached for w in ways}
        reached = {s for s in sums if all(a <= b for a, b in zip(s, goal, strict=True))}
    return None


# ------------------------------------------------------------------ by hand


def test_a_master_sits_on_the_spare_cores_of_the_gpu_node():
    found = placed([group("model_worker", 8, 2, 61440, 1), group("master_worker", 1, 16, 20480)])
    assert found.patterns == ((1, (8, 1)),)


def test_gpu_nodes_are_filled_whole_and_cpu_tasks_use_their_spare_cores():
    # 20 GPUs: 8, 8, 4. 64 - 8 x 2 = 48 spare cores take 12 rollout workers of 4 each.
    found = placed([group("model_worker", 20, 2, 1000, 1), group("rollout_worker", 20, 4, 1000)])
    assert counts_of(found) == {"model_worker": (8, 8, 4), "rollout_worker": (12, 8, 0)}
    assert found.runs("model_worker") == ((2, 8), (1, 4))


@pytest.mark.parametrize(
    ("gpus", "count", "nodes"),
    # 0.5: 16 a node. 0.3: three share a GPU, 24 a node. 1/3 the same. 0.6: none shares.
    [
        (0.5, 16, 1),
        (0.5, 17, 2),
        (0.3, 24, 1),
        (0.3, 25, 2),
        (1 / 3, 24, 1),
        (0.6, 8, 1),
        (0.6, 9, 2),
    ],
)
def test_tasks_share_gpus_by_the_fraction_they_ask_for(gpus, count, nodes):
    assert placed([group("w", count, gpus=gpus)]).num_nodes == nodes


def test_two_groups_never_share_one_gpu():
    one = NodeShape(cpus=8, memory_mib=100, gpus=1)
    assert placed([group("a", 1, gpus=0.5), group("b", 1, gpus=0.5)], one).num_nodes == 2


def test_groups_without_tasks_are_nowhere():
    found = placed([group("a", 0), group("b", 1)])
    assert counts_of(found) == {"a": (0,), "b": (1,)}
    assert placed([group("a", 0)]).num_nodes == 0


def test_a_dense_first_node_is_given_up_where_that_saves_a_node():
    # 7 GPUs: 4 + 3 twice. Large ones first (4, then 3) does it; 4 + 2 + 1 twice would need a third.
    found = placed(
        [group("four", 2, gpus=4), group("three", 2, gpus=3)],
        NodeShape(cpus=64, memory_mib=100, gpus=7),
    )
    assert counts_of(found) == {"four": (1, 1), "three": (1, 1)}
    # 10 GPUs: 5 + 5, 4 + 3 + 3, 4 + 3 + 3. Large ones first gives 5 + 5, 4 + 4, 3 + 3 + 3, 3.
    found = placed(
        [group("five", 2, gpus=5), group("four", 2, gpus=4), group("three", 4, gpus=3)],
        NodeShape(cpus=64, memory_mib=100, gpus=10),
    )
    assert counts_of(found) == {"five": (2, 0, 0), "four": (0, 1, 1), "three": (0, 2, 2)}


FIVES = [
    group("five", 1000, gpus=5),
    group("four", 1000, gpus=4),
    group("three", 2000, gpus=3),
]
TEN = NodeShape(cpus=64, memory_mib=100_000, gpus=10)


def test_many_nodes_are_told_with_how_few_there_could_be_where_filling_up_wastes():
    # 500 times the same: 3 x 500 nodes of 10 GPUs would have no GPU to spare.
    found = placed(FIVES, TEN)
    assert found.patterns[:2] == ((500, (2, 0, 0)), (500, (0, 2, 0)))
    assert (found.num_nodes, found.least_nodes) == (1667, 1500)
    refused = place(FIVES, TEN, max_nodes=1600)
    assert refused.needed == 1667
    golden.check(refused.why)


def test_runs_stay_few_at_a_thousand_nodes():
    groups = [
        group("model_worker", 3000, 2, 60_000, 1),
        group("generation_server", 1500, 4, 60_000, 1),
        group("rollout_worker", 500, 4, 20_000),
    ]
    found = placed(groups, max_nodes=1000)
    assert found.num_nodes == found.least_nodes == 563  # 4500 / 8 = 562.5
    assert len(found.patterns) <= 8


# ------------------------------------------------------------------ misfits


def test_a_task_larger_than_a_node_is_told_with_both_numbers():
    assert place([group("model_worker", 2, gpus=9)], NODE, max_nodes=None) == Misfit(
        why="model_worker: one task needs 9 GPUs, a node has 8",
        fix="model_worker.gpu at most 8, or larger nodes",
    )
    assert place([group("m", 1, 65, 2_000_000, 0.5)], replace(NODE, gpus=0), max_nodes=4) == Misfit(
        why="m: one task needs 0.5 GPU, a node has 0; m: one task needs 65 CPUs, a node has 64; "
        "m: one task needs 2000000 MiB, a node has 1000000",
        fix="m.gpu at most 0; m.cpu at most 64; m.mem at most 1000000, or larger nodes",
    )


def test_too_few_nodes_are_told_with_the_smallest_changes():
    # 5 x 200000 fill a node; 4 and the master, or 5 x 195904 + 20480 = 1000000.
    groups = [group("model_worker", 10, 2, 200_000, 1), group("master_worker", 1, 16, 20_480)]
    assert place(groups, NODE, max_nodes=2) == Misfit(
        why="10 model_worker and 1 master_worker need 3 nodes, there are 2",
        fix="allow 3 nodes, or 9 tasks of model_worker (now 10), "
        "or model_worker.mem=195904 (now 200000)",
        needed=3,
    )
    assert place([group("w", 9, 1, 1, 1)], NODE, max_nodes=1) == Misfit(
        why="9 w need 2 nodes, there is 1",
        fix="allow 2 nodes, or 8 tasks of w (now 9)",
        needed=2,
    )
    assert place([group("w", 1)], NODE, max_nodes=0) == Misfit(
        why="1 w need 1 node, there are 0", fix="allow 1 node", needed=1
    )


# ------------------------------------------------------------------ against brute force

small_groups = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.integers(1, 5),
        st.integers(1, 5),
        st.sampled_from([0.0, 0.0, 0.3, 0.5, 0.7, 1.0, 2.0, 3.0]),
    ),
    min_size=1,
    max_size=3,
).map(lambda rows: [group(f"g{i}", *row) for i, row in enumerate(rows)])
small_nodes = st.builds(
    NodeShape, cpus=st.integers(3, 9), memory_mib=st.integers(3, 9), gpus=st.integers(0, 5)
)


@pytest.mark.thorough
@settings(max_examples=300, deadline=None)
@given(small_groups, small_nodes, st.integers(0, 6))
def test_it_fits_when_brute_force_fits_on_as_few_nodes(groups, node, max_nodes):
    found, fewest = place(groups, node, max_nodes=max_nodes), brute_force_nodes(groups, node)
    if fewest is None or fewest > max_nodes:
        assert isinstance(found, Misfit)
    else:
        assert isinstance(found, Packing)
        assert found.num_nodes == found.least_nodes == fewest
        assert_holds(found, groups, node)
    assert place(groups, node, max_nodes=max_nodes) == found


@settings(max_examples=200, deadline=None)
@given(small_groups, small_nodes, st.integers(1, 3))
def test_what_a_misfit_proposes_fits_and_a_task_more_does_not(groups, node, max_nodes):
    found = place(groups, node, max_nodes=max_nodes)
    if isinstance(found, Packing) or found.needed is None:
        return
    assert placed(groups, node, found.needed).num_nodes == found.needed
    if match := re.search(r"(\d+) tasks of (\w+)", found.fix):
        most, name = int(match[1]), match[2]
        fewer = [replace(d, count=most) if d.name == name else d for d in groups]
        one_more = [replace(d, count=most + 1) if d.name == name else d for d in groups]
        placed(fewer, node, max_nodes)
        assert isinstance(place(one_more, node, max_nodes=max_nodes), Misfit)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 400),
            st.integers(1, 20),
            st.integers(1, 300_000),
            st.sampled_from([0.0, 0.0, 0.25, 1.0, 2.0, 4.0, 8.0]),
        ),
        min_size=1,
        max_size=6,
    ).map(lambda rows: [group(f"g{i}", *row) for i, row in enumerate(rows)])
)
def test_nothing_is_over_committed_at_any_size(groups):
    first = placed(groups)
    assert first.least_nodes <= first.num_nodes
    assert placed(groups) == first


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 64), st.sampled_from([0.0, 0.3, 1.0, 3.0, 5.0]))
def test_one_kind_of_task_takes_the_least_number_of_nodes(count, cpus, gpus):
    by_gpus = {0.0: 64, 0.3: 24, 1.0: 8, 3.0: 2, 5.0: 1}[gpus]
    found = placed([group("w", count, cpus, 1, gpus)])
    assert found.num_nodes == math.ceil(count / min(64 // cpus, by_gpus))


@settings(max_examples=30, deadline=None)
@given(st.tuples(*[st.integers(0, 300)] * 4), st.integers(0, 500))
def test_sizes_that_divide_a_node_waste_no_gpu(counts, cpu_tasks):
    sizes = (1, 2, 4, 8)
    groups = [group(f"gpu{s}", n, gpus=s) for s, n in zip(sizes, counts, strict=True)]
    total = sum(s * n for s, n in zip(sizes, counts, strict=True))
    found = placed([*groups, group("cpu", cpu_tasks)])
    # A GPU node has 56 or more spare cores; only without enough of them are there CPU nodes.
    by_cpus = math.ceil((sum(counts) + cpu_tasks) / 64)
    assert found.num_nodes == max(math.ceil(total / 8), by_cpus)
