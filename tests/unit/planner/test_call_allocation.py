"""Pools and allocation strings: what they mean, that they are read as they are written, every mistake."""

from __future__ import annotations

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.parts.call_placement import (
    PlacementRequest,
    allocate_calls,
    placement_requests,
)
from realsys.api.errors import ConfigError, ConfigErrors
from realsys.api.model import ProcessTopology
from realsys.planner.allocation import (
    AllocationEntry,
    CallAllocation,
    format_allocation,
    format_entries,
    parse_allocation,
    parse_pools,
    workers_text,
)

CALLS = {"actor_gen": "actor", "actor_train": "actor", "critic_train": "critic", "rew_inf": "rule"}


def topo(text: str) -> ProcessTopology:
    return ProcessTopology.parse(text)


def problems_of(refused: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    error = refused.value
    return [p.what for p in getattr(error, "problems", (error,))]


# ---- pools ------------------------------------------------------------------------------------------


def test_sizes_follow_one_another_and_ranges_stand_where_they_say() -> None:
    pools = parse_pools({"left": "2", "all": "0-3", "right": "2", "ends": "0-0+3"})
    assert pools == {"left": (0, 1), "all": (0, 1, 2, 3), "right": (2, 3), "ends": (0, 3)}


@pytest.mark.parametrize(
    "text",
    ["", "0", "04", "-1", "3-1", "0-", "0-1+1-2", "0+0", "1 ", "x", "²", "999999", "+", "5-5-5"],
)
def test_what_is_no_pool_is_refused(text: str) -> None:
    with golden.raises(ConfigError) as refused:
        parse_pools({"left": text})
    assert refused.value.where == "placement.pools.left"


def test_all_mistakes_of_pools_are_told_with_both_numbers() -> None:
    with pytest.raises(ConfigErrors) as refused:
        parse_pools({"a b": "1", "left": "x", "right": "4"}, n_workers=3)
    golden.check(problems_of(refused))


# ---- the text ----------------------------------------------------------------------------------------


def test_an_allocation_is_read_entry_by_entry() -> None:
    text = "actor_gen:d4t1p1@left, critic:p2t2 ,*:t2d2"
    assert parse_allocation(text, calls=CALLS, pools=["left"]) == (
        AllocationEntry(name="actor_gen", topology=topo("d4"), pool="left"),
        AllocationEntry(name="critic", topology=topo("t2p2")),
        AllocationEntry(name="*", topology=topo("d2t2")),
    )
    assert parse_allocation(" ", calls=CALLS) == ()


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("actor_gn:d2", "no call or role called 'actor_gn'", "did you mean 'actor_gen'"),
        ("actor_gen:d2,actor_gen:d4", "actor_gen is given twice", "keep one entry"),
        ("*:d2,*:d4", "* is given twice", "keep one entry"),
        ("actor:d2@lft", "no pool called 'lft'", "did you mean 'left'?"),
        ("actor:2x2", "'2x2' is no parallel layout", "e.g. d2t1p1"),
        ("actor:d2d2", "'d2d2' is no parallel layout", "e.g. d2t1p1"),
        ("actor:d0", "'d0' is no parallel layout", "e.g. d2t1p1"),
        ("actor", "'actor' is not an entry of an allocation", "name:layout@pool"),
        ("actor:d2@", "'actor:d2@' is not an entry of an allocation", "name:layout@pool"),
        ("actor:d2,", "'' is not an entry of an allocation", "name:layout@pool"),
        ("actor:d2@left@left", "'actor:d2@left@left' is not an entry", "name:layout@pool"),
    ],
)
def test_every_mistake_says_what_to_do(text: str, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_allocation(text, calls=CALLS, pools=["left"])
    assert what in refused.value.what
    assert fix in refused.value.fix
    assert refused.value.where.startswith("placement.allocation")


def test_a_pool_where_there_is_none_says_how_one_is_made() -> None:
    with golden.raises(ConfigError):
        parse_allocation("actor:d2@left", calls=CALLS)


def test_all_mistakes_of_an_allocation_are_told() -> None:
    with pytest.raises(ConfigErrors) as refused:
        parse_allocation("foo:d2,actor:x@no,*:d2,*:d2,nothing", calls=CALLS)
    assert len(problems_of(refused)) == 5


topologies = st.builds(
    ProcessTopology, data=st.integers(1, 4), tensor=st.integers(1, 4), pipeline=st.integers(1, 3)
)


@given(
    st.dictionaries(
        st.sampled_from(["*", *CALLS, "actor"]),
        st.tuples(topologies, st.sampled_from([None, "left", "w-1_2"])),
    )
)
def test_entries_are_read_as_they_are_written(table: dict[str, tuple]) -> None:
    entries = tuple(AllocationEntry(name=n, topology=t, pool=p) for n, (t, p) in table.items())
    text = format_entries(entries)
    assert parse_allocation(text, calls=CALLS, pools=["left", "w-1_2"]) == entries


@st.composite
def places(draw: st.DrawFn) -> CallAllocation:
    topology = draw(topologies)
    size = topology.world_size
    first = draw(st.integers(0, 5))
    run = list(range(first, first + size + draw(st.integers(0, 3))))
    workers = draw(st.permutations(run)) if draw(st.booleans()) else run
    return CallAllocation(workers=tuple(workers[:size]), topology=topology)


@given(st.dictionaries(st.sampled_from(list(CALLS)), places(), min_size=1))
def test_any_allocation_survives_its_text(calls: dict[str, CallAllocation]) -> None:
    pools_text, text = format_allocation(calls)
    pools = parse_pools(pools_text)
    entries = parse_allocation(text, calls=CALLS, pools=pools)
    wishes = placement_requests(
        {name: CALLS[name] for name in calls},
        entries,
        settings={},
        defaults={role: PlacementRequest() for role in CALLS.values()},
        trained={},
    )
    assert allocate_calls(wishes, pools, n_workers=1) == calls


@given(st.lists(st.integers(0, 20), unique=True, min_size=2))
def test_workers_are_named_as_they_are_read(workers: list[int]) -> None:
    assert parse_pools({"p": workers_text(workers)})["p"] == tuple(workers)


# ---- who gets what -----------------------------------------------------------------------------------


def wished(text: str, **more: object) -> dict[str, str]:
    rest: dict = {
        "settings": {},
        "defaults": {role: PlacementRequest(pool="home") for role in CALLS.values()},
        "trained": {"actor": "actor_train", "critic": "critic_train"},
        "rules": ("rule",),
        **more,
    }
    entries = parse_allocation(text, calls=CALLS, pools=["left", "right"])
    found = placement_requests(CALLS, entries, **rest)
    return {call: f"{wish.topology}@{wish.pool}" for call, wish in found.items()}


def test_the_call_wins_over_its_role_over_the_star_and_rules_are_left_alone() -> None:
    assert wished("*:d8,actor:d2@left,actor_gen:d4@right") == {
        "actor_gen": "d4t1p1@right",
        "actor_train": "d2t1p1@left",
        "critic_train": "d8t1p1@home",
        "rew_inf": "None@home",
    }
    assert wished("rule:d2@left")["rew_inf"] == "d2t1p1@left"


def test_a_call_that_nobody_names_runs_where_its_role_is_trained() -> None:
    assert wished("actor_train:t2@left")["actor_gen"] == "d1t2p1@left"


def test_settings_of_the_role_stand_below_the_allocation_and_above_its_train_step() -> None:
    settings = {"actor": PlacementRequest(topology=topo("d2"), pool="left")}
    found = wished("actor_train:t2@right", settings=settings)
    assert (found["actor_gen"], found["actor_train"]) == ("d2t1p1@left", "d1t2p1@right")
    assert wished("*:d4", settings=settings)["actor_gen"] == "d4t1p1@left"


def test_calls_take_the_first_workers_of_their_pool_or_all_of_it() -> None:
    wishes = {
        "a": PlacementRequest(topology=topo("t2"), pool="right"),
        "b": PlacementRequest(pool="right"),
        "c": PlacementRequest(),
    }
    found = allocate_calls(wishes, {"right": (4, 5, 6)}, n_workers=8)
    assert found["a"] == CallAllocation(workers=(4, 5), topology=topo("t2"))
    assert found["b"] == CallAllocation(workers=(4, 5, 6), topology=topo("d3"))
    assert found["c"].workers == tuple(range(8))


def test_a_call_has_no_more_ranks_than_its_bound() -> None:
    wishes = {str(most): PlacementRequest(max_ranks=most) for most in (1, 3, 4, 9)}
    found = allocate_calls(wishes, {}, n_workers=4)
    assert {name: place.workers for name, place in found.items()} == {
        "1": (0,),
        "3": (0, 1, 2),
        "4": (0, 1, 2, 3),
        "9": (0, 1, 2, 3),
    }
    assert all(place.topology == topo(f"d{len(place.workers)}") for place in found.values())


def test_a_layout_larger_than_its_pool_is_refused_with_both_numbers() -> None:
    large = PlacementRequest(topology=topo("d2t2"), pool="right", where="allocation, a:d2t2@right")
    wishes = {
        "a": large,
        "a2": large,
        "b": PlacementRequest(topology=topo("d9"), where="b.parallel"),
        "c": PlacementRequest(pool="lost", where="c.pool"),
    }
    with pytest.raises(ConfigErrors) as refused:
        allocate_calls(wishes, {"right": (0, 1, 2)}, n_workers=8)
    golden.check(problems_of(refused))
    assert refused.value.problems[1].where == "allocation, a:d2t2@right"


def test_workers_and_layout_of_a_call_agree() -> None:
    for workers in ((0,), (0, 0), (0, 1, 2)):
        with golden.raises(ConfigError):
            CallAllocation(workers=workers, topology=topo("d2"))
