"""The order of a run's data: each record once an epoch, the same everywhere, from the seed alone."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.master.graph.data_schedule import Datapoint, DataSchedule


def schedule(size, batch, *, seed=1, shuffle=True):
    return DataSchedule(dataset_size=size, batch_size=batch, seed=seed, shuffle=shuffle)


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 30), batch=st.integers(1, 40), shuffle=st.booleans())
def test_each_record_comes_exactly_once_an_epoch(size, batch, shuffle):
    epochs = 3
    steps = -(-epochs * size // batch)
    order = schedule(size, batch, shuffle=shuffle)
    stream = [point for step in range(steps) for point in order.batch(step)]
    seen = Counter(p for p in stream if p.epoch < epochs)
    assert seen == {Datapoint(e, i): 1 for e in range(epochs) for i in range(size)}
    assert [p.epoch for p in stream] == sorted(p.epoch for p in stream)


def test_a_batch_crosses_into_the_next_epoch():
    order = schedule(5, 3, shuffle=False)
    assert [[p.id for p in order.batch(step)] for step in range(4)] == [
        ["0-0", "0-1", "0-2"],
        ["0-3", "0-4", "1-0"],
        ["1-1", "1-2", "1-3"],
        ["1-4", "2-0", "2-1"],
    ]


def test_a_batch_larger_than_the_data_set_has_ids_of_their_own():
    assert [p.id for p in schedule(2, 5, shuffle=False).batch(0)] == [
        "0-0",
        "0-1",
        "1-0",
        "1-1",
        "2-0",
    ]


@pytest.mark.parametrize(
    ("step", "epoch"),
    [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2)],
)
def test_a_step_knows_its_epoch(step, epoch):
    # 5 records, 3 a step: positions 0-2 | 3-5 | 6-8 | 9-11 | 12-14; epochs end at 4, 9 and 14.
    order = schedule(5, 3)
    assert order.epoch_of(step) == epoch


def test_every_epoch_has_another_order_and_so_has_every_seed():
    size = 20
    epochs = [[p.index for p in schedule(size, size).batch(e)] for e in range(3)]
    assert len({tuple(e) for e in epochs}) == 3
    assert [p.index for p in schedule(size, size, seed=2).batch(0)] != epochs[0]
    # "1/11" and "11/1" must not meet: the epoch is a part of the seed of its own.
    a = [p.index for p in schedule(size, size, seed=1).batch(11)]
    assert a != [p.index for p in schedule(size, size, seed=11).batch(1)]


def test_a_step_is_the_same_whatever_was_asked_before():
    fresh, used = schedule(7, 4), schedule(7, 4)
    for step in range(20):
        used.batch(step)
    assert used.batch(3) == fresh.batch(3)


PROBE = """
import json
from realsys.master.graph.data_schedule import DataSchedule
order = DataSchedule(dataset_size=11, batch_size=4, seed=5, shuffle=True)
print(json.dumps([[p.id for p in order.batch(step)] for step in range(6)]))
"""


@pytest.mark.parametrize("hash_seed", ["1", "77"])
def test_another_process_makes_the_same_order(hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    found = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, check=True, timeout=120
    )
    order = schedule(11, 4, seed=5)
    assert json.loads(found.stdout) == [[p.id for p in order.batch(step)] for step in range(6)]
