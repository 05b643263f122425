"""The transmission graph of makers and trainers: what is refused, and how much it lets through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.api.errors import ConfigError, ConfigErrors
from realsys.rollout.staleness.transmission import balance, parse_graph


def test_a_graph_reads_as_it_is_written():
    graph = parse_graph({"m0": "t0, t1", "m1": "t1"}, {"t0": "m0", "t1": "m1,m0"})
    assert graph.experience == {"m0": ("t0", "t1"), "m1": ("t1",)}
    assert graph.sources("m0") == ("t0", "t1")
    assert graph.sources("m1") == ("t1",)
    assert graph.senders("t1") == ("m0", "m1")


def problems_of(makers, trainers):
    with pytest.raises(ConfigError) as refused:
        parse_graph(makers, trainers, path="schedule.")
    error = refused.value
    found = error.problems if isinstance(error, ConfigErrors) else [error]
    return [f"{p.what} | {p.where} | {p.fix}" for p in found]


@pytest.mark.parametrize(
    ("makers", "trainers", "words"),
    [
        ({}, {"t0": ""}, ["no makers | schedule.makers"]),
        ({"m0": "t0"}, {}, ["no trainers", "m0 sends to 't0', which is no trainer"]),
        ({"0m": "t0"}, {"t0": "0m"}, ["'0m' is not a valid name"]),
        ({"x": "x"}, {"x": "x"}, ["'x' is a maker and a trainer"]),
        (
            {"maker_0": "trainer_1"},
            {"trainer_0": "maker_0"},
            [
                "maker_0 sends to 'trainer_1', which is no trainer | schedule.makers.maker_0 | did you mean"
            ],
        ),
        ({"m0": "t0, t0"}, {"t0": "m0"}, ["m0 sends to t0 twice"]),
        (
            {"m0": ""},
            {"t0": "m0"},
            ["m0 sends its experience to no trainer", "no maker sends experience to t0"],
        ),
        ({"m0": "t0", "m1": "t0"}, {"t0": "m0"}, ["no trainer sends weights to m1"]),
        ({"m0": "t0"}, {"t0": "m0", "t1": ""}, ["no maker sends experience to t1"]),
    ],
)
def test_what_would_stand_still_is_refused_all_at_once(makers, trainers, words):
    told = problems_of(makers, trainers)
    assert len(told) == len(words), told
    for text, word in zip(told, words, strict=True):
        assert word in text


def test_a_crossed_graph_wastes_nothing_and_a_lopsided_one_says_who_is_short():
    crossed = parse_graph(
        {"m0": "t0,t1", "m1": "t0,t1", "m2": "t0,t1"}, {"t0": "m0,m1,m2", "t1": ""}
    )
    assert balance(crossed).used == 1.0
    lopsided = parse_graph({"m0": "t0", "m1": "t0", "m2": "t1"}, {"t0": "m0,m1", "t1": "m2"})
    found = balance(lopsided)
    assert found.used == pytest.approx(2 / 3)
    assert (found.short, found.feeding) == (("t1",), ("m2",))


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=5))
def test_the_balance_is_that_of_a_fine_grained_matching(edges):
    """Against makers of 12 units each and trainers that take equal amounts, filled greedily by flow."""
    used = sorted(set().union(*edges))
    makers = {f"m{i}": ",".join(f"t{t}" for t in sorted(ts)) for i, ts in enumerate(edges)}
    trainers = {f"t{t}": ",".join(makers) for t in used}
    found = balance(parse_graph(makers, trainers)).used
    supply = 12
    most = max(
        amount
        for amount in range(len(edges) * supply + 1)
        if _flows([sorted(used.index(t) for t in ts) for ts in edges], supply, len(used), amount)
    )
    assert found == pytest.approx(
        min(1.0, most * len(used) / (len(edges) * supply)), abs=len(used) / (len(edges) * supply)
    )


def _flows(edges, supply, num_trainers, amount):
    """Whether every trainer can get ``amount`` from makers of ``supply`` each (augmenting paths)."""
    sent = [[0] * num_trainers for _ in edges]

    def augment(trainer, seen):
        for i, ts in enumerate(edges):
            if trainer not in ts or i in seen:
                continue
            seen.add(i)
            if sum(sent[i]) < supply:
                sent[i][trainer] += 1
                return True
            for other in ts:
                if other != trainer and sent[i][other] and augment(other, seen):
                    sent[i][other] -= 1
                    sent[i][trainer] += 1
                    return True
        return False

    return all(augment(t, set()) for t in range(num_trainers) for _ in range(amount))
