"""Whole trials that sample with top-p and top-k: on-policy, whichever way the answers come."""

from __future__ import annotations

from pathlib import Path

import pytest
from near import near
from real_trials import Trials, explain, small_ppo

from realsys.observability.metrics import deterministic, read_metrics
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

GRPO = (
    *small_ppo("exp_ctrl.total_train_epochs=1", "task.train_size=32", "task.eval_size=0"),
    "gen.top_p=0.9",
    "gen.top_k=200",
    "gen.min_new_tokens=2",
    "algorithm.kl_ctl=0.05",
)
# Scores that differ within each group: without them a step has no minibatch.
RULE = """
from realsys.api.registry import register_reward
register_reward("by_length", lambda *, response, **_: len(response) % 7 / 7, trusted=True)
"""
# The plain objective, so that nothing but the way of the answers differs.
ASYNC = (
    "schedule=async",
    "schedule.max_staleness=0",
    "schedule.new_tokens_per_chunk=3",
    "algorithm.use_decoupled_loss=false",
    "algorithm.correction=none",
)
ONE_SIDED = ("rollout/", "staleness/", "mismatch/")


def rows_of(trials: Trials, name: str, *words: str) -> list[dict[str, object]]:
    files: TrialFiles = trials.launch("grpo-math", name, *words)
    view = trials.wait(files, timeout_s=240)
    assert view.state is State.COMPLETED, explain(files, view)
    return [deterministic(row) for row in read_metrics(files.phase(files.root).metrics)]


def test_answers_sampled_with_top_p_are_on_policy_and_the_same_from_servers(
    trials: Trials, tiny_policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "by_length.py").write_text(RULE)
    rule = ("--import", str(tmp_path / "by_length.py"), "task.reward=by_length")
    policy = (f"actor.path={tiny_policy}", *rule)
    synchronous = rows_of(trials, "sync", *policy, *GRPO)
    for row in synchronous:
        assert float(row["actor/first_minibatch/max_abs_log_ratio"]) < 1e-4  # type: ignore[arg-type]
        assert row["actor/first_minibatch/pg_clipfrac"] == 0
    assert float(synchronous[0]["actor/kl_ref/per_token"]) == near(0, scale=1.0)  # type: ignore[arg-type]
    served = rows_of(trials, "async", *policy, *GRPO, *ASYNC)
    assert [
        {k: v for k, v in row.items() if not any(part in k for part in ONE_SIDED)} for row in served
    ] == [
        {k: v for k, v in row.items() if not any(part in k for part in ONE_SIDED)}
        for row in synchronous
    ]
