"""Batches under due steps, against a look at all batches and all orders there are."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.rollout.staleness.deadline_steps import (
    choose,
    first_room,
    fits,
    must_wait_for,
    shortfalls,
)


def in_time(dues: tuple[int, ...], *, next_step: int, batch_size: int) -> bool:
    """Whether batches in order of due steps are in time, which is the best order there is."""
    return all(next_step + k // batch_size <= due for k, due in enumerate(sorted(dues)))


sizes = st.integers(1, 3)
dues = st.lists(st.integers(5, 9), max_size=7).map(tuple)


def numbered(due_steps: tuple[int, ...], first: int = 0) -> dict[int, int]:
    return dict(enumerate(due_steps, first))


def test_by_hand() -> None:
    # Two a batch. Due by 5: 3, one too many; by 6: 4, which is what 5 and 6 hold.
    assert shortfalls((5, 5, 5, 6), step=5, batch_size=2) == [3, 2]
    assert not fits((5, 5, 5, 6), next_step=5, batch_size=2)
    assert fits((5, 5, 6, 6), next_step=5, batch_size=2)
    # 10 came first and may wait until 7; 11 and 12 may not wait.
    assert choose({10: 7, 11: 5, 12: 5}, {}, step=5, batch_size=2) == (11, 12)
    # One of 20 and 21 must be in this batch, and neither has finished.
    running = {20: 6, 21: 6, 22: 9}
    assert choose({10: 6, 11: 9}, running, step=5, batch_size=2) == (10, 11)
    assert choose({10: 9, 11: 9}, running, step=5, batch_size=2) == (10, 11)
    assert choose({10: 9, 11: 9}, {**running, 23: 6}, step=5, batch_size=2) is None
    assert must_wait_for({10: 9, 11: 9}, {**running, 23: 6}, step=5, batch_size=2) == [20, 21, 23]


@settings(max_examples=80, deadline=None)
@given(dues=dues, batch_size=sizes)
def test_what_fits_is_in_time_in_the_best_order(dues: tuple[int, ...], batch_size: int) -> None:
    for step in (4, 5, 6, 8):
        expected = in_time(dues, next_step=step, batch_size=batch_size)
        assert fits(dues, next_step=step, batch_size=batch_size) == expected


@settings(max_examples=100, deadline=None)
@given(finished=dues, running=dues, batch_size=sizes)
def test_the_first_batch_that_leaves_time_is_taken(
    finished: tuple[int, ...], running: tuple[int, ...], batch_size: int
) -> None:
    ready, others = numbered(finished), numbered(running, first=100)
    if not in_time((*finished, *running), next_step=5, batch_size=batch_size):
        return  # the ledger never lets that come about
    possible = [
        batch
        for batch in combinations(ready, batch_size)  # those that came first are first
        if in_time(
            (*running, *(due for n, due in ready.items() if n not in batch)),
            next_step=6,
            batch_size=batch_size,
        )
    ]
    chosen = choose(ready, others, step=5, batch_size=batch_size)
    assert chosen == (possible[0] if possible else None)
    if len(ready) >= batch_size:
        waits = must_wait_for(ready, others, step=5, batch_size=batch_size)
        assert bool(waits) == (chosen is None)
        assert set(waits) <= others.keys()


@settings(max_examples=80, deadline=None)
@given(dues=dues, batch_size=sizes, earliest=st.integers(4, 8), latest=st.integers(5, 10))
def test_the_first_room_for_one_more(
    dues: tuple[int, ...], batch_size: int, earliest: int, latest: int
) -> None:
    steps = [
        due
        for due in range(max(5, earliest), latest + 1)
        if in_time((*dues, due), next_step=5, batch_size=batch_size)
    ]
    room = first_room(dues, earliest=earliest, latest=latest, next_step=5, batch_size=batch_size)
    assert room == (steps[0] if steps else None)
