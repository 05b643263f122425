"""Experiments by composition: what goes with what, and what is refused; tasks of a user's own."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import golden
import pytest
from changed_settings import changed

from experiments.algorithm import GRPO, PPO, CallMaker
from experiments.asynchronous import Async, RolloutOnly
from experiments.compose import RLExperiment
from experiments.detached import Detached
from experiments.grpo_math import grpo_math
from experiments.ppo_math import ppo_math
from experiments.recipes import grpo
from experiments.schedule import OneStepOff, Replay, Schedule, Sync
from experiments.task import GeneratedTask, register_task
from launcher.submit.planning import make_plan
from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.basics.losses import PPOLoss
from realsys.api.basics.rule_permissions import RulePermissions
from realsys.api.errors import ConfigError, DataError
from realsys.api.options import option
from realsys.api.plain import from_plain, to_plain


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> type[GeneratedTask]:
    """A registered task."""
    monkeypatch.setattr(plugin_table, "registered", {kind: {} for kind in registry.BUILTIN})

    @register_task
    @dataclass(frozen=True, kw_only=True)
    class Digits(GeneratedTask):
        """Digits to repeat."""

        kind = "digits"
        permissions = RulePermissions(trusted=True)  # no other process could find it
        length: int = option(4, "digits", ge=1)

        def question(self, rng: random.Random) -> dict[str, str]:
            text = "".join(rng.choices("0123456789", k=self.length))
            return {"prompt": f"Say {text}", "answer": text}

        @staticmethod
        def score(response: str, answer: str) -> float:
            return float(response == answer)

    return Digits


def what(experiment: RLExperiment) -> list[str]:
    return [problem.what for problem in experiment.problems()]


def test_each_schedule_has_the_settings_that_mean_something_for_it() -> None:
    def names(schedule: Schedule) -> set[str]:
        return {field.name for field in fields(schedule)}

    assert names(Sync()) == {"success_range", "max_gen_batches"}
    assert names(OneStepOff()) == set()
    assert names(Replay()) == {"folder", "max_staleness"}
    assert {"servers", "max_staleness"} <= names(Async())
    assert not {"max_staleness", "weights_through", "dump_limit_gib"} & names(RolloutOnly())
    assert not {"servers", "workers", "max_concurrent_rollouts"} & names(Detached())
    assert {"makers", "trainers", "max_staleness"} <= names(Detached())


def test_a_group_algorithm_has_no_settings_of_a_critic() -> None:
    of_a_critic = {"value_eps_clip", "gae_lambda", "critic_warmup_steps", "value_norm"}
    assert of_a_critic <= {field.name for field in fields(PPO())}
    assert not of_a_critic & {field.name for field in fields(GRPO())}


@pytest.mark.parametrize(
    "schedule", [Sync(), OneStepOff(), Async(), Detached(), RolloutOnly()], ids=lambda s: s.kind
)
@pytest.mark.parametrize("recipe", [ppo_math, grpo_math])
def test_every_algorithm_goes_with_every_schedule(recipe, schedule) -> None:
    run = replace(recipe(), schedule=schedule)
    assert what(run) == []
    config = run.with_prepared("sft", "/a/policy").initial_setup().lazy_init()
    assert bool(config.generation_server) is schedule.has_servers
    assert any(call.is_train for call in config.model_rpcs) is schedule.trains
    assert from_plain(RLExperiment, to_plain(run)) == run


def test_an_agent_without_servers_is_refused() -> None:
    for name, value in (("agent", "tool_use"), ("env", "calculator")):
        run = changed(grpo_math(), {f"task.{name}": value})
        assert len(what(run)) == 1
        assert what(replace(run, schedule=Async())) == []


def test_a_replay_needs_a_folder_of_a_run_that_was_kept(tmp_path: Path) -> None:
    golden.check(what(replace(ppo_math(), schedule=Replay())))
    empty = replace(ppo_math(), schedule=Replay(folder=str(tmp_path)))
    golden.check(what(empty))


def test_a_task_of_ones_own_goes_through_the_command_line(digits, file_root) -> None:
    words = ["task=digits", "sft.task=digits", "task.length=6", "schedule=async"]
    main = make_plan("grpo-math", words, trial="a").phases[-1].config
    (data,) = main.rollout_worker[0].datasets
    assert data.args["task"]["kind"] == "digits"
    assert data.args["task"]["length"] == 6
    assert main.rollout_worker[0].env_args["reward"] == "digits"


def test_a_policy_that_was_tuned_on_another_task_is_refused(digits, file_root) -> None:
    with pytest.raises(ConfigError) as refused:
        make_plan("grpo-math", ["task=digits"], trial="a")
    assert refused.value.where == "task and sft.task"
    assert "sft.task=digits" in refused.value.fix


def test_no_question_is_in_both_splits_and_a_seed_gives_the_same(digits) -> None:
    task = digits(train_size=500, eval_size=100)
    train, test = task.records("train", 3), task.records("test", 3)
    assert (len(train), len(test)) == (500, 100)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in test}
    assert task.records("test", 3) == test != task.records("test", 4)


def test_questions_that_are_all_alike_leave_nothing_to_hold_out(digits) -> None:
    class Same(digits):  # type: ignore[misc,valid-type]
        def question(self, rng: random.Random) -> dict[str, str]:
            return {"prompt": "Say 1", "answer": "1"}

    with golden.raises(DataError):
        [Same().records(split, 1) for split in ("train", "test")]


def test_the_rule_of_a_task_is_its_score_unless_one_is_named(digits) -> None:
    assert grpo(digits()).task.rule == "digits"
    assert registry.find_reward("digits")(response="12", answer="12") == 1.0
    assert digits(reward="math_verify").rule == "math_verify"


def test_another_code_of_a_task_makes_another_start(digits) -> None:
    """The product of the fine-tuning is found by the content of these files."""
    assert grpo(digits()).sft.input_files() == (__file__,)


def test_an_algorithm_of_ones_own_is_one_class(digits, file_root) -> None:
    """With a setting of its own, over the calls that stand."""

    @registry.register_kind
    @dataclass(frozen=True, kw_only=True)
    class Careful(GRPO):
        """GRPO that clips by half of what its setting says."""

        kind = "careful"
        width: float = option(0.2, "twice the clip range", gt=0)

        @property
        def _loss(self) -> PPOLoss:
            return PPOLoss(eps_clip=self.width / 2)

        def interface_args(self, maker: CallMaker) -> dict[str, Any]:
            return {**super().interface_args(maker), "loss": to_plain(self._loss)}

    words = ["algorithm=careful", "algorithm.width=0.5", "actor.path=none", "schedule=one_step_off"]
    calls = {
        c.name: c for c in make_plan("grpo-math", words, trial="a").phases[-1].config.model_rpcs
    }
    assert calls["actor_train"].interface_impl.args["loss"]["eps_clip"] == 0.25


WRONG_TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "no record": ({"question": lambda self, rng: None}, "question(rng) gave None"),
    "no answer": ({"question": lambda self, rng: {"prompt": "a"}}, "question(rng) gave {"),
    "raises": ({"question": lambda self, rng: 1 / 0}, "question(rng) raised ZeroDivisionError"),
    "other names": (
        {"score": staticmethod(lambda text, right: 1.0)},
        "a reward rule wants 'right', which an answer does not have",
    ),
    "text": (
        {"score": staticmethod(lambda response, answer: "1")},
        "reward rule 'wrong' returned '1'",
    ),
    "not finite": (
        {"score": staticmethod(lambda response, answer: float("nan"))},
        "reward rule 'wrong' returned nan",
    ),
}


@pytest.mark.parametrize(("members", "told"), WRONG_TASKS.values(), ids=list(WRONG_TASKS))
def test_a_plan_tries_one_question(digits, members: dict[str, Any], told: str) -> None:
    wrong = type("Wrong", (digits,), {"kind": "wrong", **members})
    wrong = register_task(dataclass(frozen=True, kw_only=True)(wrong))
    found = [w for w in what(grpo(wrong())) if w.startswith(told)]
    assert len(found) == 1, what(grpo(wrong()))


def test_fewer_questions_than_a_batch_are_refused_by_the_plan(digits) -> None:
    (told,) = what(replace(grpo(digits(train_size=7)), train_bs_n_seqs=8, sft=ppo_math().sft))[:1]
    golden.check(told)
    few = changed(ppo_math(), {"task.train_size": 32})  # arithmetic is made as well
    golden.check(what(few))


@pytest.mark.parametrize("kind", [3, "", "a,b", "a.b", "my task", None])
def test_a_task_needs_a_name_that_can_be_typed(digits, kind: Any) -> None:
    with golden.raises(ConfigError):
        register_task(type("Named", (digits,), {"kind": kind}))


def test_a_task_that_is_no_dataclass_of_its_own_is_refused(digits) -> None:
    with golden.raises(ConfigError):
        register_task(type("Plain", (digits,), {"kind": "plain"}))


def test_a_replay_of_other_batches_is_refused(tmp_path: Path) -> None:
    """It waited for ever for the record's datapoints."""
    (tmp_path / "plan.json").write_text('{"options": {"train_bs_n_seqs": 8}}')
    run = replace(ppo_math(), schedule=Replay(folder=str(tmp_path)), train_bs_n_seqs=16)
    golden.check(what(run))
    assert not any("recorded run" in told for told in what(replace(run, train_bs_n_seqs=8)))


def test_a_recipe_that_raises_is_an_error_of_its_own(digits, file_root) -> None:
    def wrong() -> RLExperiment:
        return grpo(digits(), grup_size=3)

    registry.register_experiment("wrong-recipe", wrong)
    with golden.raises(ConfigError):
        make_plan("wrong-recipe", [], trial="a")
