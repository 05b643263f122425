"""Free parts of a segment: never given twice, joined again, lowest first."""

from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.data.transfer.shared_memory import FreeRanges


def test_the_lowest_place_that_is_long_enough_is_taken():
    ranges = FreeRanges(100)
    assert [ranges.allocate(n) for n in (10, 20, 30)] == [0, 10, 30]
    ranges.free(0, 10)
    ranges.free(30, 30)
    assert ranges.allocate(15) == 30  # the first 10 are too few
    assert ranges.allocate(10) == 0
    assert ranges.allocate(56) is None  # 45 and on are free: 55


def test_neighbours_are_joined():
    ranges = FreeRanges(30)
    for start in (0, 10, 20):
        assert ranges.allocate(10) == start
    for start in (20, 0, 10):
        assert not ranges.all_free
        ranges.free(start, 10)
    assert ranges.all_free
    assert ranges.allocate(30) == 0


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 99))))
def test_what_is_given_is_free_and_is_found_if_there_is_any(steps):
    ranges, free, taken = FreeRanges(100), set(range(100)), []
    for gives_back, length, choice in steps:
        if gives_back and taken:
            start, length = taken.pop(choice % len(taken))
            ranges.free(start, length)
            free |= set(range(start, start + length))
            continue
        start = ranges.allocate(length)
        fits = [s for s in range(101 - length) if free.issuperset(range(s, s + length))]
        assert start == (fits[0] if fits else None)
        if start is not None:
            free -= set(range(start, start + length))
            taken.append((start, length))
    assert ranges.all_free == (not taken)
