"""Which worker holds which tensor, and how large it is: what transfers are planned by."""

import pytest

from realsys.api.data import SequenceMeta
from realsys.master.graph.storage_tracker import StorageTracker


def meta(*ids, dtype="int64", trailing=(), key="x"):
    return SequenceMeta(
        ids=ids,
        seqlens={key: tuple((2, i) for i in range(len(ids)))},
        dtypes={key: dtype},
        trailing_shapes={key: trailing},
    )


@pytest.mark.parametrize(
    ("item", "dtypes"),
    [
        (8, ("float64", "int64")),
        (4, ("float32", "int32")),
        (2, ("float16", "bfloat16")),
        (1, ("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2")),
    ],
)
def test_sizes_are_rows_by_their_items(item, dtypes):
    for dtype in dtypes:
        storage = StorageTracker()
        storage.add(meta("a", "b", dtype=dtype, trailing=(3, 5)), 0)
        assert storage.num_bytes("x", "a") == 2 * 15 * item
        assert storage.num_bytes("x", "b") == 3 * 15 * item


def test_holders_are_known_until_a_datapoint_is_done_and_after_a_resume():
    storage = StorageTracker()
    storage.add(meta("a", "b"), 2)
    storage.add(meta("a"), 1)
    storage.add(meta("b", key="y", dtype="bool"), 0)
    rows = [("a", "x", [1, 2], 16), ("b", "x", [2], 24), ("b", "y", [0], 2)]
    assert storage.snapshot() == rows
    resumed = StorageTracker()
    resumed.restore(rows)
    assert resumed.snapshot() == rows
    assert resumed.owners("x", "a") == {1, 2}
    assert resumed.owners("y", "a") == resumed.owners("x", "zz") == frozenset()
    assert resumed.forget(["b", "zz"]) == {0, 2}
    assert resumed.snapshot() == rows[:1]
    resumed.add(meta("b"), 3)
    assert (resumed.owners("x", "b"), resumed.owners("y", "b")) == ({3}, frozenset())
