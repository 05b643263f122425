"""Resources of a task: the defaults per worker type, what is refused, the order of start."""

import pickle

import pytest

from realsys.api.errors import ConfigError
from realsys.api.scheduling import ExperimentScheduling, Scheduling, TasksGroup, WorkerType

GIB = 1024  # MiB


@pytest.mark.parametrize(
    ("made", "cpu", "gpu", "mem"),
    [
        (Scheduling.master_worker_default(), 16, 0, 20 * GIB),
        (Scheduling.model_worker_default(), 2, 1, 60 * GIB),
        (Scheduling.generation_server_default(), 4, 1, 60 * GIB),
        (Scheduling.gserver_manager_default(), 4, 0, 10 * GIB),
        (Scheduling.rollout_worker_default(), 4, 0, 20 * GIB),
        (Scheduling.evaluator_default(), 4, 1, 60 * GIB),
    ],
    ids=[kind.value for kind in (list(WorkerType))],
)
def test_each_worker_type_has_its_default(made, cpu, gpu, mem):
    assert (made.cpu, made.gpu, made.mem) == (cpu, gpu, mem)
    assert made.container_image is None  # the cluster spec's is taken


def test_an_override_replaces_one_field_of_a_default():
    made = Scheduling.model_worker_default(gpu=0.5, partition="a100")
    assert made == Scheduling(cpu=2, gpu=0.5, mem=60 * GIB, partition="a100")


def test_a_misspelt_override_is_refused():
    with pytest.raises(TypeError, match="cpus"):
        Scheduling.model_worker_default(cpus=4)


@pytest.mark.parametrize("gpu", [0, 0.25, 1, 8])
def test_whole_gpus_and_shares_of_one_are_allowed(gpu):
    assert Scheduling(gpu=gpu).gpu == gpu


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpu", 0),
        ("cpu", -2),
        ("mem", 0),
        ("gpu", -1),
        ("gpu", 1.5),
        ("gpu", float("nan")),
        ("gpu", float("inf")),
    ],
)
def test_what_no_task_can_have_is_refused_by_name(field, value):
    with pytest.raises(ConfigError) as refused:
        Scheduling(**{field: value})
    assert refused.value.where == f"scheduling.{field}"
    assert str(value) in refused.value.what


def test_a_group_may_be_empty_but_not_less():
    assert TasksGroup(count=0, scheduling=Scheduling()).count == 0
    with pytest.raises(ConfigError, match="count is -1"):
        TasksGroup(count=-1, scheduling=Scheduling())


def test_groups_come_in_the_order_in_which_they_start():
    one = TasksGroup(count=1, scheduling=Scheduling())
    whole = ExperimentScheduling(
        master_worker=one,
        model_worker=one,
        rollout_worker=one,
        gserver_manager=one,
        generation_server=one,
        evaluator=one,
    )
    assert list(whole.groups()) == [
        WorkerType.GENERATION_SERVER,
        WorkerType.GSERVER_MANAGER,
        WorkerType.MODEL_WORKER,
        WorkerType.MASTER_WORKER,
        WorkerType.ROLLOUT_WORKER,
        WorkerType.EVALUATOR,
    ]


def test_groups_without_tasks_are_left_out():
    two, none = (TasksGroup(count=n, scheduling=Scheduling()) for n in (2, 0))
    groups = ExperimentScheduling(master_worker=two, model_worker=two, rollout_worker=none).groups()
    assert set(groups) == {WorkerType.MASTER_WORKER, WorkerType.MODEL_WORKER}


def test_scheduling_survives_pickling():
    made = Scheduling(gpu=0.5, env_vars={"A": "1"}, extra={"nice": "10"})
    assert pickle.loads(pickle.dumps(made)) == made
