"""Experiment + site → plan: phases, publish folders, scheduling checks, all mistakes together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import golden
import pytest

from launcher.plan.product_names import content_hash
from launcher.plan.resolve import resolve
from realsys.api.cluster import ClusterSpec
from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError, ConfigErrors, RealsysError
from realsys.api.experiment import Experiment, ExperimentConfig, Preparation
from realsys.api.model import (
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ModelShardID,
    ProcessTopology,
)
from realsys.api.options import option
from realsys.api.plain import from_plain, to_plain
from realsys.api.plan import LaunchPlan, plan_hash, plan_text
from realsys.api.scheduling import ExperimentScheduling, Scheduling, TasksGroup
from realsys.api.worker_configs import ExperimentSaveEvalControl, ModelShard, ModelWorker


@dataclass(frozen=True, kw_only=True)
class Tiny(Experiment):
    """One model, one call."""

    path: str | None = None
    seed: int = option(1, "seed", ge=0)
    tasks: int = 1
    input_key: str = "packed_prompts"
    cpu: int = 2
    broken: bool = False

    def problems(self) -> Iterator[ConfigError]:
        if self.path == "/bad":
            yield ConfigError("the path is bad", where="path", fix="use another")

    def scheduling_setup(self) -> ExperimentScheduling:
        return ExperimentScheduling(
            model_worker=TasksGroup(count=self.tasks, scheduling=Scheduling(cpu=self.cpu)),
            master_worker=TasksGroup(count=1, scheduling=Scheduling()),
        )

    def initial_setup(self) -> ExperimentConfig:
        if self.broken:
            raise ZeroDivisionError("my own bug")
        shard = ModelShard(
            id=ModelShardID(model_name=ModelName("model"), topo=ProcessTopology()),
            model=ModelAbstraction("hf_causal_lm", {"path": self.path or "/start"}),
            backend=ModelBackendAbstraction("fsdp"),
        )
        call = MFCDef(
            name="train",
            n_seqs=4,
            interface_type=ModelInterfaceType.TRAIN_STEP,
            interface_impl=ModelInterfaceAbstraction("sft"),
            model_name=ModelName("model"),
            input_keys=(self.input_key,),
        )
        return ExperimentConfig(
            exp_ctrl=ExperimentSaveEvalControl(),
            model_rpcs=(call,),
            model_worker=(ModelWorker(base_seed=self.seed, shards=(shard,)),),
        )


@dataclass(frozen=True, kw_only=True)
class Prepared(Tiny):
    """Starts from the product of another experiment."""

    first: Tiny | None = option(Tiny(), "what is prepared")

    def preparations(self) -> tuple[Preparation, ...]:
        if self.path is not None or self.first is None:
            return ()
        return (Preparation(name="sft", experiment_name="tiny", experiment=self.first),)

    def with_prepared(self, name: str, path: str) -> Prepared:
        assert name == "sft"
        return replace(self, path=path)


CLUSTER = ClusterSpec(file_root="/root folder", name_resolve="file:///root%20folder/name_resolve")


def plan_of(experiment: Experiment, *, trial: str = "run1", cpus: int | None = None) -> LaunchPlan:
    return resolve(
        "tiny", experiment, cluster=CLUSTER, trial_name=trial, user="me", machine_cpus=cpus
    )


def problems_of(experiment: Experiment, *, trial: str = "run1") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_of(experiment, trial=trial)
    error = caught.value
    return [p.what for p in getattr(error, "problems", (error,))]


def test_one_phase_in_the_trials_folder() -> None:
    plan = plan_of(Tiny())
    (phase,) = plan.phases
    assert plan.trial_dir == "/root folder/runs/me/tiny/run1"
    assert (phase.name, phase.folder, phase.publish) == ("main", plan.trial_dir, None)
    worker = phase.config.model_worker[0].worker_info
    assert (worker.name, worker.experiment_name, worker.trial_name) == (
        "model_worker/0",
        "tiny",
        "run1",
    )
    assert worker.watch_keys == ("worker/master_worker/0",)
    assert phase.config.master_worker[0].n_model_workers == 1


def test_a_preparation_becomes_a_phase_whose_product_the_main_phase_starts_from() -> None:
    prepare, main = plan_of(Prepared()).phases
    assert (prepare.name, prepare.experiment_name) == ("sft", "tiny")
    assert prepare.folder == "/root folder/runs/me/tiny/run1/prepare/sft"
    assert prepare.publish is not None
    folder, _, digest = prepare.publish.rpartition("/")
    assert folder == "/root folder/cache/sft"
    assert [(len(part), int(part, 16) >= 0) for part in digest.split("-")] == [(16, True)] * 2
    assert main.config.model_worker[0].shards[0].model.args["path"] == prepare.publish


def test_the_product_is_named_by_what_makes_it() -> None:
    def digest(first: Tiny) -> str | None:
        return plan_of(Prepared(first=first), trial="another").phases[0].publish

    assert digest(Tiny()) == plan_of(Prepared()).phases[0].publish
    assert digest(Tiny(cpu=1)) == digest(Tiny())  # resources do not change the product
    assert digest(Tiny(seed=2)) != digest(Tiny())


def test_preparations_of_preparations_come_first() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice(Prepared):
        def preparations(self) -> tuple[Preparation, ...]:
            if self.path is not None:
                return ()
            second = Prepared(first=Tiny(seed=5), seed=6)
            return (Preparation(name="rm", experiment_name="tiny", experiment=second),)

        def with_prepared(self, name: str, path: str) -> Twice:
            assert name == "rm"
            return replace(self, path=path)

    plan = plan_of(Twice())
    assert [p.name for p in plan.phases] == ["sft", "rm", "main"]
    for before, after in zip(plan.phases, plan.phases[1:], strict=False):
        assert after.config.model_worker[0].shards[0].model.args["path"] == before.publish


def test_a_plan_survives_the_disk_and_its_text_is_a_function_of_its_value() -> None:
    plan = plan_of(Prepared())
    assert from_plain(LaunchPlan, to_plain(plan)) == plan
    assert plan_hash(plan_text(plan)) == plan_hash(plan_text(plan_of(Prepared())))


def test_all_mistakes_of_all_phases_are_reported_at_once() -> None:
    bad = Prepared(seed=-1, first=Tiny(seed=-2, tasks=3, path="/bad"))
    golden.check(problems_of(bad, trial="a/b"))


def test_a_problem_of_a_preparation_names_its_phase() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(Prepared(first=Tiny(path="/bad")))
    assert caught.value.where == "phase sft: path"


def test_earlier_problems_are_told_first_and_once() -> None:
    told = ConfigError("seed is -1", where="seed, my.yaml:3", fix="use 0 or more")
    with pytest.raises(ConfigErrors) as caught:
        resolve(
            "tiny",
            Tiny(seed=-1, tasks=2),
            cluster=CLUSTER,
            trial_name="r",
            user="me",
            earlier=[told],
        )
    first, second = caught.value.problems
    assert first is told
    golden.check(second)


@pytest.mark.parametrize("tasks", [0, 2])
def test_counts_equal_the_configured_workers(tasks: int) -> None:
    golden.check(problems_of(Tiny(tasks=tasks)))


def test_a_key_that_nobody_makes() -> None:
    golden.check(problems_of(Tiny(input_key="packed_promts")))


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-x", "a/b", "a b", "ü", "a\n", "-" * 65, "a:b", "a%b"]
)
def test_names_that_can_not_be_paths_and_keys(name: str) -> None:
    golden.check(problems_of(Tiny(), trial=name))


@pytest.mark.parametrize("name", ["a", "run-1_b.2", "_x", "x-", "A" * 64])
def test_names_that_can(name: str) -> None:
    assert plan_of(Tiny(), trial=name).trial == f"tiny/{name}"


def test_an_experiments_own_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        plan_of(Tiny(broken=True))
    with golden.raises(RealsysError):  # unless its options explain it
        plan_of(Tiny(broken=True, seed=-1))


def test_more_cores_than_the_machine_has_is_a_warning() -> None:
    assert plan_of(Tiny(), cpus=2).warnings == ()
    (warning,) = plan_of(Tiny(), cpus=1).warnings
    golden.check(warning)


def test_content_hash_is_stable_across_processes() -> None:
    config = Tiny().initial_setup().lazy_init()
    assert content_hash(config) == content_hash(from_plain(ExperimentConfig, to_plain(config)))
