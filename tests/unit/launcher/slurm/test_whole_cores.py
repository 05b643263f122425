"""Slurm gives jobs and steps whole cores: what a plan asks for where a core is several CPUs.

What a step of so many tasks and CPUs takes was asked of a real Slurm (22.05, nodes of 2 x 4 x 2, as
SelectTypeParameters CR_Core_Memory and CR_CPU_Memory): the table below.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import golden
import pytest
from stand_in_slurm import make_plan

from launcher.job.job_allocation import Allocation, JobRequest, allocate
from launcher.sites.site_problems import cluster_problems
from launcher.slurm.discovery import core_threads
from launcher.slurm.discovery.core_threads import (
    seen_by_partition,
    threads_of,
    with_threads,
)
from realsys.api.cluster import ClusterSpec, PartitionSpec, SlurmSpec
from realsys.api.errors import ClusterError
from realsys.api.plan import StepPlan
from realsys.api.scheduling import ExperimentScheduling, Scheduling, TasksGroup
from realsys.slurm.step_command import srun_argv

# tasks, CPUs of each, threads of a core: CPUs that `srun --exact` took
TAKEN = [(1, 1, 2, 2), (2, 1, 2, 2), (3, 1, 2, 4), (2, 2, 2, 4), (2, 3, 2, 8), (5, 1, 1, 5)]
THREADED = PartitionSpec(nodes=2, cpus=16, threads_per_core=2, memory_mib=64_000)
NODE = PartitionSpec(nodes=2, cpus=8, threads_per_core=1, memory_mib=64_000, gpus=2)


def site(partition: PartitionSpec, **slurm: object) -> ClusterSpec:
    return ClusterSpec(
        name="lab",
        scheduler="slurm",
        partitions={"main": partition},
        slurm=SlurmSpec(partition="main", **slurm),  # type: ignore[arg-type]
    )


def one_cpu(count: int, **scheduling: object) -> TasksGroup:
    return TasksGroup(count=count, scheduling=Scheduling(mem=1000, **scheduling))  # type: ignore[arg-type]


def asynchronous(**model: object) -> ExperimentScheduling:
    """The five kinds of ppo-math-async, a task each."""
    return ExperimentScheduling(
        master_worker=one_cpu(1),
        model_worker=one_cpu(1, **model),
        generation_server=one_cpu(1),
        gserver_manager=one_cpu(1),
        rollout_worker=one_cpu(1),
    )


def run(scheduling: ExperimentScheduling, cluster: ClusterSpec, **request: str) -> Allocation:
    return allocate(
        {"main": scheduling},
        cluster,
        JobRequest(**request),  # type: ignore[arg-type]
        trial="ppo/a",
        now=datetime(2026, 1, 1),
    )


def taken(step: StepPlan, threads_per_core: int) -> int:
    """As Slurm does it: CPUs of one task are whole cores, single CPUs share one."""
    cpus, tasks = step.cpus_per_task, step.num_tasks
    if cpus == 1:
        return -(-tasks // threads_per_core) * threads_per_core
    return tasks * -(-cpus // threads_per_core) * threads_per_core


@pytest.mark.parametrize(("tasks", "cpus", "per_core", "found"), TAKEN)
def test_the_rule_that_the_next_tests_count_by(
    tasks: int, cpus: int, per_core: int, found: int
) -> None:
    step = StepPlan(worker_type="model_worker", nodes=((1, tasks),), cpus_per_task=cpus, memory_mib=1)  # type: ignore[arg-type]  # fmt: skip
    assert taken(step, per_core) == found


@pytest.mark.parametrize("cpu", [1, 2, 3, 5])
@pytest.mark.parametrize("per_core", [1, 2, 4])
def test_what_all_steps_take_is_what_the_job_asks_for(cpu: int, per_core: int) -> None:
    cluster = site(replace(THREADED, cpus=64, threads_per_core=per_core))
    found = run(asynchronous(cpu=cpu), cluster)
    assert found.job is not None, found.problems
    (component,) = found.job.components
    assert component.cpus_per_node == sum(taken(s, per_core) for s in found.steps["main"])
    assert component.cpus_per_node % per_core == 0
    assert not found.warnings


def test_five_tasks_of_a_cpu_have_five_cores() -> None:
    """The scenario that hung: 5 CPUs are 3 cores, and each step takes one."""
    found = run(asynchronous(), site(THREADED))
    assert found.job is not None
    assert found.job.components[0].cpus_per_node == 10
    assert found.job.components[0].threads_per_core == 2
    assert found.job.spare == ((6, 58_488, 0),)
    assert {s.cpus_per_task for s in found.steps["main"]} == {2}


def test_tasks_that_would_starve_each_other_are_refused() -> None:
    """Nine tasks of one CPU: 9 of 16 CPUs, and 9 of 8 cores."""
    lone = replace(THREADED, nodes=1)
    found = run(ExperimentScheduling(master_worker=one_cpu(1), model_worker=one_cpu(8)), site(lone))
    (problem,) = found.problems
    golden.check(problem)
    eight = ExperimentScheduling(master_worker=one_cpu(1), model_worker=one_cpu(7))
    assert run(eight, site(lone)).job is not None


def test_a_smaller_task_that_is_proposed_is_one_of_fewer_cores() -> None:
    lone = replace(THREADED, nodes=1)
    scheduling = ExperimentScheduling(master_worker=one_cpu(1), model_worker=one_cpu(2, cpu=8))
    (problem,) = run(scheduling, site(lone)).problems
    assert "model_worker.cpu=6 (now 8)" in problem.fix


def test_a_core_that_is_not_whole_is_nobodys() -> None:
    """15 CPUs of a node that keeps one for itself: 7 cores."""
    odd = replace(THREADED, cpus=15, nodes=1)

    def with_model_workers(count: int) -> Allocation:
        scheduling = ExperimentScheduling(master_worker=one_cpu(1), model_worker=one_cpu(count))
        return run(scheduling, site(odd))

    assert with_model_workers(6).job is not None
    assert with_model_workers(7).job is None


@pytest.mark.parametrize("option", [{"hint": "nomultithread"}, {"threads-per-core": "1"}])
def test_a_site_that_uses_one_thread_of_a_core_counts_cores(option: dict[str, str]) -> None:
    """8 cores of 16 CPUs, a task of one CPU takes one."""
    cluster = site(THREADED, extra_sbatch=option)
    found = run(asynchronous(cpu=4), cluster)
    assert found.job is not None, found.problems
    assert found.job.components[0].cpus_per_node == 8
    assert found.job.spare[0][0] == 0
    unknown = run(
        asynchronous(), site(replace(THREADED, threads_per_core=None), extra_sbatch=option)
    )
    assert not unknown.warnings


@pytest.mark.parametrize("name", ["hint", "threads_per_core"])
def test_steps_that_would_count_otherwise_than_their_job_are_refused(name: str) -> None:
    cluster = replace(site(THREADED, extra_srun={name: "1"}), file_root="/r")
    (problem,) = cluster_problems(cluster)
    assert problem.where == f"slurm.extra_srun.{name}"
    assert "slurm.extra_sbatch" in problem.fix


def test_where_nobody_knows_steps_without_gpus_take_no_cpus_of_their_own() -> None:
    """None of them waits for a core then; those with GPUs must have their own."""
    unknown = replace(THREADED, threads_per_core=None, gpus=1)
    found = run(asynchronous(gpu=1), site(unknown))
    shares = {s.worker_type.value: s.shares_cpus for s in found.steps["main"]}
    assert shares.pop("model_worker") is False
    assert set(shares.values()) == {True}
    (warning,) = found.warnings
    golden.check(warning)


def test_of_two_partitions_cores_are_whole_in_both() -> None:
    cluster = site(THREADED)
    both = replace(cluster, partitions={"main": THREADED, "other": replace(NODE, gpus=0)})
    group = one_cpu(1, partition="main,other")
    scheduling = ExperimentScheduling(master_worker=group, model_worker=group)
    found = run(scheduling, both)
    assert found.job is not None
    assert found.job.components[0].cpus_per_node == 4


@pytest.mark.parametrize(
    ("cpus", "shape", "found"),
    [
        ("16", "2:4:2", 2),
        ("8", "2:4:2", 1),  # CPUs=8 in slurm.conf: a core is one CPU
        ("64", "2:32:1", 1),
        ("128+", "2+:16+:4+", 4),
        ("14", "2:4:2", 2),  # a core is kept for the system
        ("?", "2:4:2", None),
        ("16", "(null)", None),
    ],
)
def test_threads_in_sinfos_words(cpus: str, shape: str, found: int | None) -> None:
    assert threads_of(cpus, shape) == found


def test_a_partition_has_the_most_threads_of_its_nodes() -> None:
    said = (
        "main|16|2:4:2|n/a\nmain|24|1:24:1|n/a\nbig|24|1:24:1|3:00\nslurm_load_partitions: error\n"
    )
    assert seen_by_partition(said) == {
        "main": (2, None),
        "big": (1, "3:00"),
    }  # of main it is MaxTime


def test_slurm_is_asked_only_for_what_the_site_file_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def answer(argv: list[str], **_: object) -> object:
        calls.append(argv)
        raise ClusterError("nobody there", where="sinfo", fix="")

    monkeypatch.setattr(core_threads, "run_slurm", answer)
    assert with_threads(site(THREADED)) == site(THREADED)
    assert not calls
    unknown = site(replace(THREADED, threads_per_core=None))
    assert with_threads(unknown) == unknown  # no answer is no error
    assert len(calls) == 1


# ------------------------------------------------------------------ jobs beside each other


def test_jobs_of_a_split_trial_share_nodes_where_they_fit() -> None:
    """4 CPUs and 3: one node of 8 has room for both, and components of one job never share it."""
    lone = replace(NODE, nodes=1)
    scheduling = ExperimentScheduling(
        master_worker=one_cpu(1, cpu=4, constraint="a"), model_worker=one_cpu(1, cpu=3)
    )
    found = run(scheduling, site(lone), layout="split")
    assert found.job is not None, found.problems
    (problem,) = run(scheduling, site(lone), layout="het").problems
    golden.check(problem)


@pytest.mark.parametrize("more", [{"cpu": 5}, {"mem": 62_000}, {"gpu": 2}])
def test_jobs_that_never_run_at_the_same_time_are_refused(more: dict[str, object]) -> None:
    model = TasksGroup(count=1, scheduling=Scheduling(**{"cpu": 1, "mem": 2000, **more}))  # type: ignore[arg-type]
    master = TasksGroup(count=1, scheduling=Scheduling(cpu=4, mem=2000, gpu=1))
    scheduling = ExperimentScheduling(master_worker=master, model_worker=model)
    (problem,) = run(scheduling, site(replace(NODE, nodes=1)), layout="split").problems
    golden.check(problem)
    whole = ExperimentScheduling(master_worker=one_cpu(1), model_worker=one_cpu(1))
    alone = site(replace(NODE, nodes=1), exclusive=True)
    assert run(whole, alone, layout="split").problems


def test_a_default_time_that_the_site_file_does_not_say_is_slurms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "main|16|2:4:2|20:00\n"
    done = subprocess.CompletedProcess(["sinfo"], 0, said, "")
    monkeypatch.setattr(core_threads, "run_slurm", lambda argv, **_: done)
    unknown = site(replace(THREADED, threads_per_core=None))
    found = with_threads(unknown).partitions["main"]
    assert (found.threads_per_core, found.default_time) == (2, "20:00")
    written = site(replace(THREADED, threads_per_core=None, default_time="5"))
    assert with_threads(written).partitions["main"].default_time == "5"


# ------------------------------------------------------------------ srun's share


@pytest.mark.parametrize("shares", [False, True])
def test_a_step_without_cpus_of_its_own_overlaps_the_others(shares: bool, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, step={"shares_cpus": shares})
    (phase,) = plan.phases
    step = phase.steps[-1]
    assert step.shares_cpus is shares
    argv = srun_argv(plan, phase, step, plan_hash="h", attempt=1, python="python")
    assert ("--overlap" in argv, "--exact" in argv) == (shares, not shares)
