"""Settings from words and YAML onto an experiment's options: what is accepted, and every refusal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import golden
import pytest

from experiments.sft import SFTExperiment
from launcher.submit.job_options import JobOptions
from realsys.api.errors import ConfigError, ConfigErrors
from realsys.api.options import option
from realsys.config.overrides import apply_overrides, apply_settings, with_settings
from realsys.config.settings import read_words


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: float = option(1e-5, "learning rate", gt=0)
    steps: int = option(10, "steps", ge=1)


@dataclass(frozen=True, kw_only=True)
class Pair:
    low: int = 0
    high: int = 10

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigError(
                f"low {self.low} is above high {self.high}", where="Pair", fix="swap them"
            )


@dataclass(frozen=True, kw_only=True)
class Actor:
    path: str | None = option(None, "folder")
    optimizer: Optimizer = option(Optimizer(lr=3e-5), "its optimizer")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a made-up experiment."""

    seed: int = option(1, "seed", ge=0)
    name: str = option("x", "a name")
    on: bool = True
    share: float = option(0.5, "a share", ge=0, le=1)
    kind: str = option("a", "kind", choices=("a", "b"))
    mode: Literal["fast", "slow"] = "fast"
    colour: Colour = Colour.RED
    sizes: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    anything: Any = None
    actor: Actor = option(Actor(), "the actor")
    critic: Actor = option(Actor(), "the critic")
    pair: Pair = option(Pair(), "two numbers")
    maybe: Pair | None = None


def one(*words: str) -> Options:
    return with_settings(Options, words=words)


def problems(*words: str, config: Path | None = None) -> list[ConfigError]:
    return apply_settings(Options, words=words, config=config).problems


def test_defaults_of_the_instance_are_kept_around_an_override() -> None:
    options = one("actor.optimizer.steps=7")
    assert options.actor.optimizer == Optimizer(lr=3e-5, steps=7)
    assert options.critic.optimizer.lr == 3e-5


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("seed=3", "seed", 3),
        ("seed=1_000", "seed", 1000),
        ("seed=1e4", "seed", 10000),
        ("share=1e-5", "share", 1e-5),
        ("share=1", "share", 1.0),
        ("share=.25", "share", 0.25),
        ("on=false", "on", False),
        ("on=YES", "on", True),
        ("name=1e-5", "name", "1e-5"),
        ("name=a: b #c, [d", "name", "a: b #c, [d"),
        ("name={x} & *y !z @ %", "name", "{x} & *y !z @ %"),
        ("name=a=b", "name", "a=b"),
        ("name=none", "name", "none"),
        ("name=", "name", ""),
        ('name="quoted"', "name", "quoted"),
        ("name='", "name", "'"),
        ("mode=slow", "mode", "slow"),
        ("colour=blue", "colour", Colour.BLUE),
        ("sizes=1,2,3", "sizes", (1, 2, 3)),
        ("sizes=[1, 2]", "sizes", (1, 2)),
        ("sizes=[]", "sizes", ()),
        ("env={A: 1, B: x}", "env", {"A": "1", "B": "x"}),
        ("env.PATH=/a:/b", "env", {"PATH": "/a:/b"}),
        ("anything=1e-5", "anything", 1e-5),
        ("anything=[1, two, none]", "anything", [1, "two", None]),
        ("maybe={low: 3}", "maybe", Pair(low=3)),
        ("maybe.low=3", "maybe", Pair(low=3)),
        ("maybe=none", "maybe", None),
    ],
)
def test_text_becomes_the_fields_type(word: str, name: str, value: object) -> None:
    found = getattr(one(word), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("word", ["actor.path=none", "actor.path=null", "actor.path=~"])
def test_none_for_an_optional_text(word: str) -> None:
    assert one(word).actor.path is None


def test_quotes_make_the_word_none_a_text() -> None:
    assert one('actor.path="none"').actor.path == "none"


def test_a_table_for_a_group_sets_its_members() -> None:
    assert one("actor={path: /x, optimizer: {lr: 1e-3}}").actor == Actor(
        path="/x", optimizer=Optimizer(lr=1e-3)
    )


def test_several_entries_of_one_table() -> None:
    assert one("env.A=1", "env.B.C=2").env == {"A": "1", "B.C": "2"}


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        ("lr=3", "no option called 'lr'", "'actor.optimizer.lr' or 'critic.optimizer.lr'"),
        ("actor.lr=3", "no option called 'actor.lr'", "did you mean 'actor.optimizer.lr'"),
        ("actr.path=3", "no option called 'actr.path'", "did you mean 'actor.path'"),
        ("sede=3", "no option called 'sede'", "did you mean 'seed'?"),
        ("zzz=3", "no option called 'zzz'", "top-level: seed, name"),
        ("trial_name=a", "no option called 'trial_name'", "the option --trial NAME"),
        ("seed.x=3", "seed is a single value, it has no 'x'", "write seed=VALUE"),
        ("seed=abc", "seed is 'abc'", "use a whole number"),
        ("seed=1.5", "seed is '1.5' (not whole)", "use a whole number"),
        ("seed=none", "seed is 'none'", "use a whole number"),
        ("seed=true", "seed is 'true'", "use a whole number"),
        ("share=nan", "share is 'nan' (not finite)", "use a number"),
        ("share=inf", "share is 'inf' (not finite)", "use a number"),
        ("share=1e999", "share is '1e999' (too large)", "use a number"),
        ("share=", "share is ''", "use a number"),
        ("on=1", "on is '1'", "use true or false"),
        ("mode=medium", "mode is 'medium'", "use one of fast, slow"),
        ("colour=green", "colour is 'green'", "use one of red, blue"),
        ("sizes=1,x", "sizes is '1,x'", "use a list of whole numbers"),
        ("sizes={a: 1}", "sizes is {'a': '1'} (a list is needed here)", "list of whole numbers"),
        ("env=3", "env is '3' (a table is needed here, e.g. {name: value})", "use a table"),
        ("name=[1]", "name is ['1'] (a single value is needed here)", "use text"),
        ("share=2", "share is 2.0", "use 1 or less"),
        ("kind=c", "kind is 'c'", "use one of"),
        ("actor.optimizer.lr=0", "actor.optimizer.lr is 0.0", "use more than 0"),
        ("actor=3", "actor is a group of options, not a value", "actor.path, actor.optimizer"),
        ("pair.low=11", "low 11 is above high 10", "swap them"),
        ("seed", "'seed' is not a setting: it has no '='", "e.g. seed=1"),
        ("=3", "'=3' is not a setting", "NAME=VALUE"),
        ("a b=3", "'a b=3' is not a setting", "dotted name"),
        ("actor..path=3", "'actor..path=3' is not a setting", "dotted name"),
    ],
)
def test_a_mistake_says_what_and_how_to_repair_it(word: str, what: str, fix: str) -> None:
    (problem,) = problems(word)
    assert problem.what == what
    assert fix in problem.fix
    assert word.partition("=")[0].split(".")[0] in problem.where or "command line" in problem.where


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigErrors) as caught:
        one("lr=1", "seed=-1", "share=x", "pair.low=99", "kind=c", "seed2")
    assert len(caught.value.problems) == 6


def test_checks_between_fields_wait_for_readable_fields() -> None:
    (problem,) = problems("pair.low=11", "pair.high=x")
    assert problem.what == "pair.high is 'x'"


def test_a_name_given_twice_is_refused_unless_equal() -> None:
    (problem,) = problems("seed=1", "seed=2")
    golden.check(problem)
    assert one("seed=2", "seed=2").seed == 2


def test_words_win_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    config.write_text("seed: 5\nactor.optimizer.lr: 1e-3\nactor:\n  path: 007\n")
    options = with_settings(Options, words=["seed=6"], config=config)
    assert (options.seed, options.actor) == (6, Actor(path="007", optimizer=Optimizer(lr=1e-3)))


def test_mistakes_in_the_file_have_their_line(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(
        "seed: 5\nactor:\n  optimizer:\n    lr: abc\n    steps: 0\n  pth: x\nseed: 6\n"
    )
    found = {p.what: p.where for p in problems(config=config)}
    assert found["actor.optimizer.lr is 'abc'"] == f"actor.optimizer.lr, {config}:4"
    assert found["actor.optimizer.steps is 0"] == f"actor.optimizer.steps, {config}:5"
    golden.check(found["no option called 'actor.pth'"])
    golden.check(found["seed is given twice"])


@pytest.mark.parametrize(
    "text",
    [
        "seed: [1\n",
        "a: b: c\n",
        "- 1\n",
    ],
)
def test_a_file_that_is_no_settings(tmp_path: Path, text: str) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(text)
    with golden.raises(ConfigError) as caught:
        with_settings(Options, config=config)
    assert str(config) in caught.value.where


def test_a_missing_file_and_an_empty_one(tmp_path: Path) -> None:
    with golden.raises(ConfigError):
        with_settings(Options, config=tmp_path / "no.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert with_settings(Options, config=tmp_path / "empty.yaml") == Options()


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"seed: \xff\xfe\n")
    with golden.raises(ConfigError):
        with_settings(Options, config=tmp_path / "b.yaml")


def test_an_experiment_without_defaults_is_named() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Needy:
        path: str

    with golden.raises(ConfigError):
        with_settings(Needy, words=["path=x"])


@dataclass(frozen=True, kw_only=True)
class _Loose:
    anything: Mapping[str, Any] = option({"kept": 1}, "a table of anything")
    texts: Mapping[str, str] = option({}, "names may have dots")


def test_a_table_of_anything_holds_tables_and_one_of_texts_names_with_dots(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(
        "anything:\n  env: {A: '2', B: x}\n  size: 3\ntexts: {a.b: c}\n", encoding="utf-8"
    )
    found = with_settings(_Loose, words=["anything.env.A=7", "anything.deep.er=1"], config=config)
    assert found.anything == {
        "kept": 1,
        "env": {"A": 7, "B": "x"},
        "size": 3,
        "deep": {"er": 1},
    }
    assert found.texts == {"a.b": "c"}


@pytest.mark.parametrize(
    "words",
    [
        ("actor.optimizer.lr=1e-5", "actor.optimizer={lr: 1}"),
        ("actor={optimizer: {lr: 1}}", "actor.optimizer.lr=1e-5"),
        ("maybe.low=3", "maybe=none"),
        ("env={A: 1}", "env.A=2"),
        ("actor.optimizer={lr: 1e-5, lr: 1}",),
    ],
)
def test_two_spellings_of_one_name_are_refused(words: tuple[str, ...]) -> None:
    (problem,) = problems(*words)
    assert "given twice" in problem.what
    golden.check(problem)


@pytest.mark.parametrize(
    "words",
    [
        ("actor.optimizer.lr=1e-5", "actor.optimizer={steps: 2, lr: 1e-5}"),
        ("env={A: 1}", "env.B=2"),
        ("actor.optimizer.lr=1", "critic.optimizer.lr=2"),
    ],
)
def test_spellings_that_agree_or_mean_different_names_are_fine(words: tuple[str, ...]) -> None:
    assert problems(*words) == []


def test_a_file_s_two_spellings_are_refused_with_both_lines(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "actor.optimizer.lr: 1e-5\nactor:\n  optimizer:\n    lr: 1\n    steps: 3\n    steps: 4\n"
    )
    found = {p.what: p.where for p in problems(config=config)}
    lr, steps = (f"actor.optimizer.{name}" for name in ("lr", "steps"))
    assert found == {
        f"{lr} is given twice": f"{lr}, {config}:1 and {config}:4",
        f"{steps} is given twice": f"{steps}, {config}:5 and {config}:6",
    }
    assert apply_settings(Options, words=["seed=2"], config=config).options.seed == 2


def test_words_still_win_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("actor: {optimizer: {lr: 1}}\n")
    applied = apply_settings(Options, words=["actor.optimizer.lr=2"], config=config)
    assert (applied.problems, applied.options.actor.optimizer.lr) == ([], 2.0)


@pytest.mark.parametrize(
    "text",
    [
        "? [1, 2]\n: 3\n",
        "actor:\n  ? {x: 1}\n  : 3\n",
        "anything: &a [*a]\n",
        "env: &a\n  b: {c: *a}\n",
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(
            f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
            for old, new in zip("abcdef", "bcdefg", strict=True)
        ),
    ],
)
def test_a_file_that_is_no_tree_of_names_is_refused(tmp_path: Path, text: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    with golden.raises(ConfigError) as caught:
        problems(config=config)
    assert caught.value.where.startswith(f"{config}:")


@pytest.mark.parametrize("word", ["anything=[&a [*a]]", "actor={? [1]: 2}"])
def test_nor_is_such_a_word(word: str) -> None:
    (problem,) = problems(word)
    golden.check(problem)


@pytest.mark.thorough
def test_values_within_values_without_end_are_refused(tmp_path: Path) -> None:
    config, deep = tmp_path / "c.yaml", "[" * 5000 + "]" * 5000
    config.write_text(f"anything: {deep}\n")
    with golden.raises(ConfigError):
        problems(config=config)
    assert one(f"name={deep}").name == deep


@pytest.mark.parametrize("config", ["maybe: {low: 3}\n", "maybe.low: 3\n"])
def test_none_for_a_group_wins_over_members_in_the_file(tmp_path: Path, config: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(config)
    applied = apply_settings(Options, words=["maybe=none"], config=path)
    assert (applied.problems, applied.options.maybe) == ([], None)


@pytest.mark.parametrize("text", ["1__0", "_1", "1e-400", "١٢", "0x10"])
def test_a_number_that_would_be_read_as_another_is_refused(text: str) -> None:
    (problem,) = problems(f"share={text}")
    assert problem.what == f"share is {text!r}"


def test_a_value_out_of_range_is_not_put_on() -> None:
    """What goes on with the options (a plan with a million workers) must not meet it."""
    applied = apply_settings(Options, words=["share=2", "seed=4"])
    golden.check([p.where for p in applied.problems])
    assert (applied.options.share, applied.options.seed) == (0.5, 4)


def test_too_many_settings_are_refused_at_once(tmp_path: Path) -> None:
    (problem,) = problems(*(f"env.A{n}=x" for n in range(10_001)))
    assert problem.what == "10,001 settings"
    config = tmp_path / "c.yaml"
    with config.open("wb") as file:
        file.truncate(1 << 40)
    with golden.raises(ConfigError):
        problems(config=config)
    with golden.raises(ConfigError):
        problems(config=Path("/dev/zero"))


def test_what_a_program_writes_into_a_pipe_is_read() -> None:
    """`--config <(program)` of a shell."""
    reading, writing = os.pipe()
    os.write(writing, b"seed: 7\n")
    os.close(writing)
    assert with_settings(Options, config=Path(f"/dev/fd/{reading}")).seed == 7
    os.close(reading)


def test_an_option_of_the_command_line_and_a_word_for_the_same_are_refused() -> None:
    words = list(read_words(["scheduling.all.partition=b"], []))
    option = list(JobOptions(partition="a").settings())
    (problem,) = apply_overrides(SFTExperiment(), [*words, *option]).problems
    golden.check(problem)
    assert not apply_overrides(SFTExperiment(), option).problems


def test_a_group_that_may_be_absent_is_not_there_for_a_refused_setting() -> None:
    applied = apply_settings(Options, words=["maybe.zzz=1", "seed=2"])
    golden.check([p.what for p in applied.problems])
    assert (applied.options.maybe, applied.options.seed) == (None, 2)
