"""Measures planning of a large Slurm job: 5,000 tasks of five kinds, and six kinds that are hard to pack.

    python benchmarks/bench_placement.py [--rounds 10]

Prints the median time of `allocate` (checks, placement, steps) and of the misfit's fixes, and the size
of the plan's job and steps as JSON. Goal: under 0.2 s and a page, on 1,000 nodes. Starts nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime

from launcher.job.job_allocation import Allocation, JobRequest, allocate
from launcher.job.task_placement import Misfit, NodeShape, Packing, TaskDemand, place
from realsys.api.cluster import ClusterSpec, PartitionSpec, SlurmSpec
from realsys.api.plain import to_plain
from realsys.api.scheduling import ExperimentScheduling, Scheduling, TasksGroup

GIB = 1024  # MiB
NODE = NodeShape(cpus=64, memory_mib=1_000_000, gpus=8)


def mixed(nodes: int) -> Allocation:
    """5,000 tasks: model workers, generation servers that share GPUs, CPU groups."""
    groups = ExperimentScheduling(
        model_worker=TasksGroup(count=2000, scheduling=Scheduling(cpu=2, gpu=1, mem=60 * GIB)),
        master_worker=TasksGroup(count=1, scheduling=Scheduling(cpu=16, mem=20 * GIB)),
        generation_server=TasksGroup(count=1498, scheduling=Scheduling(cpu=4, gpu=2, mem=60 * GIB)),
        gserver_manager=TasksGroup(count=1, scheduling=Scheduling(cpu=4, mem=10 * GIB)),
        rollout_worker=TasksGroup(count=1500, scheduling=Scheduling(cpu=4, mem=20 * GIB)),
    )
    partition = PartitionSpec(
        nodes=nodes, cpus=NODE.cpus, memory_mib=NODE.memory_mib, gpus=NODE.gpus, gpu_type="h200"
    )
    cluster = ClusterSpec(
        name="bench",
        scheduler="slurm",
        partitions={"gpu": partition},
        slurm=SlurmSpec(partition="gpu"),
    )
    return allocate(
        {"main": groups}, cluster, JobRequest(), trial="bench/1", now=datetime(2026, 1, 1)
    )


def hard() -> Packing | Misfit:
    """5,000 tasks of six sizes, of which none divides a node."""
    rows = ((500, 13, 100_001), (700, 17, 210_003), (900, 7, 50_007), (1100, 11, 33_333))
    rows += ((600, 23, 123_456), (1200, 3, 77_777))
    groups = [
        TaskDemand(name=f"group{i}", count=count, cpus=cpus, memory_mib=memory)
        for i, (count, cpus, memory) in enumerate(rows)
    ]
    return place(groups, NODE, max_nodes=1000)


def median_s(call: Callable[[], object], rounds: int) -> float:
    """Seconds of a call."""
    took_s = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        call()
        took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds: int = parser.parse_args().rounds
    found, packing = mixed(1000), hard()
    assert found.job is not None
    assert isinstance(packing, Packing)
    steps = {phase: [to_plain(step) for step in all_] for phase, all_ in found.steps.items()}
    size = len(json.dumps({"job": to_plain(found.job), "steps": steps}, indent=1))
    tasks = sum(step.num_tasks for step in found.steps["main"])
    lines = [
        f"mixed: {tasks} tasks on {found.job.components[0].nodes} of 1000 nodes: "
        f"{median_s(lambda: mixed(1000), rounds) * 1e3:.1f} ms, {size} bytes of plan",
        f"hard:  5000 tasks on {packing.num_nodes} nodes: {median_s(hard, rounds) * 1e3:.1f} ms",
        f"too few nodes, with its fixes: {median_s(lambda: mixed(400), rounds) * 1e3:.1f} ms",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
