"""A live run gets workers and loses some: what is wanted, what follows from it, who may go."""

from __future__ import annotations

from dataclasses import replace

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.ppo_math import ppo_math_async, ppo_math_detached
from launcher.control.scale_plan import ScaleRequest, rescaled, units
from realsys.api.errors import ConfigError, RealsysError, TrialError, UnknownName
from realsys.api.experiment import ExperimentConfig
from realsys.api.scheduling import WorkerType
from realsys.api.worker_configs import MakerRoute
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.memory_store import MemoryStore
from realsys.supervisor.scaling.scale_steps import Moves, moves, partners
from realsys.trial.records import AttemptRecord, dumps
from realsys.worker.live_scaling import DrainDeadlines, Scaling, change_scaling, read_scaling

KEYS = TrialKeys(cluster="c", user="u", experiment="e", trial="t")
EMPTY = Scaling(attempt=1, token="ours", phase="main")
ATTEMPT = AttemptRecord(
    number=1, token="ours", host="h", supervisor_pid=1, supervisor_start=1, started_at=0.0
)


def makers(*names: str, holders: tuple[int, ...] = (0,)) -> ExperimentConfig:
    """A detached run's configuration with those makers."""
    config = ppo_math_detached().initial_setup()
    assert config.rollout is not None
    routes = tuple(
        MakerRoute(name=name, rollout_workers=(i,), servers=(i,), holders=holders, sources=(0,))
        for i, name in enumerate(names)
    )
    return replace(
        config,
        rollout=replace(config.rollout, makers=routes),
        generation_server=config.generation_server[:1] * len(names),
        rollout_worker=config.rollout_worker[:1] * len(names),
    )


TWO = makers("maker_0", "maker_1")
PLAIN = ppo_math_async().initial_setup()  # one server, one rollout worker


# ---- the value ----------------------------------------------------------------------------------


def test_a_change_is_made_of_what_is_there_and_read_by_its_attempt_only():
    store = MemoryStore()
    store.add(KEYS.attempt, dumps(ATTEMPT))
    for worker in ("rollout_worker/1", "rollout_worker/2"):
        change_scaling(
            store,
            KEYS,
            ATTEMPT,
            phase="main",
            change=lambda s, worker=worker: s.with_added({worker: "rollout_worker/0"}),
        )
    found = read_scaling(store, KEYS, token="ours", phase="main")
    assert found is not None
    assert list(found.added) == ["rollout_worker/1", "rollout_worker/2"]
    assert read_scaling(store, KEYS, token="theirs") is None
    assert read_scaling(store, KEYS, token="ours", phase="prepare") is None


def test_the_next_attempt_begins_with_the_plan():
    store = MemoryStore()
    store.add(KEYS.attempt, dumps(ATTEMPT))
    drop = lambda s: s.with_drained({"rollout_worker/0": 1.0})  # noqa: E731
    change_scaling(store, KEYS, ATTEMPT, phase="main", change=drop)
    newer = replace(ATTEMPT, number=2, token="theirs")
    store.add(KEYS.attempt, dumps(newer), replace=True)
    with golden.raises(TrialError):
        change_scaling(store, KEYS, ATTEMPT, phase="main", change=drop)
    after = change_scaling(store, KEYS, newer, phase="main", change=lambda s: s)
    assert (after.attempt, after.drained) == (2, {})


def test_who_is_overtaken_decides_anew():
    store, seen = MemoryStore(), []
    store.add(KEYS.attempt, dumps(ATTEMPT))

    def change(before: Scaling) -> Scaling:
        seen.append(dict(before.drained))
        if len(seen) == 1:  # somebody else is faster
            store.add(KEYS.scaling, dumps(EMPTY.with_drained({"rollout_worker/1": 2.0})))
        return before.with_drained({"rollout_worker/0": 1.0})

    after = change_scaling(store, KEYS, ATTEMPT, phase="main", change=change)
    assert seen == [{}, {"rollout_worker/1": 2.0}]
    assert after.drained == {"rollout_worker/0": 1.0, "rollout_worker/1": 2.0}


def test_time_counts_from_when_it_was_heard_and_may_only_get_less():
    leaving, asked = DrainDeadlines(), EMPTY.with_drained({"rollout_worker/0": 60.0})
    assert leaving.update(asked, now_s=100.0) == ["rollout_worker/0"]
    assert leaving.update(asked, now_s=150.0) == []
    assert (leaving.overdue(now_s=159.0), leaving.overdue(now_s=160.0)) == (
        [],
        ["rollout_worker/0"],
    )
    leaving.update(EMPTY.with_drained({"rollout_worker/0": 5.0}), now_s=110.0)
    assert leaving.until_s == {"rollout_worker/0": 115.0}
    assert leaving.overdue(now_s=116.0, slack_s=2.0) == []


# ---- what the supervisor does -------------------------------------------------------------------


def test_each_move_is_made_once():
    wanted = EMPTY.with_added(
        {"rollout_worker/1": "rollout_worker/0", "rollout_worker/2": "rollout_worker/0"}
    ).with_drained({"rollout_worker/0": 1.0})
    known = {"rollout_worker/0", "model_worker/0"}
    due = moves(wanted, known=known, leaving=set(), failed={"rollout_worker/2"})
    assert due == Moves(
        start=(("rollout_worker/1", "rollout_worker/0"),), let_go=("rollout_worker/0",)
    )
    known |= {"rollout_worker/1"}
    again = moves(wanted, known=known, leaving={"rollout_worker/0"}, failed={"rollout_worker/2"})
    assert again == Moves()


def test_who_is_to_go_before_it_was_started_is_not_started():
    wanted = EMPTY.with_added({"rollout_worker/1": "rollout_worker/0"})
    wanted = wanted.with_drained({"rollout_worker/1": 1.0})
    due = moves(wanted, known={"rollout_worker/0"}, leaving=set(), failed=set())
    assert due == Moves(let_go=("rollout_worker/1",))


@pytest.mark.parametrize(
    ("worker", "like"),
    [("model_worker/1", "model_worker/0"), ("rollout_worker/1", "rollout_worker/7")],
    ids=["of another kind", "like nobody"],
)
def test_nothing_is_started_that_can_not_be_added(worker, like):
    known = {"model_worker/0", "rollout_worker/0"}
    assert (
        moves(EMPTY.with_added({worker: like}), known=known, leaving=set(), failed=set()) == Moves()
    )


def test_of_a_maker_both_are_given_up_of_others_one():
    added = dict.fromkeys(("generation_server/2", "rollout_worker/2", "rollout_worker/3"), "")
    assert partners("rollout_worker/2", added, are_makers=True) == (
        "generation_server/2",
        "rollout_worker/2",
    )
    assert partners("rollout_worker/2", added, are_makers=False) == ("rollout_worker/2",)


# ---- who comes and who goes ---------------------------------------------------------------------


def test_a_maker_is_added_like_the_last_or_like_the_one_named():
    change = rescaled(TWO, EMPTY, ScaleRequest(makers=3))
    assert change.scaling.added == {
        "generation_server/2": "generation_server/1",
        "rollout_worker/2": "rollout_worker/1",
    }
    assert [unit.name for unit in change.starting] == ["maker_2"]
    named = rescaled(TWO, EMPTY, ScaleRequest(makers=3, like="maker_0"))
    assert named.scaling.added["rollout_worker/2"] == "rollout_worker/0"
    like_added = rescaled(TWO, named.scaling, ScaleRequest(makers=4, like="maker_2"))
    assert like_added.scaling.added["rollout_worker/3"] == "rollout_worker/0", "of the plan"


def test_fewer_means_that_the_last_ones_go():
    three = rescaled(TWO, EMPTY, ScaleRequest(makers=3)).scaling
    change = rescaled(TWO, three, ScaleRequest(makers=1, grace_s=7.0))
    assert change.scaling.drained == {
        "generation_server/1": 7.0,
        "rollout_worker/1": 7.0,
        "generation_server/2": 7.0,
        "rollout_worker/2": 7.0,
    }


def test_one_goes_and_the_number_stays():
    change = rescaled(TWO, EMPTY, ScaleRequest(makers=2, drain=("maker_0",)))
    assert [unit.name for unit in change.draining] == ["maker_0"]
    assert [unit.name for unit in change.starting] == ["maker_2"]


def test_to_let_one_go_twice_is_the_same():
    once = rescaled(TWO, EMPTY, ScaleRequest(drain=("maker_1",)))
    twice = rescaled(TWO, once.scaling, ScaleRequest(drain=("maker_1",)))
    assert twice.scaling == once.scaling
    assert [unit.name for unit in twice.draining] == ["maker_1"], "it is waited for all the same"


def test_a_name_that_the_user_gave_is_not_given_again():
    mine = makers("fast", "maker_2", "slow")
    (new,) = rescaled(mine, EMPTY, ScaleRequest(makers=4)).starting
    assert (new.name, new.workers[0]) == ("maker_3", "generation_server/3")
    mine = makers("maker_3", "a", "b")
    (new,) = rescaled(mine, EMPTY, ScaleRequest(makers=4)).starting
    assert (new.name, new.workers[0]) == ("maker_4", "generation_server/3")


def test_servers_and_rollout_workers_of_a_plain_run_are_scaled_apart():
    change = rescaled(PLAIN, EMPTY, ScaleRequest(servers=2, workers=3))
    assert list(change.scaling.added) == [
        "generation_server/1",
        "rollout_worker/1",
        "rollout_worker/2",
    ]
    after = rescaled(PLAIN, change.scaling, ScaleRequest(drain=("generation_server/0",)))
    assert after.scaling.drained == {"generation_server/0": 60.0}


@pytest.mark.parametrize(
    ("config", "wish", "words"),
    [
        (TWO, ScaleRequest(drain=("maker_0", "maker_1")), "none of the makers would remain"),
        (PLAIN, ScaleRequest(drain=("generation_server/0",)), "none of the servers would remain"),
        (TWO, ScaleRequest(servers=2), "has no separate servers"),
        (PLAIN, ScaleRequest(makers=2), "has no separate makers"),
        (TWO, ScaleRequest(drain=("rollout_worker/1",)), "is part of maker_1"),
        (TWO, ScaleRequest(drain=("maker_o",)), "nothing called 'maker_o' can be drained"),
        (TWO, ScaleRequest(makers=3, like="maker_7"), "none of the makers is called 'maker_7'"),
        (TWO, ScaleRequest(makers=2, like="maker_0"), "no unit is added"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_be_is_refused_in_words(config, wish, words):
    with golden.raises((ConfigError, UnknownName)):
        rescaled(config, EMPTY, wish)


def test_each_trainer_keeps_somebody_who_feeds_it():
    apart = makers("a", "b")
    assert apart.rollout is not None
    first, second = apart.rollout.makers
    routes = (first, replace(second, holders=(1,)))
    apart = replace(apart, rollout=replace(apart.rollout, makers=routes))
    with golden.raises(ConfigError):
        rescaled(apart, EMPTY, ScaleRequest(drain=("a",)))
    with golden.raises(ConfigError):
        rescaled(apart, EMPTY, ScaleRequest(drain=("a",), makers=2, like="b"))
    change = rescaled(apart, EMPTY, ScaleRequest(drain=("a",), makers=2, like="a"))
    assert change.scaling.added["rollout_worker/2"] == "rollout_worker/0"


def test_a_synchronous_run_has_nothing_to_scale():
    with golden.raises(TrialError):
        units(replace(PLAIN, rollout=None), EMPTY)


WISHES = st.builds(
    ScaleRequest,
    makers=st.none() | st.integers(1, 4),
    drain=st.lists(st.integers(0, 8).map("maker_{}".format), max_size=2).map(tuple),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(WISHES, max_size=6))
def test_names_are_used_once_and_somebody_stays_whatever_is_wished(wishes):
    scaling, started = EMPTY, {"rollout_worker/0", "rollout_worker/1"}
    for wish in wishes:
        try:
            change = rescaled(TWO, scaling, wish)
        except RealsysError:
            continue
        new = change.scaling.added.keys() - scaling.added.keys()
        assert not started & new
        started |= {w for w in new if w.startswith("rollout_worker/")}
        scaling = change.scaling
        there = [unit for unit in units(TWO, scaling) if not unit.is_draining]
        assert len(there) == wish.makers if wish.makers else there
        assert len({unit.name for unit in units(TWO, scaling)}) == len(units(TWO, scaling))
        for unit in units(TWO, scaling):  # both of a maker, or none
            assert len(scaling.drained.keys() & set(unit.workers)) in (0, 2)


# ---- what a worker that was added is ------------------------------------------------------------


def test_an_added_worker_has_the_configuration_of_another_and_its_own_name():
    told = TWO.lazy_init().set_worker_information("ppo", "run1")
    config = told.resolve_worker_config("rollout_worker", 5, like=1)
    own = told.resolve_worker_config("rollout_worker", 1)
    assert config.worker_info.name == "rollout_worker/5"
    assert config.worker_info.host_key == "worker/rollout_worker/5"
    assert replace(config, worker_info=own.worker_info) == own


@pytest.mark.parametrize("kind", [WorkerType.MODEL_WORKER, WorkerType.MASTER_WORKER])
def test_workers_of_other_kinds_are_not_added(kind):
    with golden.raises(ConfigError):
        TWO.lazy_init().resolve_worker_config(kind, 5, like=0)
