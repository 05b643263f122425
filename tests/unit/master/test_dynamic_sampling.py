"""Which questions a step trains on: it fills its batch or says why not, and asks each question once."""

from __future__ import annotations

import json
import math
import random

import golden
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.api.errors import InternalError
from realsys.api.worker_configs import DynamicSamplingControl
from realsys.master.graph.data_schedule import Datapoint, DataSchedule
from realsys.master.graph.dynamic_sampling import (
    BatchNotFilled,
    DynamicSampling,
    SamplingState,
    round_size,
)

SIZE, BATCH = 23, 4


def rewards(share: float, seed: int, version: int, ids: list[str]) -> dict[str, float | None]:
    """Of each question in range with that probability, by question and weights alone."""
    found: dict[str, float | None] = {}
    for name in ids:
        draw = random.Random(f"{seed}/{version}/{name}").random()
        found[name] = 0.5 if draw < share else random.Random(name).choice([0.0, 1.0, None])
    return found


def make(
    *, unit: int = 1, most: int = 10, drawn: int = 0, state: SamplingState | None = None
) -> DynamicSampling:
    schedule = DataSchedule(dataset_size=SIZE, batch_size=BATCH, seed=3, shuffle=True)
    made = DynamicSampling(
        lambda step, number: schedule.at(number),
        control=DynamicSamplingControl(lowest=0.01, highest=0.99, max_gen_batches=most),
        batch_size=BATCH,
        unit=unit,
        drawn=drawn,
    )
    if state is not None:
        made.restore(state)
    return made


def run_step(sampling: DynamicSampling, step: int, share: float, seed: int = 0) -> list[list[str]]:
    """The ids of each round."""
    sampling.begin(step)
    rounds: list[list[str]] = []
    while sampling.batch is None:
        rounds.append([name for _, name in sampling.ask(step)])
        sampling.answered(rewards(share, seed, step, rounds[-1]))
    return rounds


def queue(num: int) -> list[str]:
    schedule = DataSchedule(dataset_size=SIZE, batch_size=BATCH, seed=3, shuffle=True)
    return [schedule.at(number).id for number in range(num)]


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_by_hand(nothing: float | None) -> None:
    """Queue + - + - | + + - +, batch of 3: the fifth question fills it, the others are given back."""
    control = DynamicSamplingControl(lowest=0.25, highest=0.75, max_gen_batches=4)
    sampling = DynamicSampling(
        lambda step, number: Datapoint(0, number), control=control, batch_size=3
    )
    sampling.begin(1)
    assert sampling.ask(1) == [(0, "0-0"), (1, "0-1"), (2, "0-2")]
    assert sampling.answered({"0-0": 0.25, "0-1": 0.0, "0-2": 0.75}) == ("0-1",)
    assert sampling.batch is None
    assert [index for index, _ in sampling.ask(1)] == [3, 4]  # 1 is missing, 2 of 3 were in range
    assert sampling.answered({"0-3": 1.0, "0-4": 0.9}) == ("0-3", "0-4")
    assert [index for index, _ in sampling.ask(1)] == [5, 6, 7]
    assert sampling.answered({"0-5": 0.5, "0-6": nothing, "0-7": 0.5}) == ("0-6", "0-7")
    batch = sampling.batch
    assert batch is not None
    assert batch.trained == ("0-0", "0-2", "0-5")
    assert (batch.filtered_low, batch.filtered_high) == (("0-1",), ("0-3", "0-4"))
    assert (batch.unscored, batch.returned) == ((), ("0-6", "0-7"))
    assert batch.metrics() == {
        "dynamic_sampling/asked": 8,
        "dynamic_sampling/kept": 4,
        "dynamic_sampling/filtered_low": 1,
        "dynamic_sampling/filtered_high": 2,
        "dynamic_sampling/returned": 2,
        "dynamic_sampling/rounds": 3,
        "dynamic_sampling/reward": (0.25 + 0 + 0.75 + 1.0 + 0.9 + 0.5 + 0.5) / 7,
    }
    sampling.begin(2)
    assert [index for index, _ in sampling.ask(2)] == [6, 7, 8]


@settings(deadline=None, max_examples=60)
@given(
    share=st.floats(0.25, 1.0),
    seed=st.integers(0, 999),
    unit=st.sampled_from([1, 2, 4]),
    kills=st.lists(st.integers(1, 12), max_size=3),
)
def test_each_step_is_full_and_each_question_is_consumed_once_over_kills(
    share: float, seed: int, unit: int, kills: list[int]
) -> None:
    """A kill undoes the steps since the checkpoint, and what follows is what an undisturbed run did."""
    steps, sampling = 12, make(unit=unit, most=1000)
    trained: dict[int, tuple[str, ...]] = {}
    consumed: dict[int, list[str]] = {}
    saved = {0: json.dumps(msgspec.to_builtins(sampling.snapshot()))}
    pending, step = sorted(kills), 1
    while step <= steps:
        rounds = run_step(sampling, step, share, seed)
        batch = sampling.batch
        assert batch is not None
        asked = list(dict.fromkeys(name for ids in rounds for name in ids))
        assert len(asked) == sum(map(len, rounds)), "asked twice in a step"
        assert len(batch.trained) == BATCH
        parts = [*batch.trained, *batch.filtered, *batch.returned]
        assert sorted(parts) == sorted(asked)
        assert all(len(ids) % unit == 0 and unit <= len(ids) <= BATCH for ids in rounds)
        own = asked[: asked.index(batch.trained[-1]) + 1]
        if step in trained:
            assert trained[step] == batch.trained
        trained[step], consumed[step] = batch.trained, own
        assert sorted(own) == sorted([*batch.trained, *batch.filtered])
        if step % 3 == 0:
            saved[step] = json.dumps(msgspec.to_builtins(sampling.snapshot()))
        if pending and pending[0] == step:
            pending.pop(0)
            step = max(at for at in saved if at <= step)
            sampling = make(
                unit=unit, most=1000, state=msgspec.json.decode(saved[step], type=SamplingState)
            )
        step += 1
    whole = [name for at in range(1, steps + 1) for name in consumed[at]]
    assert whole == queue(len(whole)), "the queue, in order, without a gap"


@settings(deadline=None, max_examples=30)
@given(share=st.floats(0.3, 1.0), seed=st.integers(0, 999))
def test_what_is_trained_does_not_depend_on_how_many_are_asked_at_a_time(
    share: float, seed: int
) -> None:
    one, four = make(unit=1, most=1000), make(unit=4, most=1000)
    for step in range(1, 9):
        run_step(one, step, share, seed)
        run_step(four, step, share, seed)
        assert one.batch is not None
        assert four.batch is not None
        assert one.batch.trained == four.batch.trained
        assert one.batch.filtered == four.batch.filtered


def test_questions_that_never_fill_a_batch_end_the_run_and_stay_in_the_queue() -> None:
    sampling = make(most=3)
    run_step(sampling, 1, 1.0)
    sampling.begin(2)
    ids: list[str] = []
    while len(ids) < 3 * BATCH:
        asked = [name for _, name in sampling.ask(2)]
        wrong_or_right = 0.0 if len(ids) < BATCH else 1.0
        first = {asked[0]: 0.5} if not ids else {}
        sampling.answered({**dict.fromkeys(asked, wrong_or_right), **first})
        ids += asked
    with pytest.raises(BatchNotFilled) as caught:
        sampling.ask(2)
    said = str(caught.value)
    golden.check(said)
    assert "schedule.max_gen_batches=6" in said
    assert sampling.kept == (ids[0],)
    again = make(state=sampling.snapshot())
    again.begin(2)
    assert [name for _, name in again.ask(2)] == ids[:BATCH]


def test_a_run_that_had_no_range_before_goes_on_where_it_was() -> None:
    sampling = make(drawn=3 * BATCH)
    sampling.begin(4)
    assert [name for _, name in sampling.ask(4)] == queue(16)[12:]


def test_what_a_step_gives_back_comes_before_what_waited_already() -> None:
    """After a run that did not fill its batch: many questions wait."""
    schedule = DataSchedule(dataset_size=SIZE, batch_size=BATCH, seed=3, shuffle=True)
    waiting = tuple(schedule.at(number) for number in range(12))
    sampling = make(unit=4, state=SamplingState(drawn=12, returned=waiting))
    sampling.begin(1)
    for begin in (0, 4):
        ids = [name for _, name in sampling.ask(1)]
        assert ids == queue(12)[begin : begin + 4]
        sampling.answered(dict.fromkeys(ids, 0.5) | ({} if begin else {ids[2]: 0.0}))
    assert sampling.batch is not None
    assert sampling.batch.returned == tuple(queue(8)[5:])
    assert sampling.snapshot() == SamplingState(drawn=12, returned=waiting[5:])


def test_answers_to_other_questions_and_rounds_of_other_steps_are_refused() -> None:
    sampling = make()
    sampling.begin(1)
    with pytest.raises(InternalError):
        sampling.ask(2)
    sampling.ask(1)
    with pytest.raises(InternalError):
        sampling.answered({"0-99": 1.0})


@pytest.mark.parametrize(
    ("kept", "asked", "unit", "size"),
    [
        (0, 0, 1, 64),
        (0, 64, 1, 64),
        (32, 64, 1, 64),
        (62, 128, 1, 8),
        (60, 64, 8, 8),
        (50, 64, 8, 24),
    ],
)
def test_sizes_of_rounds(kept: int, asked: int, unit: int, size: int) -> None:
    assert round_size(batch_size=64, kept=kept, asked=asked, unit=unit) == size


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("share", "most_batches", "most_rounds"),
    [(0.9, 1.2, 2.2), (0.7, 1.55, 2.5), (0.5, 2.15, 3.0), (0.3, 3.6, 4.5), (0.2, 5.3, 6.1)],
)
def test_rounds_ask_little_more_than_needed(
    share: float, most_batches: float, most_rounds: float
) -> None:
    """The table of docs/dapo.md: batches of 64, 300 steps."""
    control = DynamicSamplingControl(lowest=0.1, highest=0.9, max_gen_batches=10)
    sampling = DynamicSampling(
        lambda step, number: Datapoint(0, number), control=control, batch_size=64
    )
    draws, asked, rounds = random.Random(1), 0, 0
    for step in range(1, 301):
        sampling.begin(step)
        while sampling.batch is None:
            ids = [name for _, name in sampling.ask(step)]
            sampling.answered({name: 0.5 if draws.random() < share else 0.0 for name in ids})
            asked, rounds = asked + len(ids), rounds + 1
    assert 1 / share - 0.1 < asked / 64 / 300 < most_batches
    assert rounds / 300 < most_rounds
