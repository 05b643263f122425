"""Values between a test and a program: what comes back is equal, and what is hostile is refused."""

from __future__ import annotations

import datetime
import json
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import golden
import numpy as np
import pytest

from realsys.rewards.sandbox.separate_tests.value_graph import GraphReader, GraphWriter

Point = namedtuple("Point", "x y")


class NoObjects:
    def node_of(self, value: Any) -> list[Any]:
        raise ValueError(f"{value!r} is no plain value")

    def object_of(self, node: list[Any]) -> Any:
        raise ValueError(node)


def sent(value: Any) -> tuple[Any, list[Any], GraphWriter]:
    writer = GraphWriter(NoObjects())
    root = writer.write(value)
    root, nodes = json.loads(json.dumps([root, writer.nodes]))
    return root, nodes, writer


def received(value: Any) -> Any:
    root, nodes, _ = sent(value)
    return GraphReader(NoObjects(), nodes).read(root)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -(2**63), 7**900, 0.1, -0.0, float("inf"), 1 - 2j),
        *("ä\ud800\x00", b"\x00\xff", ...),
        *([], [1, [2, [3]]], (1, (2,)), {1, (2, frozenset({3}))}, {(1, 2): [3], None: {}}),
        *(bytearray(b"ab"), deque([1], maxlen=3), OrderedDict(b=1, a=2), Counter("aab")),
        *(range(1, 9, 2), slice(1, None), Fraction(-1, 3), Decimal("1.10"), int, type(None), Path("a/b")),
        *(datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 1, 5), datetime.timedelta(days=-1)),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_arrives_as_it_was_sent(value: Any) -> None:
    found = received(value)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_values_of_classes_that_extend_pythons_own() -> None:
    class Text(str):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    found = received(
        [Text("a"), np.int64(3), np.bool_(True), np.float32(0.5), defaultdict(list, a=[1])]
    )
    assert found == ["a", 3, True, 0.5, {"a": [1]}]
    assert [type(item) for item in found[:4]] == [str, int, bool, float]
    point = received(Point(1, [2]))
    assert (point, point.x, type(point).__name__) == ((1, [2]), 1, "Point")
    array = received(np.arange(6, dtype=np.int16).reshape(2, 3))
    assert (array.dtype, array.tolist()) == (np.int16, [[0, 1, 2], [3, 4, 5]])


def test_what_is_one_object_stays_one_and_may_hold_itself() -> None:
    inner: list[Any] = [1]
    inner.append(inner)
    first, second = received((inner, inner))
    assert first is second
    assert first[1] is first


def test_what_a_reader_changed_comes_back_into_the_senders_own() -> None:
    value = {"a": [3, 1]}
    root, nodes, writer = sent(value)
    reader = GraphReader(NoObjects(), nodes)
    there = reader.read(root)
    there["a"].sort()
    there["b"] = {5}
    root, nodes, _ = sent(there)
    back = GraphReader(NoObjects(), nodes, reuse=writer.changeable).read(root)
    assert back is value
    assert value == {"a": [1, 3], "b": {5}}


@pytest.mark.parametrize(
    ("root", "nodes"),
    [
        ([0], [["tuple", [[0]]]]),
        ([0], [["frozenset", [[1]]], ["list", []]]),
        ([0], [["set", [[1]]], ["dict", []]]),
        ([1], [["list", []]]),
        ([-1], [["list", []]]),
        ([0], [["class", "type"]]),
        ([0], [["class", "object"]]),
        ([0], [["named", "P", ["__eq__"], [1]]]),
        ([0], [["named", "x; y", ["a"], [1]]]),
        ([0], [["array", "|O", [1], "12345678"]]),
        ([0], [["array", "<i8", [4], "12345678"]]),
        ([0], [["dict", [1]]]),
        ([0], [["global", "os", "system"]]),
        ([0], [["no such", 1]]),
        ([0], [[]]),
        (["eval", "1"], []),
        ({"a": 1}, []),
        (["i", "x"], []),
    ],
)
def test_a_message_that_is_none_is_refused(root: Any, nodes: list[Any]) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        GraphReader(NoObjects(), nodes).read(root)


def test_a_container_of_another_type_does_not_come_back() -> None:
    with golden.raises(ValueError):
        GraphReader(NoObjects(), [["dict", []]], reuse={0: [1]}).read([0])
