"""Resources of a task: what is refused, the order of start; and what a user wants of them."""

import pickle

import golden
import pytest

from realsys.api.errors import ConfigError
from realsys.api.plain import from_plain, to_plain
from realsys.api.scheduling import (
    ExperimentScheduling,
    GroupOptions,
    Scheduling,
    SchedulingOptions,
    TasksGroup,
    WorkerType,
)


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
    with golden.raises(ConfigError):
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


WANTED = SchedulingOptions(
    all=GroupOptions(cpu=2, gpu=1, env_vars={"A": "1", "B": "1"}),
    model_worker=GroupOptions(cpu=4, gpu=0, env_vars={"B": "2"}),
)


def test_a_types_own_wins_over_that_of_all():
    assert WANTED.of(WorkerType.EVALUATOR) == WANTED.all
    assert WANTED.of(WorkerType.MODEL_WORKER) == GroupOptions(
        cpu=4, gpu=0, env_vars={"A": "1", "B": "2"}
    )


def test_what_is_not_set_stays_as_the_experiment_has_it():
    task = Scheduling(cpu=9, gpu=1, mem=5, env_vars={"C": "3"}, qos="high")
    groups = ExperimentScheduling(
        model_worker=TasksGroup(count=2, scheduling=task),
        master_worker=TasksGroup(count=1, scheduling=task),
    )
    found = WANTED.apply_to(groups).model_worker
    variables = {"A": "1", "B": "2", "C": "3"}
    wanted = Scheduling(cpu=4, gpu=0, mem=5, env_vars=variables, qos="high")
    assert found == TasksGroup(count=2, scheduling=wanted)
    assert SchedulingOptions().apply_to(groups) == groups


def test_those_of_a_phase_win_over_those_of_the_run():
    own = SchedulingOptions(model_worker=GroupOptions(cpu=1))
    assert own.on(WANTED).of(WorkerType.MODEL_WORKER).cpu == 1
    assert own.on(WANTED).of(WorkerType.MODEL_WORKER).gpu == 0
    assert own.on(WANTED).all == WANTED.all


def test_only_what_is_set_is_written():
    assert to_plain(SchedulingOptions()) == {}
    plain = to_plain(WANTED)
    assert plain["model_worker"] == {"cpu": 4, "gpu": 0, "env_vars": {"B": "2"}}
    assert plain.keys() == {"all", "model_worker"}
    assert from_plain(SchedulingOptions, plain) == WANTED
