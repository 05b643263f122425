"""The order of a run over several sources: shares by success, epochs of each source, snapshots."""

import random
from collections import Counter
from fractions import Fraction

import golden
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.api.errors import CheckpointError, ConfigError, InternalError
from realsys.api.worker_configs import CurriculumControl
from realsys.data.sources.record_parts import index_of, place
from realsys.master.graph.curriculum import Curriculum, CurriculumState, next_source, shares

SIZES = {"a": 2, "b": 3}


def curriculum(
    sizes=SIZES, *, weights=None, floor=0.1, steps=2, batch=4, lag=0, seed=1, shuffle=False
):
    control = CurriculumControl(weights=weights or {}, floor=floor, steps=steps)
    return Curriculum(sizes, control=control, batch_size=batch, lag=lag, seed=seed, shuffle=shuffle)


def ids_of(order, step):
    return [id for _, id in order.indexed_ids(step)]


def train(order, step, rates):
    """Runs a step whose answers are right at the rate of their source; returns its ids."""
    ids = ids_of(order, step)
    for id in ids:
        order.answered(id, rates[order.source_of(id)])
    order.trained(step)
    return ids


# ---- decisions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("success", "weights", "floor", "expected"),
    [
        ({"a": 0.5, "b": 0.5}, {}, 0.1, {"a": 500_000, "b": 500_000}),
        ({"a": 0.5, "b": 1.0}, {}, 0.1, {"a": 909_091, "b": 90_909}),
        ({"a": 0.5, "b": 0.0}, {"b": 2}, 0.25, {"a": 666_667, "b": 333_333}),
        ({"a": 0.1, "b": 0.25}, {}, 0.1, {"a": 324_324, "b": 675_676}),  # 0.36 and 0.75
        ({"a": 0.9, "b": 0.5}, {}, 1.0, {"a": 500_000, "b": 500_000}),
        ({"a": 0.5, "b": 0.0}, {"b": 1e-9}, 0.1, {"a": 1_000_000, "b": 1}),  # never nothing
        ({"a": 0.5, "b": 1.5}, {}, 0.1, {"a": 909_091, "b": 90_909}),  # a rule's own "correct"
    ],
)
def test_shares_are_weights_times_learnability_but_at_least_the_floor(
    success, weights, floor, expected
):
    assert shares(success, weights=weights, floor=floor) == expected


def test_the_source_that_is_owed_most_is_next_of_equals_the_first():
    credits, order = {"a": 0, "b": 0, "c": 0}, ""
    for _ in range(8):
        name, credits = next_source(credits, {"a": 1, "b": 2, "c": 1})
        order += name
    assert order == "bacb" * 2
    assert credits == {"a": 0, "b": 0, "c": 0}


# ---- records -------------------------------------------------------------------------------------


def test_each_source_goes_through_epochs_of_its_own_in_the_order_of_its_file():
    order = curriculum()
    # Record k of "a" has the index 1, 3; of "b" 0, 2, 4 (record_parts.place).
    assert [place(SIZES, i) for i in range(5)] == [
        ("b", 0),
        ("a", 0),
        ("b", 1),
        ("a", 1),
        ("b", 2),
    ]
    assert ids_of(order, 1) == ["0-1", "0-0", "0-3", "0-2"]
    order.trained(1)
    assert ids_of(order, 2) == ["1-1", "0-4", "1-3", "1-0"]


def test_shuffled_orders_differ_by_source_epoch_and_seed():
    sizes = {"a": 30, "b": 30}

    def records(seed):
        order, found = curriculum(sizes, batch=120, seed=seed, shuffle=True), {"a": [], "b": []}
        for index, _ in order.indexed_ids(1):
            name, number = place(sizes, index)
            found[name].append(number)
        return found

    first, again, other = records(1), records(1), records(2)
    assert first == again
    orders = [o for found in (first, other) for o in (found["a"][:30], found["a"][30:], found["b"])]
    assert len({tuple(order) for order in orders}) == 6
    assert all(sorted(order[:30]) == list(range(30)) for order in orders)


# ---- success -------------------------------------------------------------------------------------


def test_a_rate_is_of_the_newest_steps_with_answers_that_are_surely_trained():
    order = curriculum(steps=2, lag=1)
    for step, rates in enumerate(([1.0], [0.5, 0.0], [], [0.25, 1.0, 1.0, 0.75]), 1):
        for rate in rates:
            order.answered("0-1", rate)  # of a
        order.trained(step)
    assert order.success(2) == {"a": 0.5, "b": 0.5}, "nothing is known before step 1 is trained"
    assert order.success(3)["a"] == 1.0
    assert order.success(4)["a"] == 0.5  # (1 + 0.5) / 3
    assert order.success(5)["a"] == 0.5, "step 3 had no answers, so 1 and 2 are still the newest"
    assert order.success(6)["a"] == pytest.approx(3.5 / 6)  # steps 2 and 4
    assert order.success(6)["b"] == 0.5


def test_what_a_step_was_chosen_by_is_still_told_when_it_is_trained():
    """Each step's answers come before its row of metrics, and must not show in it."""
    order = curriculum(steps=1, lag=2)
    for step in range(1, 20):
        ids = train(order, step, {"a": step / 20, "b": 0.5})
        row = order.metrics(step, ids)
        counts = Counter(map(order.source_of, ids))
        assert row["curriculum/share/a"] == counts["a"] / 4
        assert row["curriculum/share/b"] == counts["b"] / 4
        assert row["curriculum/success/a"] == ((step - 3) / 20 if step > 3 else 0.5)
        assert row["curriculum/success/b"] == 0.5


def test_a_step_s_records_do_not_depend_on_answers_that_may_not_be_there_yet():
    """Drawn as early as the staleness bound allows, or when more is known: the same."""
    early, late = curriculum(lag=2), curriculum(lag=2)
    rates = {"a": 1.0, "b": 0.3}
    ahead = {step: ids_of(early, step) for step in (1, 2, 3)}
    for step in range(1, 9):
        for id in ahead[step]:
            early.answered(id, rates[early.source_of(id)])
        early.trained(step)
        ahead[step + 3] = ids_of(early, step + 3)
        assert train(late, step, rates) == ahead[step]


def test_a_record_is_not_drawn_before_the_steps_that_decide_about_it_are_trained():
    order = curriculum(lag=1)
    order.indexed_ids(1)
    order.indexed_ids(2)
    with golden.raises(InternalError):
        order.draw(3)
    order.trained(1)
    order.draw(3)


def test_the_order_in_which_answers_come_does_not_matter():
    rates = [k / 7 for k in range(1, 7)] * 9
    found = set()
    for seed in range(5):
        random.Random(seed).shuffle(rates)
        order = curriculum()
        for rate in rates:
            order.answered("0-0", rate)
        order.trained(1)
        found.add(order.success(2)["b"])
    assert len(found) == 1


# ---- for a checkpoint ----------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
def test_a_restored_order_goes_on_as_the_one_that_was_never_interrupted(lag):
    sizes = {"a": 4, "b": 7, "c": 3}
    whole = curriculum(sizes, lag=lag, shuffle=True)
    rng = random.Random(3)
    for step in range(1, 25):
        rates = {name: rng.random() for name in sizes}
        for name in sizes:  # one that is filtered, after the step before
            whole.answered(f"0-{index_of(sizes, name, 0)}", rng.random())
        state = msgspec.json.decode(msgspec.json.encode(whole.snapshot()), type=CurriculumState)
        resumed = curriculum(sizes, lag=lag, shuffle=True)
        resumed.restore(state)
        expected = train(whole, step, rates)
        assert train(resumed, step, rates) == expected
        assert resumed.snapshot() == whole.snapshot()
        assert resumed.metrics(step, expected) == whole.metrics(step, expected)


def test_a_checkpoint_of_other_data_is_refused():
    state = curriculum({"a": 3, "b": 2}).snapshot()
    with golden.raises(CheckpointError):
        curriculum({"a": 2, "b": 3}).restore(state)


def test_one_source_is_no_choice():
    with golden.raises(ConfigError):
        curriculum({"a": 3})


# ---- whatever is right, and when -----------------------------------------------------------------


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_shares_are_kept_to_the_record_nothing_starves_and_records_come_once(data):
    """Over random histories of success: how often a source came is what it was due, to n records of n."""
    names = "abcde"[: data.draw(st.integers(2, 5), label="sources")]
    sizes = {name: data.draw(st.integers(1, 9), label=f"size of {name}") for name in names}
    weights = {name: data.draw(st.sampled_from([0.2, 1, 3]), label=name) for name in names}
    floor = data.draw(st.sampled_from([0.05, 0.1, 1.0]), label="floor")
    lag, batch = data.draw(st.integers(0, 2), label="lag"), data.draw(st.integers(1, 6))
    rng = data.draw(st.randoms(use_true_random=False))
    order = curriculum(
        sizes, weights=weights, floor=floor, batch=batch, lag=lag, steps=3, shuffle=True
    )
    due, came, waited = (dict.fromkeys(names, 0) for _ in range(3))
    records = {name: [] for name in names}
    for step in range(1, 41):
        wanted = shares(order.success(step), weights=weights, floor=floor)
        ids = ids_of(order, step)
        for id in ids:
            mine = order.source_of(id)
            records[mine].append(id)
            came[mine] += 1
            for name in names:
                share = Fraction(wanted[name], sum(wanted.values()))
                due[name] += share
                waited[name] = 0 if name == mine else waited[name] + share
                assert -1 < due[name] - came[name] < len(names) - 1 + Fraction(1, 1000)
                assert waited[name] < len(names), "it starves"
            order.answered(id, rng.choice([0.0, 0.25, 0.5, 1.0]))
        order.trained(step)
    for name, ids in records.items():
        assert len(set(ids)) == len(ids)
        epochs = [int(id.partition("-")[0]) for id in ids]
        assert epochs == [k // sizes[name] for k in range(len(ids))]


def test_with_steady_success_shares_become_those_of_the_formula():
    order = curriculum({"a": 5, "b": 11, "c": 3}, weights={"c": 2}, batch=10, steps=8)
    rates = {"a": 1.0, "b": 0.5, "c": 0.75}  # 0.1, 1, and 2 * 0.75
    for step in range(1, 9):
        train(order, step, rates)
    ids = [id for step in range(9, 269) for id in train(order, step, rates)]
    counts = Counter(map(order.source_of, ids))
    assert counts == pytest.approx({"a": 100, "b": 1000, "c": 1500}, abs=2)
