"""Whose work counts: hand-made trials, and any trial at all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from realsys.trial.lineage import Lineage
from realsys.trial.records import Resumed


def told(*words: tuple[int, int, int]) -> dict[int, Resumed]:
    """Of (attempt, step, of_attempt)."""
    return {
        attempt: Resumed(attempt=attempt, phase="main", step=step, of_attempt=of)
        for attempt, step, of in words
    }


@st.composite
def trials(draw: st.DrawFn) -> dict[int, Resumed]:
    """Each attempt goes on from nothing, or from a step of an attempt that came before; some never got
    so far as to say it."""
    words = []
    for attempt in range(1, draw(st.integers(1, 8)) + 1):
        earlier = [word[0] for word in words]
        step = draw(st.integers(0, 30)) if earlier else 0
        of = draw(st.sampled_from(earlier)) if step else 0
        if draw(st.booleans()) or not earlier:
            words.append((attempt, step, of))
    return told(*words)


def test_before_anybody_has_said_anything_everything_counts() -> None:
    assert Lineage.of({}).counts(3, 100)


def test_what_the_next_one_did_not_go_on_from_is_dead() -> None:
    lineage = Lineage.of(told((1, 0, 0), (2, 6, 1)))
    assert lineage.counts(1, 6)
    assert not lineage.counts(1, 7)
    assert lineage.counts(2, 7)
    assert not lineage.counts(3, 1), "of somebody who has said nothing"


def test_a_chain_goes_back_to_the_beginning() -> None:
    lineage = Lineage.of(told((1, 0, 0), (2, 6, 1), (3, 9, 2)))
    assert lineage.limits == {3: None, 2: 9, 1: 6}
    # 3 goes on from a step of 2 before which 2 itself had gone on from 1: only so much of 1 counts.
    assert Lineage.of(told((1, 0, 0), (2, 6, 1), (3, 6, 2), (4, 3, 2))).limits == {
        4: None,
        2: 3,
        1: 3,
    }


def test_who_was_passed_over_does_not_count() -> None:
    """Attempt 2 went on from step 3; attempt 3 found step 6 of attempt 1, and wakes nobody."""
    lineage = Lineage.of(told((1, 0, 0), (2, 3, 1), (3, 6, 1)))
    assert lineage.counts(1, 6)
    assert not lineage.counts(2, 1)


def test_who_goes_on_from_nothing_ends_everything_before() -> None:
    assert Lineage.of(told((1, 0, 0), (2, 6, 1), (3, 0, 0))).limits == {3: None}


def test_a_record_that_names_itself_or_a_circle_ends_the_chain() -> None:
    assert Lineage.of(told((2, 6, 2))).limits == {2: None}
    assert Lineage.of(told((1, 3, 2), (2, 6, 1))).limits == {2: None, 1: 6}


def test_a_checkpoint_of_a_version_that_did_not_tell_whose_it_is() -> None:
    lineage = Lineage.of(told((5, 6, 0)))
    assert lineage.counts(0, 6)
    assert not lineage.counts(0, 7)


@given(trials(), st.integers(1, 40))
def test_whatever_the_head_writes_counts(trial: dict[int, Resumed], step: int) -> None:
    assert Lineage.of(trial).counts(max(trial), step)


@given(trials())
def test_what_the_heads_chain_holds_counts(trial: dict[int, Resumed]) -> None:
    """Walked by hand: each step has exactly one writer, and that one counts."""
    lineage, attempt, upto = Lineage.of(trial), max(trial), 40
    while True:
        word = trial[attempt]
        first = word.step + 1
        assert all(lineage.counts(attempt, step) for step in range(first, upto + 1))
        if not word.step:
            return
        attempt, upto = word.of_attempt, min(word.step, upto)
        assert not lineage.counts(attempt, upto + 1)


@given(trials(), st.data())
def test_a_late_word_of_somebody_nobody_went_on_from_changes_nothing(
    trial: dict[int, Resumed], data: st.DataObject
) -> None:
    before, head = Lineage.of(trial), max(trial)
    silent = sorted(set(range(1, head)) - before.limits.keys())
    if not silent:
        return
    late = data.draw(st.sampled_from(silent))
    step, of = data.draw(st.integers(0, 30)), data.draw(st.integers(0, head))
    assert Lineage.of(trial | told((late, step, of))).limits == before.limits


@given(trials())
def test_going_on_from_what_counts_keeps_it(trial: dict[int, Resumed]) -> None:
    """The next attempt takes a checkpoint that counts: what counted up to there still does."""
    before, head = Lineage.of(trial), max(trial)
    for attempt, limit in before.limits.items():
        step = 7 if limit is None else limit
        after = Lineage.of(trial | told((head + 1, step, attempt)))
        counted = [(n, s) for n in before.limits for s in range(1, step + 1) if before.counts(n, s)]
        chain = [(n, s) for n, s in counted if n in after.limits]
        assert all(after.counts(n, s) for n, s in chain)
        assert set(after.limits) <= set(before.limits) | {head + 1}
