"""``schedule.success_range`` in synchronous runs: full batches, exactly once, the same over kills."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from paced import Pace
from real_trials import (
    Trials,
    explain,
    kill_everything,
    metrics_of,
    trained_ids,
    wait_until,
    weights_of,
)

from realsys.master.graph.data_schedule import DataSchedule
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SIZE, BATCH, GROUP, STEPS, SEED = 40, 8, 2, 10, 1
STEP_S = 0.7
RULE = """
from zlib import crc32
from realsys.api.registry import register_reward

register_reward("coin", lambda response: float(crc32(response.encode()) & 1), trusted=True)
"""
PART = "dynamic_sampling/"


@pytest.fixture(scope="module")
def rule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rule that half of all answers please: half of the questions with two answers are in range."""
    file = tmp_path_factory.mktemp("rule") / "coin_rule.py"
    file.write_text(RULE)
    return file


def launch(
    trials: Trials,
    rule: Path,
    policy: Path,
    name: str,
    *words: str,
    pace: Pace | None = None,
    ckpt_freq_steps: int = 2,
    experiment: str = "grpo-math",
) -> TrialFiles:
    paced = (pace or Pace(rule.parent, 0.0)).words[:2]
    return trials.launch(
        experiment, name, f"actor.path={policy}", "--import", str(rule), *paced,
        "task.reward=coin + 0*paced",
        f"task.train_size={SIZE}", "task.eval_size=8", f"train_bs_n_seqs={BATCH}", f"seed={SEED}",
        f"group_size={GROUP}", "gen.max_new_tokens=6", "exp_ctrl.total_train_epochs=2",
        f"exp_ctrl.ckpt_freq_steps={ckpt_freq_steps}", "exp_ctrl.ckpt_freq_secs=none",
        "exp_ctrl.eval_freq_steps=4",
        "scheduling.model_worker.cpu=1", "schedule.success_range=0.01,0.99", *words,
    )  # fmt: skip


def completed(trials: Trials, files: TrialFiles) -> TrialFiles:
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


@pytest.fixture(scope="module")
def whole(module_trials: Trials, rule: Path, tiny_policy: Path) -> TrialFiles:
    """An undisturbed run."""
    return completed(module_trials, launch(module_trials, rule, tiny_policy, "whole"))


def ledger(files: TrialFiles) -> list[dict[str, list[str]]]:
    lines = files.phase(files.root).ledger.read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_each_step_trains_a_full_batch_and_the_ledger_adds_up(whole: TrialFiles) -> None:
    """Trained and filtered questions are the queue from its front, each once."""
    rows, metrics = ledger(whole), [row for row in metrics_of(whole) if row["step"]]
    assert [len(row["ids"]) for row in rows] == [BATCH] * STEPS
    consumed = Counter(name for row in rows for name in (*row["ids"], *row["filtered"]))
    order = DataSchedule(dataset_size=SIZE, batch_size=BATCH, seed=SEED, shuffle=True)
    assert consumed == Counter(order.at(i).id for i in range(consumed.total()))
    assert consumed.total() > 2 * SIZE, "it did not go on into a third epoch"
    for row, found in zip(rows, metrics, strict=True):
        numbers = {k.removeprefix(PART): float(str(v)) for k, v in found.items() if PART in k}
        filtered = numbers["filtered_low"] + numbers["filtered_high"]
        assert filtered == len(row["filtered"])
        assert numbers["asked"] == BATCH + filtered + numbers["returned"]
        assert BATCH <= numbers["kept"] <= BATCH + numbers["returned"]
        assert 0.0 < numbers["reward"] < 1.0
        assert found["critic/score/mean"] == 0.5, "one of two answers to each is right"
    assert sum(float(str(row[f"{PART}rounds"])) for row in metrics) > STEPS


def assert_same_run(files: TrialFiles, reference: TrialFiles) -> None:
    assert ledger(files) == ledger(reference)
    assert metrics_of(files) == metrics_of(reference)
    assert weights_of(files, "actor") == weights_of(reference, "actor")


def test_kills_and_resumes_change_nothing(
    module_trials: Trials, whole: TrialFiles, rule: Path, tiny_policy: Path, tmp_path: Path
) -> None:
    pace = Pace(tmp_path, STEP_S, sequences=2 * BATCH * GROUP)
    files = launch(module_trials, rule, tiny_policy, "killed", pace=pace)
    for step in (3, 6):
        module_trials.wait_for_step(files, step)
        kill_everything(files)
        view = wait_until(files, lambda v: v.state not in State.live(), timeout_s=60)
        assert view.state is State.LOST
        module_trials.resume(files)
    pace.set(0.0)
    completed(module_trials, files)
    assert_same_run(files, whole)


@pytest.mark.parametrize(
    "words",
    [
        ("actor.parallel=d2t1p1", "ref.parallel=d2t1p1"),
        ("placement=split", "placement.n_model_workers=2"),
    ],
    ids=["two ranks", "split"],
)
def test_another_layout_trains_on_the_same_questions(
    module_trials: Trials, whole: TrialFiles, rule: Path, tiny_policy: Path, words: tuple[str, ...]
) -> None:
    name = words[0].partition("=")[0].replace(".", "-")
    files = completed(module_trials, launch(module_trials, rule, tiny_policy, name, *words))
    assert ledger(files)[0] == ledger(whole)[0]
    assert [len(row["ids"]) for row in ledger(files)] == [BATCH] * STEPS
    if "split" in words[0]:  # one rank each: the very same sums
        assert trained_ids(files) == trained_ids(whole)
        assert weights_of(files, "actor") == weights_of(whole, "actor")


def test_a_critic_on_other_workers_sees_only_what_was_kept(
    module_trials: Trials, rule: Path, tiny_policy: Path
) -> None:
    words = ("placement=split", "placement.n_model_workers=2")
    launched = launch(module_trials, rule, tiny_policy, "critic", *words, experiment="ppo-math")
    files = completed(module_trials, launched)
    assert [len(row["ids"]) for row in ledger(files)] == [BATCH] * STEPS
    assert {row["critic/score/mean"] for row in metrics_of(files) if row["step"]} == {0.5}


def test_staleness_0_is_the_synchronous_run_bit_for_bit(
    module_trials: Trials, whole: TrialFiles, rule: Path, tiny_policy: Path
) -> None:
    """Servers are asked for one question at a time, model workers for rounds: it makes no difference."""
    words = ("schedule=async", "schedule.max_staleness=0")
    files = completed(module_trials, launch(module_trials, rule, tiny_policy, "async", *words))
    assert trained_ids(files) == trained_ids(whole)
    assert weights_of(files, "actor") == weights_of(whole, "actor")


def test_a_batch_that_does_not_fill_ends_the_run_which_goes_on_with_more_questions(
    module_trials: Trials, rule: Path, whole: TrialFiles, tiny_policy: Path
) -> None:
    words = ("schedule.max_gen_batches=2",)
    files = launch(module_trials, rule, tiny_policy, "short", *words, ckpt_freq_steps=100)
    view = module_trials.wait(files)
    assert view.state is State.FAILED
    said = explain(files, view)
    assert "asked 16 questions" in said
    assert "schedule.max_gen_batches=4" in said
    (checkpoint,) = files.phase(files.root).recover.glob("step-*")
    assert checkpoint.name == f"step-{view.step:06d}.1", "of the last step that is complete"
    resumed = module_trials.run("resume", "grpo-math/short", "schedule.max_gen_batches=20")
    assert resumed.returncode == 0, resumed.stderr
    completed(module_trials, files)
    assert_same_run(files, whole)
