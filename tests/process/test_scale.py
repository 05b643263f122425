"""Live runs get workers and lose the first ones: nothing is lost, nothing is trained twice."""

from __future__ import annotations

import json
from pathlib import Path

import live_runs
import pytest
from real_trials import Trials, explain, wait_until

from launcher.trials.status import trial_view
from realsys.trial.records import TrialFiles

pytestmark = [pytest.mark.process, pytest.mark.timeout(420)]


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
    files = live_runs.launch(trials, "ppo-math-detached", tiny_policy, *live_runs.TWO_MAKERS)
    came = trials.run("scale", name, "--makers", "3", "--like", "maker_0", timeout_s=240)
    assert came.returncode == 0, came.stderr + explain(files, trial_view(files))
    assert came.stdout.splitlines()[-1] == "maker_2  generation_server/2  rollout_worker/2"
    wait_until(files, lambda _: made_by(files, 2) > 0, timeout_s=240)
    gone = trials.run("scale", name, "--drain", "maker_0", timeout_s=240)
    assert gone.returncode == 0, gone.stderr + explain(files, trial_view(files))
    assert "maker_0 has left\n" in gone.stderr
    assert [line.split()[0] for line in gone.stdout.splitlines()] == ["maker_1", "maker_2"]
    now = states(files)
    assert (now["generation_server/0"], now["rollout_worker/0"]) == ("done", "done")
    of_first = made_by(files, 0)
    live_runs.finish(trials, files)
    assert made_by(files, 0) == of_first
    rows = [json.loads(line) for line in files.attempt(1).scaling.read_text().splitlines()]
    left = {row["worker"]: row["code"] for row in rows if row["event"] == "left"}
    assert left == {"generation_server/0": 0, "rollout_worker/0": 0}


def test_the_only_server_and_worker_are_replaced_by_others(
    trials: Trials, tiny_policy: Path
) -> None:
    name = "ppo-math-async/live"
    chunks = "schedule.new_tokens_per_chunk=3"  # answers move from server to server
    files = live_runs.launch(trials, "ppo-math-async", tiny_policy, chunks)
    refused = trials.run("scale", name, "--drain", "generation_server/0")
    assert (refused.returncode, "servers would remain" in refused.stderr) == (4, True)
    others = ("--drain", "generation_server/0", "--drain", "rollout_worker/0")
    done = trials.run("scale", name, "--servers", "1", "--workers", "1", *others, timeout_s=240)
    assert done.returncode == 0, done.stderr + explain(files, trial_view(files))
    assert done.stdout.split() == ["generation_server/1", "rollout_worker/1"]
    live_runs.finish(trials, files)
    assert made_by(files, 1) > 0
