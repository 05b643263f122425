"""Live runs get workers and lose the first ones: nothing is lost, nothing is trained twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from real_trials import SMALL_PPO, Trials, explain, trained_ids, wait_until

from launcher.status import trial_view
from launcher.trial_state import State
from realsys.api.trial import TrialFiles

pytestmark = [pytest.mark.process, pytest.mark.timeout(420)]

# Long enough for a worker to come while it runs; each command waits until it is so.
STEPS = 180
OTHER = ("total_train_epochs", "eval_freq_steps", "ckpt_freq_steps")
RUN = (
    *(word for word in SMALL_PPO if not any(name in word for name in OTHER)),
    "exp_ctrl.total_train_epochs=60",
    f"exp_ctrl.benchmark_steps={STEPS}",
    "exp_ctrl.ckpt_freq_steps=60",
    "max_staleness=2",
)


@pytest.fixture
def trials(tmp_path: Path):
    made = Trials(tmp_path / "root")
    yield made
    made.end_all()


def made_by(files: TrialFiles, index: int) -> int:
    """Answers that rollout worker ``index`` delivered and that were kept."""
    path = files.phase(files.root).rows_of(1).root / "rollouts" / f"{index}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sum(row["outcome"] == "kept" for row in rows)


def states(files: TrialFiles) -> dict[str, str]:
    return {w.worker: w.state for w in trial_view(files).workers}


def test_a_maker_comes_and_another_goes_while_the_run_lives(
    trials: Trials, tiny_policy: Path
) -> None:
    name = "ppo-math-detached/live"
    files = trials.launch(
        "ppo-math-detached",
        "live",
        f"actor.path={tiny_policy}",
        "detached.makers={maker_0: trainer_0, maker_1: trainer_0}",
        'detached.trainers={trainer_0: "maker_0, maker_1"}',
        "detached.experience_batch_size=8",
        *RUN,
    )
    trials.wait_for_step(files, 3)
    came = trials.run("scale", name, "--makers", "3", "--like", "maker_0", timeout_s=240)
    assert came.returncode == 0, came.stderr + explain(files, trials.wait_for_step(files, 3))
    assert came.stdout.splitlines()[-1] == "maker_2  generation_server/2  rollout_worker/2"
    wait_until(files, lambda _: made_by(files, 2) > 0, timeout_s=60)
    gone = trials.run("scale", name, "--drain", "maker_0", timeout_s=240)
    assert gone.returncode == 0, gone.stderr
    assert "maker_0 has left\n" in gone.stderr
    assert [line.split()[0] for line in gone.stdout.splitlines()] == ["maker_1", "maker_2"]
    now = states(files)
    assert (now["generation_server/0"], now["rollout_worker/0"]) == ("done", "done")
    of_first = made_by(files, 0)
    view = trials.wait(files, timeout_s=240)
    assert (view.state, view.attempt) == (State.COMPLETED, 1), explain(files, view)
    assert set(Counter(trained_ids(files)).values()) == {1}
    assert len(trained_ids(files)) == STEPS * 8
    assert made_by(files, 0) == of_first
    rows = [json.loads(line) for line in files.attempt(1).scaling.read_text().splitlines()]
    left = {row["worker"]: row["code"] for row in rows if row["event"] == "left"}
    assert left == {"generation_server/0": 0, "rollout_worker/0": 0}
    assert not files.attempt(1).restarts.exists()


def test_the_only_server_and_worker_are_replaced_by_others(
    trials: Trials, tiny_policy: Path
) -> None:
    name = "ppo-math-async/live"
    files = trials.launch(
        "ppo-math-async",
        "live",
        f"actor.path={tiny_policy}",
        "rollout.new_tokens_per_chunk=3",  # answers move from server to server
        *RUN,
    )
    trials.wait_for_step(files, 3)
    refused = trials.run("scale", name, "--drain", "generation_server/0")
    assert (refused.returncode, "none of the servers would stay" in refused.stderr) == (4, True)
    others = ("--drain", "generation_server/0", "--drain", "rollout_worker/0")
    done = trials.run("scale", name, "--servers", "1", "--workers", "1", *others, timeout_s=240)
    assert done.returncode == 0, done.stderr + explain(files, trial_view(files))
    assert done.stdout.split() == ["generation_server/1", "rollout_worker/1"]
    view = trials.wait(files, timeout_s=240)
    assert (view.state, view.attempt) == (State.COMPLETED, 1), explain(files, view)
    assert made_by(files, 1) > 0
    assert set(Counter(trained_ids(files)).values()) == {1}
    assert len(trained_ids(files)) == STEPS * 8
    assert not files.attempt(1).restarts.exists()
