"""Settings of which one of several kinds is chosen by name: every spelling, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import golden
import pytest

from experiments.sft import SFTExperiment
from experiments.task import MathTask
from launcher.cli import completion
from launcher.cli.command_line import run
from launcher.plan.idle_settings import idle_settings
from launcher.python_api import settings_words
from launcher.submit.planning import default_experiment, make_plan
from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.basics.choice import Choice, register_kind
from realsys.api.errors import ConfigError, UnknownName
from realsys.api.options import option, range_problems
from realsys.api.plain import from_plain, to_plain
from realsys.config.json_schema import json_schema
from realsys.config.option_tree import nearest, paths, rows, value_at, value_text
from realsys.config.overrides import apply_settings, with_settings
from realsys.config.settings import read_words
from realsys.observability.report.option_rows import option_rows


class Schedule(Choice):
    choice: ClassVar[str] = "schedule"


@dataclass(frozen=True, kw_only=True)
class Sync(Schedule):
    """Samples, then trains."""

    kind: ClassVar[str] = "sync"


@dataclass(frozen=True, kw_only=True)
class Servers:
    count: int = option(1, "generation servers", ge=1)


@dataclass(frozen=True, kw_only=True)
class Async(Schedule):
    """Samples all the time."""

    kind: ClassVar[str] = "async"
    max_staleness: int = option(1, "most updates between", ge=0)
    servers: Servers = option(Servers(), "what samples")

    def __post_init__(self) -> None:
        if self.max_staleness > 100 * self.servers.count:
            raise ConfigError("too stale", where="Async", fix="use less")


@dataclass(frozen=True, kw_only=True)
class Detached(Schedule):
    kind: ClassVar[str] = "detached"
    max_staleness: int = option(7, "most updates between", ge=0)


class Task(Choice):
    choice: ClassVar[str] = "lesson"


@dataclass(frozen=True, kw_only=True)
class Maths(Task):
    kind: ClassVar[str] = "maths"
    path: str | None = option(None, "questions")


@dataclass(frozen=True, kw_only=True)
class Warmed(Task):
    """A task within which there is another."""

    kind: ClassVar[str] = "warmed"
    path: str | None = option("here", "questions")
    first: Task | None = option(None, "what is learnt first")


@dataclass(frozen=True, kw_only=True)
class Phase:
    task: Task = option(Maths(), "what is learnt")
    steps: int = option(3, "how long", ge=1)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    seed: int = option(1, "seed", ge=0)
    schedule: Schedule = option(Sync(), "when it samples and when it trains")
    task: Task = option(Maths(path="mine"), "what is learnt")
    sft: Phase = option(Phase(), "what comes first")
    after: Task | None = option(None, "what comes last")
    eras: Mapping[str, Task] = option({}, "tasks by name")


STALE = replace(Recipe(), schedule=Async(max_staleness=4, servers=Servers(count=2)))


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice, kinds in (("schedule", (Sync, Async, Detached)), ("lesson", (Maths, Warmed))):
        monkeypatch.setitem(registry.BUILTIN, choice, {})
        monkeypatch.setitem(plugin_table.registered, choice, {})
        for kind in kinds:
            register_kind(kind)


def one(*words: str, of: Any = Recipe, config: Path | None = None) -> Recipe:
    found: Recipe = with_settings(of, words=words, config=config)
    return found


def problems(*words: str, of: Any = Recipe, config: Path | None = None) -> list[ConfigError]:
    return apply_settings(of, words=words, config=config).problems


@pytest.mark.parametrize(
    "words",
    [
        ("schedule=async", "schedule.max_staleness=2"),
        ("schedule.max_staleness=2", "schedule=async"),
        ("schedule.kind=async", "schedule.max_staleness=2"),
        ("schedule={kind: async, max_staleness: 2}",),
        ("schedule={kind: async}", "schedule={max_staleness: 2}"),
        ("schedule=async", "schedule.kind=async", "schedule.max_staleness=2"),
        ('schedule="async"', "schedule.max_staleness=2", "schedule.servers={count: 1}"),
    ],
)
def test_a_kind_and_its_members_in_any_order(words: tuple[str, ...]) -> None:
    applied = apply_settings(Recipe, words=words)
    assert (applied.problems, applied.options.schedule) == ([], Async(max_staleness=2))
    assert {"schedule.kind", "schedule.max_staleness"} <= set(applied.origins)
    assert applied.origins["schedule.max_staleness"].startswith("command line ")


@pytest.mark.parametrize(
    "text",
    [
        "schedule: async\nschedule.max_staleness: 2\n",
        "schedule: {kind: async, max_staleness: 2}\n",
        "schedule.max_staleness: 2\nschedule.kind: async\n",
        "schedule:\n  max_staleness: 2\n  kind: async\n",
    ],
)
def test_in_a_file(tmp_path: Path, text: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    assert one(config=config).schedule == Async(max_staleness=2)
    # The command line wins: of another kind, what the file says of the file's is nothing.
    assert one("schedule=sync", config=config).schedule == Sync()
    assert one("schedule=detached", config=config).schedule == Detached()
    assert one("schedule=async", config=config).schedule == Async(max_staleness=2)
    assert one("schedule.max_staleness=3", config=config).schedule == Async(max_staleness=3)


def test_members_in_a_file_that_names_no_kind(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("seed: 3\nschedule:\n  max_staleness: 2\n")
    assert one("schedule=async", config=config).schedule == Async(max_staleness=2)
    (problem,) = problems(config=config)
    assert problem.where == f"schedule.max_staleness, {config}:3"


def test_a_recipe_s_values_stay_where_its_kind_is_named() -> None:
    assert one("schedule=async", of=STALE) == STALE
    assert one("schedule.servers.count=3", of=STALE).schedule == Async(
        max_staleness=4, servers=Servers(count=3)
    )
    assert one("schedule=detached", of=STALE).schedule == Detached()
    assert one("task=maths").task == Maths(path="mine")
    assert one("task=warmed").task == Warmed()


def test_a_function_is_a_recipe_too() -> None:
    def recipe() -> Recipe:
        return STALE

    assert one("schedule.max_staleness=5", of=recipe).schedule == Async(
        max_staleness=5, servers=Servers(count=2)
    )


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (("schedule=asink",), "no schedule called 'asink'", "did you mean 'async'"),
        (
            ("schedule=asink", "schedule.x=1"),
            "no schedule called 'asink'",
            "did you mean 'async'",
        ),
        (("schedule=none",), "no schedule called 'none'", "sync"),
        (("schedule=",), "no schedule called ''", "sync"),
        (("schedule=3",), "no schedule called '3'", "sync"),
        (
            ("schedule=[1]",),
            "schedule is ['1'] (a single value is needed here)",
            "use schedule=async or schedule=detached or schedule=sync",
        ),
        (("schedule={}",), "schedule is {} (a single value is needed here)", "schedule=async"),
        (("schedule.kind={}",), "schedule is {} (a single value is needed here)", "schedule=sync"),
        (
            ("schedule={kind: [async]}",),
            "schedule is ['async'] (a single value is needed here)",
            "schedule=sync",
        ),
        (
            ("schedule.kind.x=1",),
            "schedule.kind is a single value, it has no 'x'",
            "write schedule.kind=VALUE",
        ),
        (
            ("schedule={kind: {x: 1}}",),
            "schedule is {'x': '1'} (a single value is needed here)",
            "schedule=sync",
        ),
        (
            ("schedule.max_staleness=2",),
            "schedule sync has no max_staleness",
            "add schedule=async or schedule=detached, or leave it out",
        ),
        (
            ("schedule.servers.count=2", "schedule=detached"),
            "schedule detached has no servers",
            "add schedule=async, or leave it out",
        ),
        (
            ("schedule.max_stalenes=2",),
            "no option called 'schedule.max_stalenes'",
            "did you mean 'schedule.max_staleness'?",
        ),
        (
            ("max_staleness=2",),
            "no option called 'max_staleness'",
            "'schedule.max_staleness'",
        ),
        (("count=2",), "no option called 'count'", "'schedule.servers.count'"),
        (
            ("schedule=async", "schedule.servers=3"),
            "schedule.servers is a group of options",
            "count",
        ),
        (
            ("schedule=async", "schedule.max_staleness=-1"),
            "schedule.max_staleness is -1",
            "use 0 or more",
        ),
        (
            ("schedule=async", "schedule.max_staleness=x"),
            "schedule.max_staleness is 'x'",
            "use a whole number",
        ),
        (("schedule=async", "schedule.max_staleness=101"), "too stale", "use less"),
        (("schedule=async", "schedule=sync"), "schedule.kind is given twice", "keep one of them"),
        (
            ("schedule=async", "schedule={kind: sync}"),
            "schedule.kind is given twice",
            "keep one of them",
        ),
        (
            ("schedule=async", "schedule.max_staleness=1", "schedule={max_staleness: 2}"),
            "schedule.max_staleness is given twice",
            "keep one of them",
        ),
        (("after.path=x",), "after is none", "add after=maths or after=warmed, or leave it out"),
        (("after=none", "after.path=x"), "after.path is given twice", "keep one of them"),
        (("after={path: x}",), "after is none", "add after=maths or after=warmed"),
        (("after.pth=x", "after=maths"), "no option called 'after.pth'", "'after.path'"),
        (("sft.task=math",), "no lesson called 'math'", "did you mean 'maths'"),
        (("task.first.path=x", "task=warmed"), "task.first is none", "add task.first=maths"),
    ],
)
def test_a_mistake_says_what_and_how_to_repair_it(
    words: tuple[str, ...], what: str, fix: str
) -> None:
    (problem,) = problems(*words)
    assert problem.what.startswith(what)
    assert fix in problem.fix
    assert "command line" in problem.where or problem.where.startswith("schedule.")


def test_the_refusal_says_where(tmp_path: Path) -> None:
    (problem,) = problems("schedule=asink")
    assert isinstance(problem, UnknownName)
    assert problem.where == "schedule, command line 'schedule=asink'"
    (problem,) = problems("schedule.max_staleness=2")
    assert problem.where == "schedule.max_staleness, command line 'schedule.max_staleness=2'"
    config = tmp_path / "c.yaml"
    config.write_text("seed: 2\nschedule:\n  kind: asink\n")
    assert {p.what: p.where for p in problems(config=config)} == {
        "no schedule called 'asink'": f"schedule, {config}:3"
    }
    config.write_text("schedule:\n  kind: async\nschedule: sync\n")
    assert {p.what: p.where for p in problems(config=config)} == {
        "schedule.kind is given twice": f"schedule.kind, {config}:2 and {config}:3"
    }


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("sft.task.path=x",), Recipe(sft=Phase(task=Maths(path="x")))),
        (("sft={task: {kind: warmed, path: y}}",), Recipe(sft=Phase(task=Warmed(path="y")))),
        (("sft={task: warmed, steps: 4}",), Recipe(sft=Phase(task=Warmed(), steps=4))),
        (("after=maths",), Recipe(after=Maths())),
        (("after=none",), Recipe()),
        (("after=maths", "after.path=z"), Recipe(after=Maths(path="z"))),
        (
            ("task=warmed", "task.first.path=p", "task.first=maths"),
            Recipe(task=Warmed(first=Maths(path="p"))),
        ),
        (
            ("task={kind: warmed, first: {kind: warmed, first: maths}}",),
            Recipe(task=Warmed(first=Warmed(first=Maths()))),
        ),
        (("eras.a=maths", "eras.a.path=x"), Recipe(eras={"a": Maths(path="x")})),
        (
            ("eras={a: maths, b: {kind: warmed, path: x}}",),
            Recipe(eras={"a": Maths(), "b": Warmed(path="x")}),
        ),
    ],
)
def test_choices_stand_anywhere(words: tuple[str, ...], options: Recipe) -> None:
    assert one(*words) == options


def test_none_wins_over_the_file_and_a_kind_over_its_none(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("after: {kind: warmed, path: x}\n")
    assert one("after=none", config=config).after is None
    assert one("after=none", of=replace(Recipe(), after=Maths())).after is None
    config.write_text("after: none\n")
    assert one("after=maths", "after.path=y", config=config).after == Maths(path="y")
    (problem,) = problems("after.path=y", config=config)
    assert problem.what == "after is none"


def test_a_kind_whose_defaults_do_not_fit_is_told_once() -> None:
    @register_kind
    @dataclass(frozen=True, kw_only=True)
    class Needy(Schedule):
        kind: ClassVar[str] = "needy"
        path: str

    (problem,) = problems("schedule=needy", "schedule.path=x")
    golden.check(problem)


def test_plain_values_and_back() -> None:
    options = one(
        "schedule=async", "task=warmed", "task.first=maths", "eras.a=maths", "after=maths"
    )
    plain = to_plain(options)
    assert plain["schedule"] == {"kind": "async", "max_staleness": 1, "servers": {"count": 1}}
    assert plain["task"]["first"] == {"kind": "maths", "path": None}
    assert from_plain(Recipe, plain) == options
    assert from_plain(Schedule, plain["schedule"]) == options.schedule


@pytest.mark.parametrize(
    ("data", "what", "fix"),
    [
        ({"kind": "asink"}, "no schedule called 'asink'", "async"),
        ({"max_staleness": 2}, "expected a table with kind: the name of a schedule", ""),
        ({"kind": ["async"]}, "expected a table with kind: the name of a schedule", ""),
        ("async", "expected a table with kind: the name of a schedule", ""),
        (None, "expected a table with kind: the name of a schedule", ""),
        ({"kind": "sync", "max_staleness": 2}, "unknown field 'max_staleness'", ""),
        ({"kind": "maths"}, "no schedule called 'maths'", "async"),
    ],
)
def test_plain_values_of_no_kind_are_refused(data: Any, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_plain(Recipe, {"schedule": data})
    assert refused.value.what.startswith(what)
    assert refused.value.where == "Recipe.schedule"
    assert fix in refused.value.fix


def test_a_field_of_one_kind_takes_no_other() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Narrow:
        schedule: Async = option(Async(), "asynchronous")

    assert one("schedule.max_staleness=3", of=Narrow).schedule == Async(max_staleness=3)
    (problem,) = problems("schedule=sync", of=Narrow)
    golden.check(problem)
    with golden.raises(ConfigError):
        from_plain(Narrow, {"schedule": {"kind": "sync"}})


def test_names_of_all_kinds_and_ranges_of_the_chosen_one() -> None:
    names = list(paths(STALE))
    assert {"schedule.servers.count", "task.first.path", "sft.task.path", "after.path"} <= set(
        names
    )
    golden.check(nearest("schedule.path", STALE))
    wrong = replace(STALE, schedule=Async(servers=Servers(count=0), max_staleness=0))
    assert [p.where for p in range_problems(wrong)] == ["schedule.servers.count"]


def test_rows_of_the_chosen_kind_and_of_the_choice() -> None:
    found = {row.path: row for row in rows(STALE)}
    row = found["schedule"]
    assert (row.default, row.range, row.section) == ("async", "async | detached | sync", True)
    golden.check(row.meaning)
    assert found["schedule.max_staleness"].default == 4
    assert found["schedule.servers"].default is None
    assert (found["after"].default, found["after"].type) == (None, "one of maths, warmed or none")
    assert "schedule.max_staleness" not in {row.path for row in rows(Recipe())}


def test_the_schema_has_every_kind() -> None:
    schema = json_schema(replace(STALE, seed=9))
    name, *tables = schema["properties"]["schedule"]["anyOf"]
    assert name == {"enum": ["async", "detached", "sync"]}
    assert [table["$ref"].rpartition("/")[2] for table in tables] == ["Async", "Detached", "Sync"]
    assert schema["$defs"]["Async"]["properties"]["kind"] == {"const": "async"}
    assert schema["$defs"]["Async"]["properties"]["max_staleness"] == {
        "default": 1,
        "description": "most updates between",
        "minimum": 0,
        "type": "integer",
    }
    golden.check(schema["properties"]["schedule"]["description"])
    assert schema["properties"]["seed"]["default"] == 9  # of the recipe
    assert "$ref" in str(schema["$defs"]["Warmed"]["properties"]["first"])
    assert {"type": "null"} in schema["properties"]["after"]["anyOf"]


def test_python_values_are_settings_too() -> None:
    words = settings_words(
        {"schedule": Async(max_staleness=2), "sft": {"task": Warmed(first=Maths())}}
    )
    assert one(*words) == replace(
        Recipe(), schedule=Async(max_staleness=2), sft=Phase(task=Warmed(first=Maths()))
    )


# ---- of an experiment ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Chosen(SFTExperiment):
    schedule: Schedule = option(Sync(), "when it samples and when it trains")


def chosen() -> Chosen:
    """Trains, as its schedule says."""
    return Chosen(seed=7, schedule=Async(max_staleness=4))


@pytest.fixture
def _chosen(monkeypatch: pytest.MonkeyPatch, file_root: Path) -> None:
    monkeypatch.setitem(plugin_table.registered["experiment"], "chosen", chosen)


@pytest.mark.usefixtures("_chosen")
def test_an_experiment_s_choice_in_plan_options_and_report() -> None:
    plan = make_plan("chosen", ["schedule.servers.count=2"], trial="a")
    assert plan.options["seed"] == 7
    assert plan.options["schedule"] == {
        "kind": "async",
        "max_staleness": 4,
        "servers": {"count": 2},
    }
    assert from_plain(Chosen, plan.options).schedule == Async(
        max_staleness=4, servers=Servers(count=2)
    )
    plan = make_plan("chosen", ["schedule=detached"], trial="a")
    golden.line(plan.warnings, "schedule")
    shown = {row.name: row for row in option_rows(plan.options, "chosen")}
    assert (shown["schedule.kind"].value, shown["schedule.kind"].default) == ("detached", "async")
    golden.check(shown["schedule.kind"].meaning)
    assert shown["seed"].default == "7"


@pytest.mark.usefixtures("_chosen")
def test_idle_and_changed_settings_by_name() -> None:
    settings = list(read_words(["schedule=detached", "schedule.max_staleness=3", "seed=8"], []))
    found = [setting.path for setting in idle_settings(default_experiment("chosen"), settings)]
    assert found == ["schedule", "schedule.max_staleness"]
    assert value_at(chosen(), "schedule.kind") == "async"
    assert value_at(chosen(), "schedule.servers.count") == 1


@pytest.mark.usefixtures("_chosen")
def test_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "--config", "chosen"]) == 0
    out = capsys.readouterr().out
    golden.line(out, "# schedule =")
    assert "schedule.max_staleness  4" in out
    assert run(["show", "--config", "chosen", "schedule=detached", "--json"]) == 0
    found = {row["path"]: row for row in json.loads(capsys.readouterr().out)["options"]}
    assert found["schedule"]["default"] == "detached"
    assert found["schedule.max_staleness"]["default"] == 7
    assert "schedule.servers" not in found
    assert run(["schema", "chosen"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["seed"]["default"] == 7
    assert run(["graph", "chosen"]) == 0
    assert run(["experiments"]) == 0
    assert "as its schedule" in capsys.readouterr().out
    assert completion.candidates(["plan", "chosen", "schedule"]) == ["schedule.", "schedule="]
    assert completion.candidates(["plan", "chosen", "schedule=a"]) == ["schedule=async"]
    assert completion.candidates(["plan", "chosen", "schedule.s"]) == ["schedule.servers."]
    assert run(["plan", "chosen", "schedule=x"]) == 4
    golden.check(capsys.readouterr().err)
    assert run(["plan", "chosen", "mode=async"]) == 4
    golden.check(capsys.readouterr().err)


@pytest.mark.usefixtures("file_root")
@pytest.mark.parametrize(
    "made_by",
    [
        lambda: 3,
        Recipe,
        3,
        lambda size: size,
    ],
)
def test_what_makes_no_experiment_is_refused(made_by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugin_table.registered["experiment"], "odd", made_by)
    with golden.raises(ConfigError):
        make_plan("odd", trial="a")


def test_a_kind_without_a_name_or_a_base_is_refused_in_words() -> None:
    class Nameless(Schedule):
        pass

    class Stray:
        kind = "stray"

    with golden.raises(ConfigError) as found:
        register_kind(Nameless)
    assert 'kind = "nameless"' in found.value.fix
    with golden.raises(ConfigError):
        register_kind(Stray)  # type: ignore[type-var]
    with golden.raises(ConfigError):
        register_kind(type("Bare", (Choice,), {"kind": "bare"}))


def test_an_entry_of_a_table_is_shown_by_what_it_changes():
    assert value_text({"hard": MathTask(eval_size=3)}) == "{hard: {kind: math, eval_size: 3}}"
    assert value_text({"hard": MathTask()}) == "{hard: {kind: math}}"
