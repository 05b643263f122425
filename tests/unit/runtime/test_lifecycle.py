"""A worker's life: only the table moves it, and an illegal event changes nothing."""

import copy
from itertools import product

import golden
import pytest

from realsys.api.errors import InternalError
from realsys.runtime.lifecycle import FINAL, TRANSITIONS, WorkerEvent, WorkerState, next_state

S, E = WorkerState, WorkerEvent


@pytest.mark.parametrize(("state", "event"), list(product(S, E)), ids=str)
def test_only_the_table_moves_a_worker(state, event):
    before = copy.copy(TRANSITIONS)
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) is TRANSITIONS[state, event]
    else:
        with golden.raises(InternalError):
            next_state(state, event)
    assert before == TRANSITIONS


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ([E.REGISTERED, E.STARTED, E.FINISHED_CALL, E.STARTED, E.FINISHED_CALL, E.EXIT], S.DONE),
        ([E.REGISTERED, E.PAUSE, E.RESUME, E.STARTED], S.RUNNING),
        ([E.REGISTERED, E.STARTED, E.ERROR], S.FAILED),
        ([E.REGISTERED, E.STARTED, E.VANISHED], S.LOST),
        ([E.ERROR], S.FAILED),
        ([E.EXIT], S.DONE),
    ],
)
def test_a_life(events, end):
    state = S.STARTING
    for event in events:
        state = next_state(state, event)
    assert state is end


def test_an_end_is_final():
    assert {S.DONE, S.FAILED, S.LOST} == FINAL
    assert {state for state, _ in TRANSITIONS} == set(S) - FINAL


def test_whoever_is_alive_can_fail_and_can_be_missed():
    for state in set(S) - FINAL:
        assert TRANSITIONS[state, E.ERROR] is S.FAILED
        assert TRANSITIONS[state, E.VANISHED] is S.LOST


def test_every_state_can_be_reached():
    assert set(TRANSITIONS.values()) | {S.STARTING} == set(S)


def test_a_running_worker_finishes_its_call_before_it_leaves():
    assert (S.RUNNING, E.EXIT) not in TRANSITIONS
    assert (S.RUNNING, E.PAUSE) not in TRANSITIONS
