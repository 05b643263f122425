"""The simulation of asynchronous runs (benchmarks/simulate_rollouts.py), in numbers worked out by hand."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import golden
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from lengths import Lengths
from simulate_rollouts import SimulationSettings, simulate
from virtual_server import VirtualServer

from realsys.api.errors import ConfigError

# One server of two rows, a token a second; 4 answers of 10 tokens a step; half a second to train a token.
# Generation: two rounds of 10 s. Training: 40 tokens, 20 s.
EVEN = SimulationSettings(
    servers=1,
    slots=2,
    token_s=1.0,
    train_token_s=0.5,
    batch_size=4,
    group_size=1,
    lengths=Lengths(mean=10, longest=10, spread=0),
    max_staleness=0,
    steps=5,
    warm_up=3,
)


def test_synchronous_steps_take_both_times() -> None:
    outcome = simulate(EVEN)
    assert outcome.step_s == pytest.approx(20 + 20)
    assert outcome.tokens_per_s == pytest.approx(40 / 40)
    assert outcome.of_bound == pytest.approx(1 / 2)  # two tokens a second, by both
    assert outcome.training == pytest.approx(1 / 2)
    assert outcome.decoding == pytest.approx(1 / 2)
    assert (outcome.staleness, outcome.stalest, outcome.thrown_away) == (0, 0, 0)


def test_new_weights_take_their_time() -> None:
    assert simulate(replace(EVEN, publish_s=3, update_s=2)).step_s == pytest.approx(45)
    # In stride generation is the slower side: every 20 s of it are interrupted for 2 s.
    stale = replace(EVEN, publish_s=3, update_s=2, max_staleness=2)
    assert simulate(stale).step_s == pytest.approx(22)


def test_a_step_ahead_takes_the_longer_time() -> None:
    outcome = simulate(replace(EVEN, max_staleness=1))
    assert outcome.step_s == pytest.approx(20)
    assert outcome.of_bound == pytest.approx(1)
    assert outcome.stalest == 1
    slow_trainers = replace(EVEN, max_staleness=1, train_token_s=1.0)
    assert simulate(slow_trainers).step_s == pytest.approx(40)
    assert slow_trainers.bound == 1.0


def test_whole_batches_leave_rows_empty_at_their_end() -> None:
    # Three rows for four answers: 20 s a batch, and two rows stand still in half of it.
    gaps = replace(EVEN, slots=3, train_token_s=0.4)
    one_off = replace(gaps, max_staleness=1, whole_batches=True)
    assert simulate(one_off).step_s == pytest.approx(20)
    in_stride = replace(gaps, max_staleness=2)
    assert simulate(in_stride).step_s == pytest.approx(16)  # of the trainers; rows need 13.3 s


def test_what_is_not_interrupted_ends_before_the_update() -> None:
    uneven = replace(EVEN, max_staleness=2, lengths=Lengths(mean=10, longest=40), batch_size=16)
    through, drained = simulate(uneven), simulate(replace(uneven, interruptible=False))
    assert through.decoding > 0.99  # rows are never empty
    assert drained.decoding < 0.95  # one waits for the other at each update
    assert drained.tokens_per_s < through.tokens_per_s


def test_policy_drop_throws_away_and_the_others_do_not() -> None:
    uneven = replace(
        EVEN, max_staleness=1, lengths=Lengths(mean=10, longest=80, spread=1.2), steps=40
    )
    thrown = {p: simulate(replace(uneven, policy=p)) for p in ("wait", "window", "drop")}
    assert thrown["wait"].thrown_away == thrown["window"].thrown_away == 0
    assert thrown["drop"].thrown_away > 0
    assert max(outcome.stalest for outcome in thrown.values()) == 1


def test_a_seed_is_a_run() -> None:
    uneven = replace(EVEN, max_staleness=2, lengths=Lengths(mean=10, longest=80))
    assert simulate(uneven) == simulate(uneven)
    assert simulate(uneven) != simulate(replace(uneven, seed=2))


# ---- the parts ----------------------------------------------------------------------------------


def test_a_server_is_slower_with_more_rows() -> None:
    server: VirtualServer[str] = VirtualServer(slots=2, token_s=1.0, row_s=0.5)
    server.join("short", 10)
    server.join("long", 20)
    assert not server.has_room
    assert server.next_end() == 20.0  # ten steps of 2 s
    assert server.advance(20.0) == 40.0  # seconds of two rows
    assert server.leave() == ["short"]
    assert server.next_end() == 35.0  # ten more of 1.5 s
    server.paused = True
    assert server.advance(30.0) == 0.0
    assert (server.next_end(), server.leave(), server.has_room) == (None, [], False)
    server.paused = False
    assert server.next_end() == 45.0


@pytest.mark.parametrize("spread", [0.3, 1.0, 1.5])
def test_lengths_have_their_mean_and_end_at_the_longest(spread: float) -> None:
    lengths, draw = Lengths(mean=1024, longest=8192, spread=spread), random.Random(1)
    drawn = [lengths.draw(draw) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(1024, rel=0.03)
    assert min(drawn) >= 1
    assert max(drawn) <= 8192
    assert (max(drawn) == 8192) == (spread >= 1)


def test_lengths_that_can_not_be() -> None:
    with golden.raises(ConfigError):
        Lengths(mean=100, longest=50)
