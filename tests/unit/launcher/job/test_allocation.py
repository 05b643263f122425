"""What is asked of Slurm, worked out by hand and compared whole; and every reason to refuse."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import golden
import pytest

from launcher.job.groups import _common_resources
from launcher.job.job_allocation import Allocation, JobRequest, allocate
from launcher.job.task_placement import NodeShape, TaskDemand, place
from launcher.job.times import effective_limit
from realsys.api.cluster import ClusterSpec, ContainerSpec, PartitionSpec, SlurmSpec
from realsys.api.errors import ConfigError, UnknownName
from realsys.api.plain import from_plain, to_plain
from realsys.api.plan import JobComponent, JobLayout, JobPlan, StepPlan
from realsys.api.scheduling import ExperimentScheduling, Scheduling, TasksGroup, WorkerType

NOW = datetime(2026, 11, 21, 12, 0)
MASTER, MODEL = WorkerType.MASTER_WORKER, WorkerType.MODEL_WORKER
SERVER, ROLLOUT = WorkerType.GENERATION_SERVER, WorkerType.ROLLOUT_WORKER
GPU = PartitionSpec(
    nodes=4,
    cpus=64,
    threads_per_core=1,
    memory_mib=1_000_000,
    gpus=8,
    gpu_type="h200",
    nodelist="n[1-4]",
    features=("ib", "nvme"),
    max_time="2-00:00:00",
)
CPU = PartitionSpec(nodes=10, cpus=32, threads_per_core=1, memory_mib=200_000)
SITE = ClusterSpec(
    name="lab",
    scheduler="slurm",
    partitions={"gpu": GPU, "cpu": CPU},
    slurm=SlurmSpec(partition="gpu"),
)


def tasks(count, **scheduling):
    return TasksGroup(count=count, scheduling=Scheduling(**scheduling))


def phase(model=None, master=None, **others):
    return ExperimentScheduling(
        model_worker=model or tasks(8, cpu=2, gpu=1, mem=60_000),
        master_worker=master or tasks(1, cpu=16, mem=20_000),
        **others,
    )


def site(partitions=None, **slurm):
    return replace(
        SITE,
        slurm=replace(SITE.slurm, **slurm),
        partitions=SITE.partitions if partitions is None else partitions,
    )


def run(*phases, cluster=SITE, **request) -> Allocation:
    names = ["main"] if len(phases) < 2 else ["sft", "main"]
    return allocate(
        dict(zip(names, phases or [phase()], strict=True)),
        cluster,
        JobRequest(**request),
        trial="ppo/run1",
        now=NOW,
    )


def fine(*phases, **more) -> Allocation:
    found = run(*phases, **more)
    assert found.problems == ()
    assert found.job is not None
    assert from_plain(JobPlan, to_plain(found.job), where="plan.json") == found.job
    return found


def only(found: Allocation) -> ConfigError:
    assert found.job is None
    assert found.steps == {}
    (problem,) = found.problems
    return problem


# ------------------------------------------------------------------ whole examples


def test_eight_model_workers_and_the_master_share_one_node():
    # 8 x 2 + 16 CPUs, 8 x 60000 + 20000 MiB, 8 GPUs
    assert fine() == Allocation(
        job=JobPlan(
            layout=JobLayout.SINGLE,
            components=(
                JobComponent(
                    name="model_worker+master_worker",
                    worker_types=(MODEL, MASTER),
                    nodes=1,
                    cpus_per_node=32,
                    memory_mib_per_node=500_512,  # and the supervisor's 512
                    gpus_per_node=8,
                    gpu_type="h200",
                    partition="gpu",
                ),
            ),
            spare=((32, 499_488, 0),),
        ),
        steps={
            "main": (
                StepPlan(
                    worker_type=MODEL,
                    nodes=((1, 8),),
                    cpus_per_task=2,
                    memory_mib=60_000,
                    gpus_per_task=1,
                    gpus_per_node=8,
                    gpu_type="h200",
                    gpu_binding="visible",
                ),
                StepPlan(worker_type=MASTER, nodes=((1, 1),), cpus_per_task=16, memory_mib=20_000),
            )
        },
    )


def test_two_nodes_of_two_tasks_each():
    # 4 GPUs a task: two a node. The master's CPUs are asked for on both nodes: requests are uniform.
    found = fine(phase(tasks(4, cpu=2, gpu=4, mem=60_000)))
    model, master = found.steps["main"]
    assert (model.nodes, model.gpus_per_node, model.gpu_binding) == (((2, 2),), 8, "visible")
    assert master.nodes == ((1, 1),)
    (component,) = found.job.components
    assert (component.nodes, component.cpus_per_node, component.gpus_per_node) == (2, 20, 8)
    assert found.job.spare == ((44, 859_488, 0),)


def two_gpus(**spec):
    return site({"gpu": replace(GPU, gpus=2, **spec)})


def test_steps_that_would_hold_too_many_gpus_bind_them_a_task():
    # [server 1, model 1], [model 2]: --gres=gpu:1 and gpu:2 on the first node would be 3 of its 2.
    found = fine(phase(tasks(3, gpu=1), generation_server=tasks(1, gpu=1)), cluster=two_gpus())
    server, model, master = found.steps["main"]
    assert model == StepPlan(
        worker_type=MODEL,
        nodes=((1, 1), (1, 2)),
        cpus_per_task=1,
        memory_mib=1024,
        gpus_per_task=1,
        gpus_per_node=2,
        gpu_type=None,  # the job says it; with a type --gpus-per-task goes wrong
        gpu_binding="per_task",
    )
    assert (server.nodes, server.gpu_binding) == (((1, 1),), "per_task")
    assert master.gpu_binding == "none"
    (component,) = found.job.components
    assert (component.gpus_per_node, component.gpu_type) == (2, "h200")


def test_uneven_steps_stay_visible_where_the_node_has_gpus_enough():
    # [8], [1]: with --gres=gpu:8 the second node's task has 7 GPUs too many, and nobody else wants them.
    found = fine(phase(tasks(9, gpu=1)))
    model, _ = found.steps["main"]
    assert (model.nodes, model.gpus_per_node, model.gpu_binding) == (((1, 8), (1, 1)), 8, "visible")


def test_the_site_can_bind_gpus_a_task_but_not_shared_ones():
    groups = phase(tasks(4, gpu=1), generation_server=tasks(4, gpu=0.5))
    server, model, _ = fine(groups, cluster=site(gpu_binding="per_task")).steps["main"]
    assert (model.gpu_binding, server.gpu_binding) == ("per_task", "visible")


def test_fractions_share_gpus_within_their_group():
    # 0.3: three a GPU, so 7 need 3 GPUs; the request is 4 + 3.
    found = fine(phase(tasks(4, gpu=1), generation_server=tasks(7, gpu=0.3)))
    server, model, _ = found.steps["main"]
    assert (server.gpus_per_node, server.gpus_per_task, model.gpus_per_node) == (3, 0.3, 4)
    assert found.job.components[0].gpus_per_node == 7
    assert found.job.spare[0][2] == 1


def test_shared_gpus_that_are_uneven_beside_others_are_refused_with_the_count_that_works():
    # [2 servers on 1 GPU, 1 model], [4 servers on 2 GPUs]: --gres=gpu:2 beside the model on the first.
    found = run(phase(tasks(1, gpu=1), generation_server=tasks(6, gpu=0.5)), cluster=two_gpus())
    problem = only(found)
    golden.check(problem)
    assert problem.where == "scheduling.generation_server.count"


CPU_MASTER = tasks(1, cpu=16, mem=20_000, partition="cpu")


def test_groups_of_two_partitions_become_a_heterogeneous_job():
    found = fine(
        phase(master=CPU_MASTER, rollout_worker=tasks(5, cpu=4, mem=1000, partition="cpu"))
    )
    assert found.job == JobPlan(
        layout=JobLayout.HET,
        components=(
            JobComponent(
                name="master_worker+rollout_worker",
                worker_types=(MASTER, ROLLOUT),
                nodes=2,  # 16 + 4 x 4 CPUs fill the first
                cpus_per_node=32,
                memory_mib_per_node=24_512,
                partition="cpu",
            ),
            JobComponent(
                name="model_worker",
                worker_types=(MODEL,),
                nodes=1,
                cpus_per_node=16,
                memory_mib_per_node=480_000,
                gpus_per_node=8,
                gpu_type="h200",
                partition="gpu",
            ),
        ),
        spare=((0, 175_488, 0), (48, 520_000, 0)),
    )
    assert [(s.worker_type, s.component, s.nodes) for s in found.steps["main"]] == [
        (MODEL, 1, ((1, 8),)),
        (MASTER, 0, ((1, 1),)),
        (ROLLOUT, 0, ((1, 4), (1, 1))),
    ]


def test_split_gives_each_worker_type_its_own_job():
    found = fine(phase(rollout_worker=tasks(2)), phase(), layout="split")
    assert found.job.layout is JobLayout.SPLIT
    assert [(c.name, c.nodes) for c in found.job.components] == [
        ("master_worker", 1),
        ("model_worker", 1),
        ("rollout_worker", 1),
    ]
    assert [s.component for s in found.steps["sft"]] == [1, 0, 2]
    assert [s.component for s in found.steps["main"]] == [1, 0]


def test_het_of_one_kind_of_nodes_is_a_plain_job():
    assert fine(layout="het").job.layout is JobLayout.SINGLE


def test_phases_share_the_allocation_of_the_larger_of_each():
    # sft: one node of 40 CPUs, 2 GPUs; main: two nodes of up to 32 CPUs, 8 GPUs.
    sft = phase(tasks(2, cpu=12, gpu=1, mem=900), tasks(1, cpu=16, mem=800))
    found = fine(sft, phase(tasks(16, cpu=2, gpu=1, mem=100)))
    (component,) = found.job.components
    assert (component.nodes, component.cpus_per_node, component.gpus_per_node) == (2, 40, 8)
    assert component.memory_mib_per_node == 21_312  # 8 x 100 + 20000, and the supervisor's 512
    assert [s.nodes for s in found.steps["sft"]] == [((1, 2),), ((1, 1),)]
    assert [s.nodes for s in found.steps["main"]] == [((2, 8),), ((1, 1),)]


def test_whole_nodes_leave_nothing_to_spare():
    found = fine(cluster=site(exclusive=True))
    (component,) = found.job.components
    assert component.exclusive
    assert (component.cpus_per_node, component.memory_mib_per_node) == (64, 1_000_000)
    assert component.gpus_per_node == 8
    assert found.job.spare == ((0, 0, 0),)


def test_site_defaults_and_images_fill_what_groups_leave_open():
    cluster = replace(
        site(account="rl", qos="high", reservation="week", constraint="ib"),
        cpu_image="/i/cpu.sqsh",
        gpu_image="/i/gpu.sqsh",
        gpu_infer_image="/i/infer.sqsh",
        container=ContainerSpec(runtime="pyxis"),
    )
    groups = phase(
        generation_server=tasks(1, env_vars={"A": "1"}),
        rollout_worker=tasks(1, container_image="/i/r.sqsh"),
    )
    found = fine(groups, cluster=cluster)
    (component,) = found.job.components
    assert (component.account, component.qos) == ("rl", "high")
    assert (component.reservation, component.constraint) == ("week", "ib")
    server, model, master, rollout = found.steps["main"]
    assert [s.container_image for s in (server, model, master, rollout)] == [
        "/i/infer.sqsh",
        "/i/gpu.sqsh",
        "/i/cpu.sqsh",
        "/i/r.sqsh",
    ]
    assert server.env_vars == {"A": "1"}


def test_the_only_partition_described_is_taken_and_named():
    found = fine(cluster=site({"gpu": GPU}, partition=None))
    assert found.job.components[0].partition == "gpu"


def test_of_two_partitions_nodes_have_what_both_have():
    both = {"gpu": GPU, "small": replace(GPU, cpus=48, gpus=4, nodes=6)}
    found = fine(
        phase(tasks(8, gpu=1, partition="small,gpu"), tasks(1, partition="small,gpu")),
        cluster=site(both),
    )
    (component,) = found.job.components
    assert (component.partition, component.nodes) == ("small,gpu", 2)


# ------------------------------------------------------------------ time, job settings


def test_the_longest_limit_is_the_jobs_and_a_shorter_one_its_steps():
    found = fine(phase(tasks(8, gpu=1, time_limit="90"), tasks(1, time_limit="1-0")))
    assert found.job.components[0].time_limit == "1-00:00:00"
    assert [s.time_limit for s in found.steps["main"]] == ["01:30:00", None]


def test_the_sites_limit_is_the_jobs_and_no_steps():
    cluster = site(time_limit="4:00:00")
    found = fine(phase(tasks(8, gpu=1, time_limit="8:00:00")), cluster=cluster)
    assert found.job.components[0].time_limit == "08:00:00"
    assert [s.time_limit for s in found.steps["main"]] == [None, None]
    assert fine(cluster=cluster).job.components[0].time_limit == "04:00:00"


def test_a_component_without_a_limit_lasts_as_long_as_the_others():
    found = fine(phase(tasks(8, gpu=1, time_limit="60"), CPU_MASTER))
    assert [c.time_limit for c in found.job.components] == ["01:00:00", "01:00:00"]


def test_a_limit_that_reads_like_hours_is_warned_about_once():
    group = phase(tasks(8, gpu=1, time_limit="1:30"), tasks(1, time_limit="1:30"))
    found = fine(group, cluster=site(grace_seconds=30))
    assert found.job.components[0].time_limit == "00:02:00"
    (warning,) = found.warnings
    assert "write 1:30:00" in warning


@pytest.mark.parametrize(
    ("asked_for", "default_time", "words"),
    [
        ("2", None, "a time limit of 00:02:00 (2 min) leaves no time to train: Slurm signals"),
        ("1:30", None, "a time limit of 00:02:00 (2 min) leaves no time to train"),
        (
            None,
            "2:00",
            "of 00:02:00 (2 min), the partition's DefaultTime: none was requested leaves",
        ),
    ],
)
def test_a_limit_that_the_grace_uses_up_is_refused(asked_for, default_time, words):
    partitions = {"gpu": replace(GPU, default_time=default_time)}
    problem = only(run(phase(tasks(8, gpu=1, time_limit=asked_for)), cluster=site(partitions)))
    assert words in problem.what
    meant = "write 1:30:00" if asked_for == "1:30" else "--time 00:07:00 or more"
    assert meant in problem.fix
    assert "slurm.grace_seconds" in problem.fix


def test_a_limit_that_the_grace_nearly_uses_up_is_warned_about():
    (warning,) = fine(phase(tasks(8, gpu=1, time_limit="3"))).warnings
    assert "leaves little time" in warning
    assert fine(phase(tasks(8, gpu=1, time_limit="4"))).warnings == ()


def test_the_partitions_default_limit_is_told_and_another_one_is_not():
    partitions = {"gpu": replace(GPU, default_time="30:00")}
    (warning,) = fine(cluster=site(partitions)).warnings
    golden.check(warning)
    assert "--time" in warning
    assert fine(phase(tasks(8, gpu=1, time_limit="60")), cluster=site(partitions)).warnings == ()


def test_the_limit_that_holds_and_whose_it_is():
    assert effective_limit("60", GPU).words == "01:00:00 (1 h)"
    told = "2-00:00:00 (2 days), the partition's MaxTime: none was requested"
    assert effective_limit(None, GPU).words == told
    told = "00:05:00 (5 min), the partition's DefaultTime: none was requested"
    assert effective_limit(None, replace(GPU, default_time="5")).words == told
    golden.check(effective_limit(None, None).words)


def test_begin_and_deadline_are_absolute_and_the_launchs_own_win():
    group = tasks(8, gpu=1, time_limit="60", begin="now+1hour", deadline="2026-11-22T00:00:00")
    found = fine(phase(group)).job
    assert (found.begin, found.deadline) == ("2026-11-21T13:00:00", "2026-11-22T00:00:00")
    found = fine(phase(group), begin="now+2hours", deadline="2026-11-23T00:00:00").job
    assert (found.begin, found.deadline) == ("2026-11-21T14:00:00", "2026-11-23T00:00:00")


def test_dependency_and_requeue_are_the_launchs_else_the_sites():
    found = fine(cluster=site(requeue=True), dependency="afterok:12").job
    assert (found.requeue, found.dependency) == (True, "afterok:12")
    assert fine(cluster=site(requeue=True), requeue=False).job.requeue is False


def test_further_options_of_the_site_and_the_groups_are_joined():
    group = {"mail_user": "a@b.org", "wckey": "group"}
    found = fine(
        phase(tasks(8, gpu=1, extra=group), tasks(1, extra=group)),
        cluster=site(extra_sbatch={"wckey": "site", "nice": "10"}),
    )
    assert found.job.components[0].extra == {
        "wckey": "group",
        "nice": "10",
        "mail-user": "a@b.org",
    }


def test_node_lists_are_normalised_and_never_exceeded():
    lists = {"nodelist": "n1,n2,n3", "exclude": "n3"}
    found = fine(phase(tasks(16, gpu=1, **lists), tasks(1, **lists)))
    (component,) = found.job.components
    assert (component.nodelist, component.exclude, component.nodes) == ("n[1-3]", "n3", 2)
    problem = only(run(phase(tasks(17, gpu=1, **lists), tasks(1, **lists))))
    golden.check(problem)
    assert problem.where == "scheduling, phase main, and scheduling.model_worker.nodelist"


def test_a_constraint_that_no_node_meets_is_warned_about():
    found = fine(cluster=site(constraint="[ib*2&nvmee]"))
    golden.check(found.warnings)


# ------------------------------------------------------------------ refusals


def model(**scheduling):
    return phase(tasks(8, gpu=1, **scheduling), tasks(1, **scheduling))


@pytest.mark.parametrize(
    ("found", "what", "where", "fix"),
    [
        (
            lambda: run(phase(master=CPU_MASTER), layout="single"),
            "layout single needs equal nodes, but partition is 'gpu' for model_worker and 'cpu' for "
            "master_worker",
            "scheduling.master_worker.partition",
            "use layout het, or make them equal",
        ),
        (
            lambda: run(phase(), phase(tasks(8, gpu=1, qos="high")), layout="split"),
            "layout split needs equal nodes, but qos is not set for model_worker of phase sft and "
            "'high' for model_worker",
            "scheduling.model_worker.qos",
            "use layout het, or make them equal",
        ),
        (
            lambda: run(layout="hett"),
            "no layout 'hett'",
            "--layout",
            "did you mean 'het'?",
        ),
        (
            lambda: run(cluster=site({})),
            "cluster spec 'lab' describes no partition, 'gpu' was requested: the size of its nodes is "
            "unknown",
            "partitions in the cluster spec",
            "add `partitions:` (realsys clusters init writes it)",
        ),
        (
            lambda: run(cluster=site(partition=None)),
            "cluster spec 'lab' describes 2 partitions, none was requested: the size of its nodes is "
            "unknown",
            "scheduling.model_worker.partition",
            "name one with --partition: cpu, gpu",
        ),
        (
            lambda: run(model(partition="gpux")),
            "cluster spec 'lab' describes no partition 'gpux'",
            "scheduling.model_worker.partition",
            "did you mean 'gpu'?",
        ),
        (
            lambda: run(model(gpu_type="a100")),
            "model_worker requests GPUs of type 'a100', partition 'gpu' has 'h200'",
            "scheduling.model_worker.gpu_type",
            "request h200, or choose another partition",
        ),
        (
            lambda: run(phase(tasks(2, gpu=9))),
            "model_worker: one task needs 9 GPUs, a node has 8",
            "scheduling, phase main",
            "model_worker.gpu at most 8, or larger nodes",
        ),
        (
            lambda: run(phase(tasks(33, gpu=1))),
            "33 model_worker and 1 master_worker need 5 nodes, there are 4 (partition gpu)",
            "scheduling, phase main, and partitions.gpu in the cluster spec",
            "allow 5 nodes, or 32 tasks of model_worker (now 33)",
        ),
        (
            lambda: run(phase(tasks(9, gpu=1)), cluster=site({"gpu": replace(GPU, max_nodes=1)})),
            "9 model_worker and 1 master_worker need 2 nodes, there is 1 (most nodes of one job in "
            "partition gpu)",
            "scheduling, phase main, and partitions.gpu in the cluster spec",
            "allow 2 nodes, or 8 tasks of model_worker (now 9)",
        ),
        (
            lambda: run(phase(tasks(32, gpu=1), tasks(1, constraint="ib"))),
            "1 for master_worker and 4 for model_worker make 5 nodes of partition 'gpu', which has 4",
            "partitions.gpu in the cluster spec",
            "use layout single, which lets groups share nodes, or request less",
        ),
        (
            lambda: run(model(time_limit="2-00:01:00")),
            "time limit 2-00:01:00, partition 'gpu' allows 2-00:00:00",
            "scheduling.model_worker.time_limit",
            "request 2-00:00:00 or less, or choose another partition",
        ),
        (
            lambda: run(cluster=site(time_limit="0")),
            "time limit UNLIMITED, partition 'gpu' allows 2-00:00:00",
            "slurm.time_limit in the cluster spec",
            "request 2-00:00:00 or less, or choose another partition",
        ),
        (
            lambda: run(model(time_limit="2h")),
            "'2h' is not a time limit",
            "scheduling.model_worker.time_limit",
            "Slurm knows no units: write 02:00:00",
        ),
        (
            lambda: run(deadline="now+2days"),
            "a deadline needs a time limit: Slurm must know whether the job can end before it",
            "--deadline",
            "give --time as well",
        ),
        (
            lambda: run(phase(tasks(8, gpu=1, begin="now"), tasks(1, begin="noon"))),
            "a job has one begin, its groups set 'now' for model_worker; 'noon' for master_worker",
            "scheduling.model_worker.begin, scheduling.master_worker.begin",
            "make them equal, or give --begin",
        ),
        (
            lambda: run(model(nodelist="n[1-2],m3")),
            "no node 'm3' at this site",
            "scheduling.model_worker.nodelist",
            "use some of n[1-4]",
        ),
        (
            lambda: run(model(exclude="./list")),
            "'./list' is not a hostlist: Slurm takes a value with '/' for the name of a file",
            "scheduling.model_worker.exclude",
            "write names and ranges like gpu[01-04,7],login1",
        ),
        (
            lambda: run(model(extra={"cpus_per_task": "3"})),
            "--cpus-per-task is set by realsys itself",
            "scheduling.model_worker.extra",
            "leave it out: it follows from the plan",
        ),
        (
            lambda: run(model(extra={"time": "3"})),
            "--time is set by realsys itself",
            "scheduling.model_worker.extra",
            "use the setting for it: time_limit",
        ),
        (
            lambda: run(model(extra={"dependency": "singleton"}), dependency="afterok:1"),
            "--dependency is set by realsys itself",
            "scheduling.model_worker.extra",
            "leave it out, or leave out the dependency of this launch",
        ),
        (
            lambda: run(model(extra={"licences": "a"})),
            "sbatch has no option --licences",
            "scheduling.model_worker.extra",
            "did you mean 'licenses'?",
        ),
        (
            lambda: run(model(container_image="/i/x.sqsh")),
            "image '/i/x.sqsh' is named, and no container runtime is set",
            "scheduling.model_worker.container_image",
            "set container.runtime to pyxis or apptainer in the cluster spec, or remove the image",
        ),
    ],
)
def test_a_refusal_says_what_where_and_what_to_do(found, what, where, fix):
    problem = found().problems[0]
    assert (problem.what, problem.where, problem.fix) == (what, where, fix)


def test_a_dependency_among_the_further_options_is_fine_when_the_launch_has_none():
    assert fine(model(extra={"dependency": "singleton"})).job.components[0].extra == {
        "dependency": "singleton"
    }


def test_all_problems_are_told_at_once_and_each_only_once():
    found = run(
        model(partition="gpux", time_limit="2h", extra={"licences": "a"}), deadline="yesterdaY"
    )
    golden.check([p.what.split(":")[0] for p in found.problems][:2])
    assert isinstance(found.problems[0], UnknownName)
    assert len(found.problems) == 4
    assert found.job is None


def test_a_heterogeneous_job_has_at_most_128_components():
    from launcher.job.groups import too_many_components

    assert list(too_many_components([[]] * 128)) == []
    (problem,) = too_many_components([[]] * 129)
    golden.check(problem)


def test_steps_hold_what_placement_decided():
    demands = [
        TaskDemand(name="model_worker", count=20, cpus=2, memory_mib=60_000, gpus=1),
        TaskDemand(name="master_worker", count=1, cpus=16, memory_mib=20_000),
    ]
    packing = place(demands, NodeShape(cpus=64, memory_mib=1_000_000, gpus=8), max_nodes=4)
    steps = fine(phase(tasks(20, cpu=2, gpu=1, mem=60_000))).steps["main"]
    assert [s.num_tasks for s in steps] == [20, 1]
    assert steps[0].nodes == packing.runs("model_worker") == ((2, 8), (1, 4))


def test_a_node_that_is_full_has_no_more_for_the_supervisor():
    found = fine(phase(model=tasks(1, mem=999_000), master=tasks(1, mem=1_000)))
    assert found.job.components[0].memory_mib_per_node == 1_000_000


def test_several_jobs_can_not_be_requeued_as_one():
    problem = only(run(phase(master=tasks(1, partition="cpu")), layout="split", requeue=True))
    golden.check(problem)


def test_what_slurm_would_carry_over_to_later_components_is_told():
    master = tasks(1, partition="cpu", qos="spot")
    problem = only(run(phase(master=master), layout="het"))
    golden.check(problem)


def test_sizes_that_waste_nodes_are_told_with_how_few_there_could_be():
    # 10 GPUs a node: filled up 5 + 5, 4 + 4 and 3 + 3 + 3; 5 + 5 and 4 + 3 + 3 would waste none.
    sized = {"cpu": 2, "mem": 1_000}
    partition = PartitionSpec(nodes=999, cpus=64, threads_per_core=1, memory_mib=100_000, gpus=10)
    found = fine(
        phase(
            tasks(100, gpu=5, **sized),
            tasks(1, **sized),
            generation_server=tasks(100, gpu=4, **sized),
            rollout_worker=tasks(200, gpu=3, **sized),
        ),
        cluster=site({"gpu": partition}),
    )
    (component,) = found.job.components
    assert component.nodes == 167  # 50, 50 and 66 of them, and one for the last two
    (warning,) = found.warnings
    golden.check(warning)


def test_what_a_node_of_either_partition_has() -> None:
    other = replace(GPU, nodes=2, cpus=96, threads_per_core=2, gpus=4, nodelist="m1")
    assert _common_resources([GPU, replace(other, features=("ib", "fast"))]) == replace(
        GPU,
        nodes=2,
        threads_per_core=2,
        gpus=4,
        nodelist="n[1-4],m1",
        features=("ib", "nvme", "fast"),
    )
    unlike = _common_resources([GPU, CPU])
    assert (unlike.nodelist, unlike.max_time, unlike.gpu_type, unlike.gpus) == (None,) * 3 + (0,)
