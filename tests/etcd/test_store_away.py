"""An etcd that is away for longer than leases live ends nobody, and stops nobody from computing.

In seconds, what tests/by_hand/acceptance/store_away.py shows in twenty minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from etcd_server import EtcdCluster
from real_trials import Trials
from runs_without_store import play


def test_a_run_computes_on_while_etcd_is_away_and_ends_as_if_nothing_had_been(
    trials: Trials, tiny_policy: Path, start_etcd: Callable[..., EtcdCluster]
) -> None:
    with start_etcd() as etcd:
        outcome = play(
            trials,
            tiny_policy,
            etcd,
            step_s=2.0,
            away_s=24.0,  # twice as long as a lease is held without an answer
            patience_s=60,
            look_every_s=8.0,
        )
    assert outcome.problems == [], outcome
    log = trials.files("ppo-math", "shaken").attempt(1).log("supervisor").read_text()
    assert "lost-worker detection suspended" in log, "the outage was not noticed at all"
