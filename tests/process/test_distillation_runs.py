"""Policies that learn from teachers, as a user launches them: synchronous and asynchronous."""

from __future__ import annotations

import math

import pytest
from real_trials import Trials, explain, make_policy, metrics_of, small_ppo

from realsys.trial.trial_state import State

STEPS = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A policy, and as its teacher another one with its tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    policy, teacher = make_policy(folder / "policy"), make_policy(folder / "teacher", seed=1)
    return f"actor.path={policy}", f"teachers.near.path={teacher}", f"teachers.far.path={teacher}"


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_policy_comes_nearer_to_its_teachers(
    module_trials: Trials, models: tuple[str, ...], schedule: str
) -> None:
    files = module_trials.launch(
        "distill-math",
        schedule,
        f"schedule={schedule}",
        *models,
        "teachers.far.top_k=50",
        "teachers.near.weight=0.01",
        "actor.optimizer.lr=2e-3",
        *small_ppo("gen.max_new_tokens=8"),
        f"exp_ctrl.benchmark_steps={STEPS}",
    )
    view = module_trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    rows = [row for row in metrics_of(files) if "actor/teacher/near/kl" in row]
    assert len(rows) == STEPS
    near, far = (
        [float(str(row[name])) for row in rows]
        for name in ("actor/teacher/near/kl", "actor/teacher/far/forward_kl")
    )
    # By drawn tokens alone it is an estimate: of so few, it shows no course.
    assert all(math.isfinite(x) for x in near)
    assert any(near)
    assert 0 < far[-1] < far[0], far
