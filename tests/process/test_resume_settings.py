"""A run that goes on with other settings ends as one that had them from the beginning.

What may be changed, and what is written, is tested in `tests/unit/launcher/submit/test_remake.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from history_check import check_history, read_history
from paced import Pace
from real_trials import (
    LONG_PPO,
    Trials,
    explain,
    metrics_of,
    name_of,
    small_ppo,
    trained_ids,
    wait_until,
    weights_of,
)

from realsys.data.sources.math_questions import MathPrompts
from realsys.master.graph.data_schedule import DataSchedule
from realsys.observability.metrics import read_metrics
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = pytest.mark.process

STEPS = 20
CONSTANT = tuple(
    f"{role}.optimizer.{setting}"
    for role in ("actor", "critic")
    for setting in ("lr_schedule=constant", "warmup_steps_proportion=0")
)
RUN = (*small_ppo("exp_ctrl.total_train_epochs=1000", "task.train_size=96"), *CONSTANT)


def everything(root: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of each file; but the lock, which holds nothing."""
    return {
        str(p.relative_to(root)): (p.lstat().st_mode, p.read_bytes() if p.is_file() else b"")
        for p in sorted(root.rglob("*"))
        if p.name != "lock"
    }


def without_evaluations(files: TrialFiles) -> list[dict[str, object]]:
    rows = ({k: v for k, v in r.items() if not k.startswith("eval/")} for r in metrics_of(files))
    return [row for row in rows if row["step"]]


def assert_trained_alike(files: TrialFiles, reference: TrialFiles) -> None:
    for role in ("actor", "critic"):
        assert weights_of(files, role) == weights_of(reference, role), role
    assert trained_ids(files) == trained_ids(reference)
    assert without_evaluations(files) == without_evaluations(reference)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> TrialFiles:
    trials = Trials(tmp_path_factory.mktemp("undisturbed") / "root")
    limit = f"exp_ctrl.benchmark_steps={STEPS}"
    files = trials.launch("ppo-math", "whole", f"actor.path={tiny_policy}", limit, *RUN)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


def first_long_prompt(policy: Path, batch_size: int) -> tuple[int, int, int]:
    """(seed, limit, step): a run that meets its first prompt beyond the limit in that step, a later one."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(policy)
    for seed in range(1, 100):
        prompts = MathPrompts(tokenizer=tokenizer, seed=seed, split="train", train_size=96)
        lengths = [len(prompts.prompt_tokens(i)) for i in range(len(prompts))]
        limit = max(lengths) - 1
        schedule = DataSchedule(dataset_size=96, batch_size=batch_size, seed=seed, shuffle=True)
        for step in range(1, 96 // batch_size):
            if any(lengths[point.index] > limit for point in schedule.batch(step - 1)):
                if step >= 4:
                    return seed, limit, step
                break
    raise AssertionError("no such seed")


def test_a_run_that_met_a_prompt_too_long_goes_on_with_the_command_that_it_names(
    trials: Trials, tiny_policy: Path
) -> None:
    seed, limit, step = first_long_prompt(tiny_policy, batch_size=2)
    words = (
        f"actor.path={tiny_policy}",
        *small_ppo(
            "train_bs_n_seqs=2",
            "task.train_size=96",
            "task.eval_size=0",
            "exp_ctrl.ckpt_freq_steps=1",
        ),
        f"seed={seed}",
        f"exp_ctrl.benchmark_steps={step + 4}",
    )
    reference = trials.launch("ppo-math", "whole", *words)
    files = trials.launch("ppo-math", "long", *words, f"task.max_prompt_len={limit}")
    view = trials.wait(files)
    assert view.state is State.FAILED, explain(files, view)
    assert [row["step"] for row in metrics_of(files)] == list(range(1, step))
    setting = f"task.max_prompt_len={limit + 1}"
    assert view.exit is not None
    assert view.exit.resume == f"realsys resume ppo-math/long {setting}"
    assert view.exit.resume in trials.run("status", "ppo-math/long").stdout
    resumed = trials.run("resume", "ppo-math/long", setting, "--detach")
    assert resumed.returncode == 0, resumed.stderr
    assert f"task.max_prompt_len: {limit} → {limit + 1}" in resumed.stderr
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    assert trials.wait(reference).state is State.COMPLETED
    assert metrics_of(files) == metrics_of(reference)
    assert_trained_alike(files, reference)
    told = f"task.max_prompt_len: {limit} → {limit + 1} since attempt 2"
    assert told in trials.run("status", "ppo-math/long").stdout
    assert told in trials.run("show", "ppo-math/long").stderr
    told = "task.max_prompt_len changed at attempt 2"  # by a process that outlives the attempt
    wait_until(files, lambda _: told in files.report.read_text(), timeout_s=60)


def test_a_stopped_run_refuses_what_it_can_not_change_and_goes_on_with_other_periods(
    trials: Trials, undisturbed: TrialFiles, tiny_policy: Path, tmp_path: Path
) -> None:
    limit = f"exp_ctrl.benchmark_steps={STEPS}"
    pace = Pace(tmp_path, 0.7)  # to be stopped in its middle, however slow the command
    words = (f"actor.path={tiny_policy}", limit, *RUN, *pace.words)
    files = trials.launch("ppo-math", "stopped", *words)
    trials.wait_for_step(files, 4)
    pace.set(2.0)  # nine steps before the first checkpoint by the new period
    assert trials.run("stop", name_of(files)).returncode == 0
    assert trials.wait(files).state is State.STOPPED
    pace.set(0.0)
    before = everything(files.root)
    periods = ("exp_ctrl.eval_freq_steps=5", "exp_ctrl.ckpt_freq_steps=7", "exp_ctrl.ckpt_keep=1")
    refused = trials.run(
        "resume", name_of(files), "seed=2", "algorithm.loss.eps_clip=0.3", *periods
    )
    assert refused.returncode == 4
    assert "can't be changed" in refused.stderr
    assert "algorithm.loss.eps_clip can't be" in refused.stderr
    assert everything(files.root) == before
    resumed = trials.run("resume", name_of(files), *periods, "--detach")
    assert resumed.returncode == 0, resumed.stderr
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    assert_trained_alike(files, undisturbed)
    rows = {row["step"]: row for row in metrics_of(undisturbed)}
    evaluated = [row for row in metrics_of(files) if any(k.startswith("eval/") for k in row)]
    assert {15, STEPS} <= {row["step"] for row in evaluated}  # 15: by the new period only
    assert evaluated[-1] == rows[STEPS]
    names = [p.name for p in files.phase(files.root).recover.glob("step-*")]
    assert names == ["step-000014.2"]


def test_a_completed_run_goes_on_to_a_later_end(
    trials: Trials, undisturbed: TrialFiles, tiny_policy: Path
) -> None:
    first = "exp_ctrl.benchmark_steps=8"
    files = trials.launch("ppo-math", "short", f"actor.path={tiny_policy}", first, *RUN)
    assert trials.wait(files).state is State.COMPLETED
    resumed = trials.run("resume", name_of(files), f"exp_ctrl.benchmark_steps={STEPS}", "--detach")
    assert resumed.returncode == 0, resumed.stderr
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    assert view.step == STEPS
    assert metrics_of(files) == metrics_of(undisturbed)
    assert_trained_alike(files, undisturbed)
    assert check_history(read_history(files.root)) == []
    again = trials.run("resume", name_of(files))
    assert "has completed; there" in again.stderr


def test_an_asynchronous_run_goes_on_with_other_lengths_and_limits(
    trials: Trials, tiny_policy: Path
) -> None:
    """What is kept of interfaces in a checkpoint is found again although their settings have changed."""
    files = trials.launch("ppo-math-async", "a", f"actor.path={tiny_policy}", *LONG_PPO)
    trials.wait_for_step(files, 5)
    assert trials.run("stop", name_of(files)).returncode == 0
    stopped = trials.wait(files)
    assert stopped.state is State.STOPPED, explain(files, stopped)
    words = (
        "gen.max_new_tokens=5",
        "task.max_prompt_len=64",
        "actor.max_tokens_per_mb=300",
        "schedule.max_in_flight=4",
        "schedule.max_concurrent_rollouts=3",
        "schedule.new_tokens_per_chunk=2",
        "schedule.dump_limit_gib=1",
    )
    resumed = trials.run("resume", name_of(files), *words, "--detach")
    assert resumed.returncode == 0, resumed.stderr
    trials.wait_for_step(files, stopped.step + 6)
    assert trials.run("stop", name_of(files)).returncode == 0
    view = trials.wait(files)
    assert (view.state, view.attempt) == (State.STOPPED, 2), explain(files, view)
    name = "response_length/max"
    lengths = {row["step"]: row[name] for row in read_metrics(files.root / "metrics.jsonl")[1:]}
    assert max(n for step, n in lengths.items() if step <= stopped.step) > 5
    assert lengths[view.step] <= 5
    epoch = trained_ids(files)[:96]
    assert sorted(epoch) == sorted(set(epoch))
