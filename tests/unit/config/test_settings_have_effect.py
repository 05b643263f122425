"""Every setting of the built-in experiments means something somewhere, and a plan warns where it does not.

Each setting is varied in several contexts; a difference in what reaches workers and scheduler, or a
refusal, is an effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.plan.idle_settings import consumed, idle_settings
from launcher.submit.planning import default_experiment, make_plan
from realsys.api import registry
from realsys.api.errors import ConfigError
from realsys.api.plain import hints
from realsys.config.json_schema import json_schema
from realsys.config.option_tree import OptionRow, members, rows
from realsys.config.overrides import with_settings
from realsys.config.settings import read_words

CONTEXTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "ppo-math": (
        ("auto_eval=true", "exp_ctrl.save_freq_steps=5", "scheduling.model_worker.gpu=1"),
        ("actor.lora.rank=4", "critic.lora.rank=4", "ref.lora.rank=4", "algorithm.ref_ema_eta=0.5"),
        ("sft.model.lora.rank=4", "placement=split", "placement.n_model_workers=2"),
    ),
    "grpo-math-async": ((), ("schedule.success_range=0,1", "auto_eval=true", "reward_workers=1")),
    "dapo-math": ((),),
    "ppo-math-detached": ((),),
    "sft-math": (("model.lora.rank=2",),),
    "dpo": ((), ("loss=ipo",), ("loss=kto",), ("loss=simpo",)),
}
# Without effect in any run, by the setting's group; a plan warns of them.
NOWHERE = {
    "ref.optimizer": "the reference is not trained",
    "reward_model": "none, unless its path is given",
    "critic": "none, where the algorithm has none",
    "sft.task.agent_args": "fine-tuning asks nobody",
    "sft.task.env_args": "fine-tuning asks nobody",
    "sft.scheduling.generation_server": "fine-tuning has none",
    "sft.scheduling.gserver_manager": "fine-tuning has none",
    "sft.scheduling.rollout_worker": "fine-tuning has none",
    "sft.scheduling.evaluator": "fine-tuning has none",
    "sft.scheduling.reward_worker": "fine-tuning has none",
}


def varied(row: OptionRow, kind: Any) -> Iterator[Any]:
    """Other values of a setting."""
    value, kinds = row.default, members(kind)
    if " | " in row.range:
        yield from (v for v in row.range.split(" | ") if v != value)
    elif isinstance(value, bool) or (value is None and bool in kinds):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value / 2 if isinstance(value, float) else value + 2)
    elif value is None:
        yield from (v for k, v in ((int, 3), (float, 0.5), (str, "other")) if k in kinds)
    elif isinstance(value, str):
        yield "other"
    elif isinstance(value, tuple):
        yield (*value, 7) if row.type.endswith("numbers") else (*value, "other")
    else:
        yield {"other": "3"}


def put(options: Any, path: str, value: Any) -> Any:
    """The options with one value changed."""
    head, _, rest = path.partition(".")
    return dataclasses.replace(
        options, **{head: put(getattr(options, head), rest, value) if rest else value}
    )


def kind_of(options: Any, path: str) -> Any:
    """The type of a setting."""
    head, _, rest = path.partition(".")
    return kind_of(getattr(options, head), rest) if rest else hints(type(options))[head]


def refused(options: Any) -> list[str]:
    """What is refused."""
    phases = (options, *(p.experiment for p in options.prepared_by()))
    return [problem.what for phase in phases for problem in phase.problems()]


def has_effect(options: Any, base: tuple[Any, list[str]], row: OptionRow) -> bool:
    """Whether another value changes what reaches workers and scheduler, or what is refused."""
    for value in varied(row, kind_of(options, row.path)):
        try:
            other = put(options, row.path, value)
            if [*consumed(other)] != base[0] or refused(other) != base[1]:
                return True
        except Exception:  # refused, in whichever way
            return True
    return False


@pytest.mark.thorough
def test_every_setting_means_something_somewhere() -> None:
    known: dict[str, bool] = {}
    for name, contexts in CONTEXTS.items():
        for words in contexts:
            options = with_settings(default_experiment(name), words=words)
            base = [*consumed(options)], refused(options)
            for row in rows(options):
                if not row.section and not known.get(row.path):
                    known[row.path] = has_effect(options, base, row)
    idle = {path for path, effect in known.items() if not effect}
    groups = {next((g for g in NOWHERE if f"{path}.".startswith(f"{g}.")), path) for path in idle}
    assert groups == set(NOWHERE)


def table_in(schema: Any, at: Any, group: Any) -> Any:
    """The part of a schema that describes a group; of a choice's, that of its kind."""
    tables = [
        schema["$defs"][one["$ref"].rpartition("/")[2]] if "$ref" in one else one
        for one in at.get("anyOf", [at])
    ]
    kinds = [t for t in tables if t.get("properties", {}).get("kind", {}).get("const")]
    return next((t for t in kinds if t["properties"]["kind"]["const"] == group.kind), tables[0])


@pytest.mark.thorough
@pytest.mark.parametrize("name", registry.names("experiment"))
def test_every_setting_has_a_meaning_and_stands_in_the_schema(name: str) -> None:
    options = default_experiment(name)
    schema = json_schema(options)
    for row in rows(options):
        assert row.meaning, row.path
        at, here = schema, options
        for part in row.path.split("."):
            at = table_in(schema, at, here)["properties"][part]
            here = getattr(here, part)
        assert str(at["description"]).startswith(row.meaning), row.path


@pytest.mark.usefixtures("file_root")
@pytest.mark.parametrize(
    ("word", "idle"),
    [
        ("ref.optimizer.lr=1", True),
        ("evaluator.n=3", True),
        ("scheduling.rollout_worker.cpu=3", True),
        ("critic.lora.alpha=3", True),
        ("sft.seed=4", False),
        ("seed=1", False),  # the default
        ("exp_ctrl.ckpt_keep=7", False),
    ],
)
def test_a_plan_warns_of_settings_without_effect(word: str, idle: bool) -> None:
    warnings = make_plan("ppo-math", [word], trial="a").warnings
    assert any(f"{word.partition('=')[0]} has no effect" in w for w in warnings) == idle


CPUS = {"model_worker": 8, "generation_server": 7, "evaluator": 6, "all": 5}


@pytest.mark.usefixtures("file_root")
def test_cores_are_threads_that_compute() -> None:
    words = [f"scheduling.{kind}.cpu={n}" for kind, n in CPUS.items()]
    evaluated = [
        "auto_eval=true",
        "exp_ctrl.save_freq_steps=5",
        "sft.scheduling.model_worker.cpu=4",
    ]
    sft, main = make_plan("ppo-math-async", [*words, *evaluated], trial="a").phases
    assert {w.num_threads for w in sft.config.model_worker} == {4}
    assert {w.num_threads for w in main.config.model_worker} == {8}
    assert {s.backend_args["num_threads"] for s in main.config.generation_server} == {7}
    assert {e.num_threads for e in main.config.evaluator} == {6}
    cpus = {kind.value: group.scheduling.cpu for kind, group in main.scheduling.groups().items()}
    rest = dict.fromkeys(("master_worker", "gserver_manager", "rollout_worker"), 5)
    assert cpus == {"model_worker": 8, "generation_server": 7, "evaluator": 6, **rest}


@pytest.mark.usefixtures("file_root")
@pytest.mark.parametrize(
    ("word", "fix"),
    [("gen.n=3", "use group_size=3"), ("ref.lora.rank=8", "actor.lora.rank")],
)
def test_what_another_setting_says_is_refused(word: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_plan("ppo-math", [word], trial="a")
    assert refused.value.where == word.partition("=")[0]
    assert fix in refused.value.fix


def test_an_experiment_that_can_not_be_looked_at_is_left_alone() -> None:
    class Touchy(type(default_experiment("sft-math"))):  # type: ignore[misc]
        def initial_setup(self) -> Any:
            raise ValueError("not now")

    setting = next(read_words(["seed=3"], []))
    assert list(idle_settings(Touchy(), [setting])) == []
