"""Options: defaults with their meaning and range, and every value out of range named."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import golden
import pytest

from experiments.compose import RLExperiment
from experiments.ppo_math import ppo_math
from experiments.sft import SFTExperiment, sft_math
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError
from realsys.api.model import GenerationHyperparameters
from realsys.api.options import OptimizerOptions, PPOHyperparameters, option, range_problems
from realsys.config.typed_values import Text, read


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = option(0.5, "how fast", unit="1/s", gt=0, le=1)
    mode: str = option("a", "which way", choices=("a", "b"))


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int | None = option(None, "how many", ge=1)
    inner: Inner = option(Inner(), "the inner ones")
    table: dict[str, int] = option({}, "free")


def told(options: Any) -> list[tuple[str, str, str]]:
    return [(p.where, p.what, p.fix) for p in range_problems(options)]


def test_defaults_are_in_range_for_every_experiment():
    for options in (ppo_math(), sft_math(), ClusterSpec()):
        assert told(options) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Outer(count=0), ("count", "count is 0", "use 1 or more")),
        (Outer(inner=Inner(rate=0.0)), ("inner.rate", "inner.rate is 0.0", "use more than 0")),
        (Outer(inner=Inner(rate=1.5)), ("inner.rate", "inner.rate is 1.5", "use 1 or less")),
        (Outer(inner=Inner(mode="c")), ("inner.mode", "inner.mode is 'c'", "use one of a, b")),
    ],
)
def test_a_value_out_of_range_is_named_by_its_dotted_path(options, expected):
    assert told(options) == [expected]


@pytest.mark.parametrize("rate", [1e-300, 1.0])
def test_the_ends_of_a_range_belong_to_it_as_declared(rate):
    assert told(Outer(inner=Inner(rate=rate))) == []


def test_none_is_in_every_range_that_allows_it():
    assert told(Outer(count=None)) == []


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_finite_number_is_out_of_every_range(rate):
    assert told(Outer(inner=Inner(rate=rate)))[0][0] == "inner.rate"


def test_all_problems_are_told():
    found = told(Outer(count=-1, inner=Inner(rate=2.0, mode="z")))
    assert [where for where, _, _ in found] == ["count", "inner.rate", "inner.mode"]


def test_meaning_and_unit_stand_beside_the_default():
    rate = Inner.__dataclass_fields__["rate"]
    assert (rate.default, rate.metadata["unit"], rate.metadata["meaning"]) == (
        0.5,
        "1/s",
        "how fast",
    )


def test_every_option_of_the_experiments_has_a_meaning():
    def without(kind: Any, path: str) -> list[str]:
        found = []
        for f in dataclasses.fields(kind):
            value = getattr(kind, f.name)
            if dataclasses.is_dataclass(value):
                found += without(value, f"{path}.{f.name}")
            elif "meaning" not in f.metadata and not path.endswith(".gen"):
                found.append(f"{path}.{f.name}")
        return found

    assert without(ppo_math(), "ppo-math") == []
    assert without(ClusterSpec(), "cluster") == []


def test_two_instances_do_not_share_a_table():
    assert Outer().table is not Outer().table


@pytest.mark.parametrize("beta", ["beta1", "beta2"])
def test_a_decay_of_1_is_refused_since_adam_would_never_move(beta):
    """torch.optim.AdamW takes betas in [0, 1): refused here, before anything starts."""
    assert [where for where, _, _ in told(OptimizerOptions(**{beta: 1.0}))] == [beta]


def test_a_temperature_that_is_no_number_is_told():
    gen = dataclasses.replace(PPOHyperparameters().gen)
    object.__setattr__(gen, "temperature", float("nan"))
    assert told(PPOHyperparameters(gen=gen))[0][0] == "gen.temperature"


def test_a_temperature_that_logits_overflow_by_is_refused():
    with golden.raises(ConfigError):
        GenerationHyperparameters(temperature=1e-40)


def test_options_know_no_path_of_this_machine():
    assert str(Path.home()) not in repr(ppo_math())


@pytest.mark.parametrize("text", ["9" * 30, "-" + "9" * 30, "1e30", "9" * 5000])
def test_a_whole_number_that_no_machine_word_holds_is_refused(text: str) -> None:
    with golden.raises(ConfigError):
        read(int, Text(text), path="steps", origin="command line")


@pytest.mark.parametrize("kind", [RLExperiment, SFTExperiment])
def test_a_seed_is_one_that_all_generators_take(kind: type[Any]) -> None:
    assert not list(range_problems(kind(seed=2**31 - 1)))
    (problem,) = (p for p in range_problems(kind(seed=2**31)) if p.where == "seed")
    golden.check(problem)
