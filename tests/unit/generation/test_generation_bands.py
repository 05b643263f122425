"""Cutting a batch into bands of like length, and when to put its rows in order."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from realsys.generation.decoding.length_buckets import (
    LengthBucket,
    ReorderPolicy,
    cost,
    split_into_buckets,
)

widths_of_rows = st.lists(st.integers(1, 60).map(lambda n: 16 * n), min_size=1, max_size=100)


@given(widths_of_rows)
@example([16] * 7 + [928] + [16] * 7 + [880, 912])  # block by block two pay, of 17 rows one
def test_bands_cover_all_rows_in_order_and_each_far_enough(widths):
    buckets = split_into_buckets(widths)
    assert [row for bucket in buckets for row in range(bucket.begin, bucket.end)] == list(
        range(len(widths))
    )
    for bucket in buckets:
        assert bucket.width == max(widths[bucket.begin : bucket.end])
    assert cost(buckets) <= cost([LengthBucket(0, len(widths), max(widths))])


def test_a_few_long_rows_get_a_band_of_their_own():
    assert split_into_buckets([512] * 4 + [32] * 60) == [
        LengthBucket(0, 8, 512),
        LengthBucket(8, 64, 32),
    ]
    assert split_into_buckets([48] * 8 + [32] * 56) == [
        LengthBucket(0, 64, 48)
    ]  # not worth the calls
    assert split_into_buckets([32] * 28 + [512] * 8 + [32] * 28)[1].width == 512


def test_order_is_made_when_as_much_was_wasted_as_it_costs():
    mixed = ([512] + [32] * 7) * 8  # a long row in each block
    disorder = ReorderPolicy()
    steps = 0
    while not disorder.due(mixed):
        disorder.note(mixed, split_into_buckets(mixed))
        steps += 1
    # A step computes 64 x 512 cells; in order 8 x 512 and 56 x 32 (and one more band): 0.18 of it.
    assert steps == 2
    disorder.ordered()
    assert not disorder.due(mixed)


@pytest.mark.thorough
@given(widths_of_rows)
def test_rows_in_order_waste_nothing(widths):
    ordered = sorted(widths, reverse=True)
    disorder = ReorderPolicy()
    for _ in range(1000):
        disorder.note(ordered, split_into_buckets(ordered))
    assert not disorder.due(ordered)
