"""What plug-ins are given is checked against the fields that they declare when a plan is made."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import golden
import pytest

from launcher.submit.planning import make_plan
from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.basics.losses import PPOLoss
from realsys.api.errors import ConfigError
from realsys.api.experiment import ExperimentConfig
from realsys.api.model import (
    DatasetAbstraction,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
)
from realsys.api.options import OptimizerOptions
from realsys.config.plugin_arguments import argument_problems, plugin_argument_problems

pytestmark = pytest.mark.usefixtures("file_root")


@pytest.mark.parametrize(
    "words",
    [
        ("task.agent=math_multi_turn", "task.agent_args={max_turn: 3}"),
        ("task.agent=tool_use", "task.agent_args.max_turns=many"),
        ("task.agent_args.turns=2",),
        ("task.env_args={discount: yes}",),
        ("task.env_args._turn=2",),
    ],
)
def test_an_argument_that_a_plug_in_does_not_take_is_refused(words: tuple[str, ...]) -> None:
    with golden.raises(ConfigError) as refused:
        make_plan("grpo-math-async", words, trial="a")
    assert refused.value.where.startswith("task.")


def test_arguments_of_their_type_are_planned() -> None:
    words = ("task.agent=math_multi_turn", "task.agent_args.max_turns=3")
    words += ("task.env_args={turns: 2, discount: 1, right: none, feedback: again}",)
    (worker, *_) = make_plan("grpo-math-async", words, trial="a").phases[-1].config.rollout_worker
    assert worker.agent_args == {"max_turns": 3}
    assert worker.env_args["discount"] == 1


def test_a_class_whose_types_can_not_be_resolved_is_left_to_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass
    class Hidden:
        size: NoSuchName  # type: ignore[name-defined]  # noqa: F821

    monkeypatch.setitem(plugin_table.registered["agent"], "hidden", Hidden)
    assert list(argument_problems("agent", "hidden", {"wrong": 1}, where="here")) == []


# ---- a plan's own plug-ins ------------------------------------------------------------------------

CHANGES: dict[str, Callable[[ExperimentConfig, dict[str, Any]], ExperimentConfig]] = {
    "interface": lambda config, args: _with_call(config, args),
    "backend": lambda config, args: _with_shard(config, backend=args),
    "model": lambda config, args: _with_shard(config, model=args),
    "dataset": lambda config, args: _with_datasets(config, args),
}


def _with_call(config: ExperimentConfig, args: dict[str, Any]) -> ExperimentConfig:
    (call, *others) = config.model_rpcs
    impl = ModelInterfaceAbstraction(
        call.interface_impl.type_, {**call.interface_impl.args, **args}
    )
    return replace(config, model_rpcs=(replace(call, interface_impl=impl), *others))


def _with_shard(config: ExperimentConfig, **changes: dict[str, Any]) -> ExperimentConfig:
    (worker,) = config.model_worker
    (shard, *others) = worker.shards
    for part, args in changes.items():
        old = getattr(shard, part)
        shard = replace(shard, **{part: type(old)(old.type_, {**old.args, **args})})
    return replace(config, model_worker=(replace(worker, shards=(shard, *others)),))


def _with_datasets(config: ExperimentConfig, args: dict[str, Any]) -> ExperimentConfig:
    (worker,) = config.model_worker
    (data,) = worker.datasets
    worker = replace(worker, datasets=(DatasetAbstraction(data.type_, {**data.args, **args}),))
    return replace(config, model_worker=(worker,))


@pytest.fixture
def config() -> ExperimentConfig:
    return make_plan("ppo-math", trial="a").phases[-1].config


def test_clip_ranges_of_plans_of_before_are_those_of_ppo() -> None:
    former = {"eps_clip": 0.1, "eps_clip_higher": None, "c_clip": 3.0, "kl_ctl": 0.0}
    assert list(argument_problems("interface", "ppo_actor", former, where="x")) == []
    read = registry.read_arguments("interface", "ppo_actor", former)
    assert read == {"kl_ctl": 0.0, "loss": PPOLoss(eps_clip=0.1, c_clip=3.0)}
    (wrong,) = argument_problems("interface", "ppo_actor", {"eps_clip": 2}, where="x")
    assert wrong.what == "loss.eps_clip is 2.0"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "args", "what", "fix"),
    [
        ("interface", {"kl_ctrl": 0.2}, "'ppo_actor' takes no 'kl_ctrl'", "'kl_ctl'"),
        ("interface", {"eps_clip": 0.1}, "takes no 'eps_clip'", "'loss.eps_clip'"),
        ("interface", {"loss": {"kind": "ppo", "eps_clip": "wide"}}, "is 'wide'", "use: number"),
        ("interface", {"loss": {"kind": "ppo", "eps_clip": 2.0}}, "eps_clip is 2.0", "than 1"),
        ("interface", {"loss": {"kind": "gsop"}}, "no loss called 'gsop'", "'gspo'"),
        ("interface", {"loss": "gspo"}, "loss is 'gspo'", "a table with kind"),
        ("interface", {"loss": {"kind": "gspo", "eps": 1}}, "takes no 'loss.eps'", "eps_clip"),
        ("interface", {"loss": {"kind": "gspo", "eps_clip": 2}}, "loss.eps_clip is 2", "than 1"),
        ("interface", {"gen": {"temprature": 1}}, "takes no 'gen.temprature'", "'temperature'"),
        ("interface", {"gen": {"temperature": 0}}, "temperature is 0", "1e-06 or more"),
        ("interface", {"group_size": 0}, "group_size is 0", "1 or more"),
        ("interface", {"correction": "cap"}, "correction=cap bounds", "recompute_logprob"),
        ("backend", {"recomptue": True}, "backend 'fsdp' takes no 'recomptue'", "'recompute'"),
        ("backend", {"recompute": "yes"}, "recompute is 'yes'", "use: true or false"),
        ("backend", {"optimizer": {"lrr": 1.0}}, "takes no 'optimizer.lrr'", "'lr'"),
        ("backend", {"optimizer": {"lr": "1e-5"}}, "optimizer.lr is '1e-5'", "use: number"),
        ("backend", {"optimizer": 1e-5}, "optimizer is 1e-05", "use: group"),
        ("backend", {"optimizer": {"lr": -1.0}}, "optimizer.lr is -1.0", "more than 0"),
        ("backend", {"lora": {"target_modules": "q_proj"}}, "lora.target_modules", "list of texts"),
        ("model", {"dtpye": "float32"}, "model 'hf_causal_lm' takes no 'dtpye'", "'dtype'"),
        ("model", {"path": None}, "path is None", "use: text"),
        ("model", {"dtype": "half"}, "dtype is 'half'", "float16"),
        ("dataset", {"splitt": "train"}, "dataset 'math_prompts' takes no 'splitt'", "'split'"),
        ("dataset", {"split": "trian"}, "split is 'trian'", "one of train, test"),
        ("dataset", {"train_size": 1.5}, "train_size is 1.5", "whole number"),
        ("dataset", {"seed": 3}, "takes no 'seed'", "use one of"),
    ],
)
def test_each_kind_of_plug_in_is_given_what_it_takes(
    config: ExperimentConfig, kind: str, args: dict[str, Any], what: str, fix: str
) -> None:
    assert list(plugin_argument_problems(config)) == []
    (problem,) = plugin_argument_problems(CHANGES[kind](config, args))
    assert what in problem.what
    assert fix in problem.fix
    assert kind in problem.where


def test_all_wrong_arguments_are_told_at_once_with_their_places(config: ExperimentConfig) -> None:
    wrong = _with_call(config, {"eps_klip": 0.2, "kl_ctl": "low"})
    wrong = _with_datasets(_with_shard(wrong, backend={"recomptue": True}), {"split": 1})
    found = {p.what: p.where for p in plugin_argument_problems(wrong)}
    assert found == {
        "interface 'ppo_actor' takes no 'eps_klip'": "call 'actor_gen', interface 'ppo_actor'",
        "kl_ctl is 'low'": "call 'actor_gen', interface 'ppo_actor'",
        "backend 'fsdp' takes no 'recomptue'": "role 'actor', backend 'fsdp'",
        "split is 1": "training data, dataset 'math_prompts'",
    }


def test_equal_arguments_are_told_once(config: ExperimentConfig) -> None:
    call = replace(config.model_rpcs[0], interface_impl=ModelInterfaceAbstraction("sft", {"a": 1}))
    calls = tuple(replace(call, name=name) for name in ("one", "two"))
    (problem,) = plugin_argument_problems(replace(config, model_rpcs=calls))
    assert problem.where == "call 'one', call 'two', interface 'sft'"
    golden.check(problem)


def test_an_unknown_plug_in_and_a_missing_argument_are_told(config: ExperimentConfig) -> None:
    call = replace(config.model_rpcs[0], interface_impl=ModelInterfaceAbstraction("ppo_acter"))
    (problem,) = plugin_argument_problems(replace(config, model_rpcs=(call,)))
    golden.check((problem.what, "'ppo_actor'" in problem.fix))
    (worker,) = config.model_worker
    data = replace(worker, datasets=(DatasetAbstraction("rollout_dump", {"folder": "/x"}),))
    (problem,) = plugin_argument_problems(replace(config, model_worker=(data,)))
    golden.check(problem)


def test_a_setting_out_of_range_is_told_once_by_its_own_name() -> None:
    with pytest.raises(ConfigError) as refused:
        make_plan("grpo-math", ("algorithm.loss.eps_clip=2",), trial="a")
    assert refused.value.what == "algorithm.loss.eps_clip is 2.0"


# ---- a user's own ---------------------------------------------------------------------------------


class Shape(StrEnum):
    ROUND = "round"


@dataclass(frozen=True, kw_only=True)
class Typed:
    """What a user registers."""

    optimizer: OptimizerOptions
    layers: tuple[int, ...] = ()
    shape: Shape = Shape.ROUND
    folder: Path = Path("/")  # no plan holds one: the plug-in is given what stands there
    anything: Any = None
    made: list[int] = field(init=False, default_factory=list)


class Named(Typed):
    """Its own ``__init__`` takes what ``Arguments`` has."""

    Arguments = Typed

    def __init__(self, **given: Any) -> None:
        self.given = given


class Unchecked(Typed):
    Arguments = None


class OwnInit(Typed):
    def __init__(self, **given: Any) -> None:
        self.given = given


GOOD = {"optimizer": {"lr": 0.5}, "layers": [1, 2], "shape": "round", "folder": "/x"}


@pytest.mark.parametrize("made_by", [Typed, Named])
def test_a_users_plug_in_is_checked_by_its_fields_and_made_with_their_types(
    monkeypatch: pytest.MonkeyPatch, made_by: type
) -> None:
    monkeypatch.setitem(plugin_table.registered["backend"], "mine", made_by)
    assert list(argument_problems("backend", "mine", GOOD, where="role 'a'")) == []
    wrong = {"optimizer": {"lr": "a"}, "layers": ["b"], "shape": "square", "made": [1]}
    found = [p.what for p in argument_problems("backend", "mine", wrong, where="role 'a'")]
    assert found == [
        "optimizer.lr is 'a'",
        "layers is ['b']",
        "shape is 'square'",
        "backend 'mine' takes no 'made'",
    ]
    (missing,) = argument_problems("backend", "mine", {}, where="role 'a'")
    golden.check(missing)
    made = registry.make_backend(ModelBackendAbstraction("mine", GOOD))
    given = made.given if isinstance(made, Named) else vars(made)
    assert given["optimizer"] == OptimizerOptions(lr=0.5)
    assert (given["layers"], given["shape"], given["folder"]) == ((1, 2), Shape.ROUND, "/x")


@pytest.mark.parametrize("made_by", [Unchecked, OwnInit, lambda **given: given, dict])
def test_a_plug_in_that_alone_knows_what_it_takes_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, made_by: Any
) -> None:
    monkeypatch.setitem(plugin_table.registered["interface"], "mine", made_by)
    assert list(argument_problems("interface", "mine", {"wrong": 1}, where="call 'a'")) == []


def test_what_the_worker_gives_is_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Questions:
        tokenizer: Any
        seed: int
        size: int = 1

    monkeypatch.setitem(plugin_table.registered["dataset"], "mine", Questions)
    assert list(argument_problems("dataset", "mine", {"size": 2}, where="data")) == []
    (problem,) = argument_problems("dataset", "mine", {"seed": 2}, where="data")
    golden.check(problem)


# ---- the built-ins and their classes of arguments -------------------------------------------------

BUILT_IN = [(kind, name) for kind, table in registry.ARGUMENTS.items() for name in table]


@pytest.mark.parametrize("kind", registry.ARGUMENTS)
def test_every_built_in_has_a_class_of_arguments(kind: str) -> None:
    """One of its own, or it is a dataclass itself; agents in tokens load nothing that a plan lacks."""
    listed = registry.ARGUMENTS[kind].keys()
    assert listed <= registry.BUILTIN[kind].keys()
    others = registry.BUILTIN[kind].keys() - listed
    assert not others or kind in ("agent", "environment")
    for name in others:
        assert registry.arguments_class(kind, name) is not None, name


@pytest.mark.parametrize(("kind", "name"), BUILT_IN)
def test_a_built_in_takes_its_arguments_with_the_same_defaults(kind: str, name: str) -> None:
    fields_of = registry.arguments_class(kind, name)
    assert fields_of is not None
    made_by = registry.find(kind, name)
    taken = inspect.signature(made_by).parameters
    own = {k: p for k, p in taken.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    declared = inspect.signature(fields_of).parameters
    given = set(registry.CONTEXT.get(kind, ()))
    assert {k: p.default for k, p in own.items() if k not in given or k in declared} == {
        k: p.default for k, p in declared.items()
    }


def test_checking_loads_no_torch() -> None:
    code = (
        "import sys; from launcher.submit.planning import make_plan; from realsys.api import registry\n"
        "from realsys.config.plugin_arguments import argument_problems\n"
        "found = [p for kind, table in registry.BUILTIN.items() if kind in registry.ARGUMENTS\n"
        "         for name in table for p in argument_problems(kind, name, {'wrong': 1}, where='')]\n"
        "sys.exit('torch' in sys.modules or len(found) < 15)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=280, check=False).returncode == 0


TAKES_NONE = "reward 'math_verify' takes no 'strict'"


@pytest.mark.thorough
@pytest.mark.parametrize("experiment", ["grpo-math", "grpo-math-async"])
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("judge.urll=x",), "reward 'judge' takes no 'urll'"),
        (("judge.url=http://x",), "the judge has no model"),
        (("judge.url=http://x", "judge.model=m", "judge.at_once=0"), "at_once is 0"),
        (
            ("judge.url=http://x", "judge.model=m", "judge.tokens=1"),
            "reward 'judge' takes no 'tokens'",
        ),
        (("judge.url=http://x", "judge.model=m", "math_verify.strict=1"), TAKES_NONE),
        (("judge.url=http://x", "judge.model=m"), None),
    ],
)
def test_arguments_of_reward_rules_are_checked_once(
    experiment: str, words: tuple[str, ...], what: str | None
) -> None:
    given = ["task.reward=math_verify + 0.1*judge", *(f"task.reward_args.{w}" for w in words)]
    if what is None:
        assert make_plan(experiment, given, trial="a").phases
        return
    with golden.raises(ConfigError):
        make_plan(experiment, given, trial="a")
