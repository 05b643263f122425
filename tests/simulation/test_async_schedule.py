"""How fast asynchronous training is, in virtual time around the ledger that runs use.

``benchmarks/bench_async_schedule.py`` prints the same for larger settings; docs/benchmarks.md says where it
holds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from lengths import Lengths
from simulate_rollouts import (
    SimulationOutcome,
    SimulationSettings,
    simulate,
)

pytestmark = pytest.mark.simulation

# 8 servers of 8 rows and trainers as fast as they are; a batch is 8 answers a row, the longest answer is 8
# times the mean: as long as a step of the fastest schedule (about 160 s). Weights take 3 s a step.
BALANCED = SimulationSettings(
    servers=8,
    slots=8,
    token_s=0.02,
    train_token_s=0.02 / 64,
    batch_size=128,
    group_size=4,
    lengths=Lengths(mean=1024, longest=8192),
    publish_s=2,
    update_s=1,
    steps=15,
    warm_up=5,
)


@cache
def outcome(**changed: object) -> SimulationOutcome:
    return simulate(replace(BALANCED, **changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["wait", "window"])
def test_two_steps_of_staleness_double_the_speed_and_reach_the_bound(policy: str) -> None:
    sync, stale = outcome(max_staleness=0), outcome(max_staleness=2, policy=policy)
    assert stale.tokens_per_s >= 2 * sync.tokens_per_s
    assert 0.9 <= stale.of_bound <= 1.03  # a batch's tokens may be of before the time measured
    assert (sync.stalest, stale.stalest) == (0, 2)


def test_one_step_off_lies_between() -> None:
    one_off = outcome(max_staleness=1, whole_batches=True, interruptible=False)
    assert outcome(max_staleness=0).tokens_per_s < one_off.tokens_per_s
    assert one_off.tokens_per_s < outcome(max_staleness=1).tokens_per_s
    assert outcome(max_staleness=1).tokens_per_s < outcome(max_staleness=2).tokens_per_s


@pytest.mark.parametrize("policy", ["wait", "window", "drop"])
def test_answers_that_outlive_an_update_are_what_makes_it_fast(policy: str) -> None:
    through = outcome(max_staleness=2, policy=policy)
    drained = outcome(max_staleness=2, policy=policy, interruptible=False)
    assert drained.tokens_per_s < 0.85 * through.tokens_per_s


def test_throwing_away_costs_more_than_waiting() -> None:
    waits, drops = (outcome(max_staleness=2, policy=p) for p in ("wait", "drop"))
    assert waits.thrown_away == 0
    assert drops.thrown_away > 0
    assert drops.tokens_per_s < waits.tokens_per_s
    assert drops.stalest == 2


def test_small_batches_need_more_staleness() -> None:
    """The last answers of a step begin ``max_staleness - 1`` steps before it is trained."""
    small = {eta: outcome(max_staleness=eta, batch_size=64) for eta in (1, 2, 4)}
    assert small[1].of_bound < small[2].of_bound < 0.9  # 4 answers a row: 8 / (2 - 1) are needed
    assert small[4].of_bound >= 0.9  # 8 / (4 - 1) < 4


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0])
def test_the_slower_side_is_the_bound(factor: float) -> None:
    stale = outcome(max_staleness=2, train_token_s=BALANCED.train_token_s * factor)
    assert 0.9 <= stale.of_bound <= 1.03
