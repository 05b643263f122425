from itertools import product

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.api.errors import ConfigError, DataError
from realsys.data.packing import _least_loaded, balanced_partition, pack_microbatches

LENGTHS = st.lists(st.integers(0, 50), max_size=30)
NUM_PARTS = st.integers(1, 8)


def loads(parts, lengths):
    return [sum(lengths[i] for i in part) for part in parts]


def test_longest_first_to_the_lightest_part():
    # 8 → a, 7 → b, 6 → b (7 < 8) makes 13, 5 → a makes 13, 4 → a (tie: fewer items, then first)
    assert balanced_partition([4, 5, 6, 7, 8], 2) == [[0, 1, 4], [2, 3]]


def test_equal_counts_are_dealt_in_rounds():
    # 9 → a, 8 → b | 2 → b (8), 1 → a (9): loads 10 and 10
    assert balanced_partition([9, 1, 2, 8], 2, equal_counts=True) == [[0, 1], [2, 3]]
    # by load alone the nine would be alone
    assert balanced_partition([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert balanced_partition([9, 1, 1, 1], 2, equal_counts=True) == [[0, 3], [1, 2]]


def test_fewer_items_than_parts_leave_parts_empty():
    assert balanced_partition([3, 4], 4) == [[1], [0], [], []]
    assert balanced_partition([], 2, equal_counts=True) == [[], []]


def test_micro_batches_are_as_few_as_the_longest_that_fit_first_make():
    # 6 and 4 | 5 and 5 fill two; to the lightest it would be 6 | 5 5 | 4, or 6 4 | 5 5 as it happens
    assert pack_microbatches([5, 6, 4, 5], max_tokens=10) == [[0, 3], [1, 2]]
    # 7, 5 | 6, 4, 2: the 2 fits behind 7 and 5 no more, and dealt by load it would stand with the 7
    assert pack_microbatches([7, 6, 5, 4, 2], max_tokens=12) == [[0, 2], [1, 3, 4]]
    # exactly as many as are asked for: they stay as they were found, and are not dealt anew
    assert pack_microbatches([6, 3, 1, 1], max_tokens=10, min_num=2) == [[0, 1, 2], [3]]


@given(LENGTHS, NUM_PARTS, st.booleans())
def test_partition_holds_each_index_once_in_order(lengths, k, equal_counts):
    parts = balanced_partition(lengths, k, equal_counts=equal_counts)
    assert len(parts) == k
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    assert all(parts) or len(lengths) < k
    if equal_counts:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(LENGTHS, NUM_PARTS)
def test_heaviest_part_is_within_the_list_scheduling_bound(lengths, k):
    heaviest = max(loads(balanced_partition(lengths, k), lengths))
    # total/k + (1 - 1/k) · longest, times k to stay in integers
    assert k * heaviest <= sum(lengths) + (k - 1) * max(lengths, default=0)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_heaviest_part_is_within_four_thirds_of_the_best(lengths, k):
    best = sum(lengths)
    for part_of in product(range(k), repeat=len(lengths)):
        load = [0] * k
        for part, length in zip(part_of, lengths, strict=True):
            load[part] += length
        best = min(best, max(load))
    heaviest = max(loads(balanced_partition(lengths, k), lengths))
    assert 3 * k * heaviest <= (4 * k - 1) * best


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), NUM_PARTS)
def test_equal_counts_differ_by_no_more_than_the_longest(lengths, k):
    parts = balanced_partition(lengths, k, equal_counts=True)
    by_count = {}
    for part, load in zip(parts, loads(parts, lengths), strict=True):
        by_count.setdefault(len(part), []).append(load)
    assert all(max(same) - min(same) <= max(lengths) for same in by_count.values())


def test_microbatches_are_filled_first_fit_longest_first():
    # limit 10: 7 | 6 | 4 with 6 | 3 with 7 | 2 alone
    assert pack_microbatches([2, 3, 4, 6, 7], max_tokens=10) == [[0], [1, 4], [2, 3]]


def test_a_sequence_over_the_limit_is_alone():
    assert pack_microbatches([12, 1, 1], max_tokens=10) == [[0], [1, 2]]


def test_min_num_spreads_evenly_without_a_limit():
    # 5 → a, 4 → b, 3 → b (7), 2 → a (7)
    assert pack_microbatches([5, 4, 3, 2], max_tokens=None, min_num=2) == [[0, 3], [1, 2]]
    assert pack_microbatches([5, 4, 3, 2], max_tokens=None) == [[0, 1, 2, 3]]
    assert pack_microbatches([0, 0, 0], max_tokens=None, min_num=3) == [[0], [1], [2]]


def test_min_num_and_limit_hold_together():
    # limit 10 alone gives 2 pieces of 8; three pieces: 4 | 4 | 4 with the last 4 on the first
    assert pack_microbatches([4, 4, 4, 4], max_tokens=10, min_num=3) == [[0, 3], [1], [2]]


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=30),
    st.one_of(st.none(), st.integers(1, 60)),
    st.integers(1, 8),
)
def test_microbatches_keep_limit_and_number(lengths, max_tokens, min_num):
    if len(lengths) < min_num:
        with pytest.raises(DataError, match=f"{len(lengths)} sequences can't fill {min_num}"):
            pack_microbatches(lengths, max_tokens=max_tokens, min_num=min_num)
        return
    pieces = pack_microbatches(lengths, max_tokens=max_tokens, min_num=min_num)
    assert len(pieces) >= min_num
    assert all(pieces)
    assert sorted(i for piece in pieces for i in piece) == list(range(len(lengths)))
    assert pieces == sorted(sorted(piece) for piece in pieces)
    if max_tokens is not None:
        for piece, load in zip(pieces, loads(pieces, lengths), strict=True):
            assert load <= max_tokens or len(piece) == 1


def test_numbers_that_make_no_sense_are_refused():
    with golden.raises(ConfigError):
        balanced_partition([1], 0)
    with golden.raises(DataError):
        balanced_partition([1, -2], 1)
    with golden.raises(ConfigError):
        pack_microbatches([1], max_tokens=0)
    with golden.raises(ConfigError):
        pack_microbatches([1], max_tokens=None, min_num=0)


def test_a_part_that_is_opened_has_room_for_the_limit_and_no_more():
    found = _least_loaded([0, 1, 2], [3, 3, 2], num_parts=1, capacity=4)
    assert found == [[0], [1], [2]]
    assert _least_loaded([0, 1, 2], [4, 3, 1], num_parts=1, capacity=4) == [[0], [1, 2]]
