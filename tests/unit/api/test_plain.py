"""Dataclasses to plain JSON values and back: exact, and every misfit told with its path."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.api.dataflow import OffloadHook, ParamReallocHook
from realsys.api.errors import ConfigError
from realsys.api.model import ModelName
from realsys.api.plain import from_plain, to_plain


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    x: int
    y: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Everything:
    name: str = "a"
    count: int = 3
    share: float = 0.1
    on: bool = True
    maybe: int | None = None
    colour: Colour = Colour.RED
    mode: Literal["fast", "slow"] = "fast"
    point: Point = Point(1)
    points: tuple[Point, ...] = (Point(1), Point(2, 2.0))
    pair: tuple[int, str] = (1, "b")
    names: list[str] = field(default_factory=lambda: ["x"])
    tags: frozenset[str] = frozenset({"q", "p"})
    by_name: Mapping[str, Point] = field(default_factory=lambda: {"k": Point(9)})
    by_rank: Mapping[int, str] = field(default_factory=lambda: {3: "c"})
    either: int | str = "text"
    free: Any = None


@dataclass(frozen=True)
class Hooks:
    hooks: tuple[ParamReallocHook | OffloadHook, ...] = ()


def there_and_back(value: Any) -> Any:
    return from_plain(type(value), json.loads(json.dumps(to_plain(value))))


def test_a_value_comes_back_as_it_was():
    value = Everything(maybe=7, colour=Colour.BLUE, either=5, free={"a": [1, None, "ü"]})
    assert there_and_back(value) == value


def test_enums_become_their_value_tuples_lists_and_sets_sorted_lists():
    plain = to_plain(Everything())
    assert plain["colour"] == "red"
    assert plain["points"] == [{"x": 1, "y": 0.5}, {"x": 2, "y": 2.0}]
    assert plain["tags"] == ["p", "q"]
    assert plain["by_rank"] == {"3": "c"}


def test_members_of_a_union_carry_their_type():
    value = Hooks((OffloadHook(), ParamReallocHook(source=ModelName("actor"), eta=0.25)))
    plain = to_plain(value)
    assert [hook["type"] for hook in plain["hooks"]] == ["OffloadHook", "ParamReallocHook"]
    assert there_and_back(value) == value


def test_a_whole_number_is_a_float_where_one_is_wanted():
    read = from_plain(Point, {"x": 1, "y": 2})
    assert read.y == 2.0
    assert isinstance(read.y, float)


numbers = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(),
    share=numbers,
    text=st.text(),
    points=st.lists(st.builds(Point, st.integers(), numbers), max_size=4),
    by_rank=st.dictionaries(st.integers(), st.text(), max_size=4),
    pair=st.tuples(st.integers(), st.text()),
)
def test_any_value_comes_back_as_it_was(count, share, text, points, by_rank, pair):
    value = Everything(
        count=count, share=share, name=text, points=tuple(points), by_rank=by_rank, pair=pair
    )
    assert there_and_back(value) == value


# ---- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({"count": "3"}, "Everything.count"),
        ({"count": True}, "Everything.count"),
        ({"count": 1.5}, "Everything.count"),
        ({"on": 1}, "Everything.on"),
        ({"share": "0.1"}, "Everything.share"),
        ({"share": True}, "Everything.share"),
        ({"name": None}, "Everything.name"),
        ({"maybe": "x"}, "Everything.maybe"),
        ({"colour": "green"}, "Everything.colour"),
        ({"mode": "warp"}, "Everything.mode"),
        ({"point": 3}, "Everything.point"),
        ({"points": [{"x": 1}, {"x": "1"}]}, "Everything.points[1].x"),
        ({"points": "ab"}, "Everything.points"),
        ({"pair": [1]}, "Everything.pair"),
        ({"pair": [1, 2]}, "Everything.pair[1]"),
        ({"by_name": {"k": {"x": None}}}, "Everything.by_name['k'].x"),
        ({"by_name": []}, "Everything.by_name"),
        ({"by_rank": {"one": "a"}}, "Everything.by_rank"),
    ],
)
def test_a_misfit_is_told_with_its_path(data, where):
    with golden.raises(ConfigError) as refused:
        from_plain(Everything, data)
    assert refused.value.where.startswith(where)


def test_an_unknown_field_comes_with_the_nearest():
    with golden.raises(ConfigError) as refused:
        from_plain(Everything, {"colur": "red"}, where="plan.json")
    assert refused.value.what == "unknown field 'colur'"
    assert refused.value.where == "plan.json"


def test_a_missing_field_is_named():
    with golden.raises(ConfigError):
        from_plain(Everything, {"point": {}})


@pytest.mark.parametrize("hook", [{}, {"type": "Teleport"}, "OffloadHook", 3])
def test_a_union_member_without_a_known_type_is_refused(hook):
    with pytest.raises(ConfigError) as refused:
        from_plain(Hooks, {"hooks": [hook]})
    assert refused.value.where == "Hooks.hooks[0]"
    assert "['OffloadHook', 'ParamReallocHook']" in refused.value.what


def test_what_is_no_plain_value_is_not_written():
    with golden.raises(ConfigError):
        to_plain({"a": [object()]})


def test_sequences_of_any_kind_are_read():
    @dataclass(frozen=True)
    class Box:
        items: Sequence[int] = ()

    Box.__annotations__["items"] = Sequence[int]
    assert from_plain(Box, {"items": [1, 2]}) == Box((1, 2))
