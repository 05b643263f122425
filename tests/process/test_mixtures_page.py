"""The user story of docs/mixtures.md, as written, on both schedules; exactly once per source over kills."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from doc_pages import DocPage, in_folder
from near import near
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

from realsys.data.sources.record_parts import items_of_epoch, place
from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

PAGE = DocPage("mixtures.md")
SIZES, HELD_OUT = {"sums": 24, "words": 5, "stories": 12}, {"sums": 4, "words": 6, "stories": 8}
WEIGHTS = {"sums": 2.0, "words": 1.0, "stories": 1.0}  # of the page
ITEMS = {"sums": 24, "words": 12, "stories": 12}
EPOCHS, BATCH = 2, 8
STEPS = EPOCHS * sum(ITEMS.values()) // BATCH
STEP_S = 0.7
SMALL = (
    "scheduling.model_worker.cpu=1",
    *(f"task.sources.{name}.eval_size={size}" for name, size in HELD_OUT.items()),
    "task.sources.stories.train_size=12",
    f"train_bs_n_seqs={BATCH}",
    "group_size=2",
    "gen.max_new_tokens=6",
    f"exp_ctrl.total_train_epochs={EPOCHS}",
    "exp_ctrl.ckpt_freq_steps=2",
    "exp_ctrl.ckpt_freq_secs=none",
    "exp_ctrl.eval_freq_steps=4",
)
PARTS = {
    *(f"{name}{part}" for name in SIZES for part in ("", "/correct", "/share")),
    *("sums/math_verify", "sums/brief"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, its data in larger numbers, and a model."""
    folder = tmp_path_factory.mktemp("data")
    PAGE.write_code(folder, "mixed.py")
    sums, words = map(json.loads, PAGE.blocks("json"))
    assert set(sums) == {"prompt", "answer"}
    assert words["meta"] == {"solution": "bac"}
    rows = [{"prompt": f"{i} + {i} = ", "answer": str(2 * i)} for i in range(28)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [a + b for a in "abc" for b in "defg"][:11]
    rows = [{"problem": f"Backwards: {w}", "meta": {"solution": w[::-1]}} for w in asked]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_tiny_llama(
        folder / "MODEL", seed=1, corpus=[f"{row}" for row in rows], hidden_size=32, num_layers=1,
        num_heads=2, num_kv_heads=1, vocab_size=300,
    )  # fmt: skip
    return folder


def launches(folder: Path) -> list[list[str]]:
    """Words of the page's launches, with the files of ``folder``."""
    return [in_folder(folder, words) for words in PAGE.commands("launch", "grpo-mixed")]


def assert_each_record_as_often_as_its_weight_says(files: TrialFiles) -> None:
    """By the ledger: what was trained, each item of each epoch as the record that it stands for."""
    assert items_of_epoch(SIZES, WEIGHTS) == ITEMS
    trained: Counter[tuple[str, str, int]] = Counter()
    for id_ in trained_ids(files):
        epoch, _, index = id_.partition("-")
        name, number = place(ITEMS, int(index))
        trained[epoch, name, number % SIZES[name]] += 1
    expected = Counter(
        {
            (str(epoch), name, record): ITEMS[name] // size + (record < ITEMS[name] % size)
            for epoch in range(EPOCHS)
            for name, size in SIZES.items()
            for record in range(size)
        }
    )
    assert trained == expected


@pytest.fixture(scope="module")
def undisturbed(module_trials: Trials, folder: Path) -> TrialFiles:
    """The page's synchronous run, with a rule that can be slowed down (as the disturbed one has)."""
    (experiment, *words), _ = launches(folder)
    pace = Pace(folder, 0.0, sequences=8).words
    files = module_trials.launch(experiment, "whole", *words, *SMALL, *slowed(pace))
    view = module_trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


def slowed(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.replace("task.reward=", "task.sources.stories.reward=") for word in words)


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_the_page_runs_as_written(module_trials: Trials, folder: Path, schedule: str) -> None:
    found = dict(zip(("sync", "async"), launches(folder), strict=True))
    experiment, *words = found[schedule]
    files = module_trials.launch(experiment, schedule, *words, *SMALL)
    view = module_trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    assert_each_record_as_often_as_its_weight_says(files)
    where = "rew_inf/reward/" if schedule == "sync" else "rollout/reward/"
    rows = [row for row in metrics_of(files) if "critic/score/mean" in row]
    assert len(rows) == STEPS
    told = [
        {k.removeprefix(where): float(str(v)) for k, v in row.items() if where in k} for row in rows
    ]
    assert set().union(*told) == PARTS
    shares: Counter[str] = Counter()
    for row in told:
        own = {name: row[f"{name}/share"] for name in SIZES}
        assert sum(own.values()) == pytest.approx(1.0)
        assert {name for name in SIZES if name in row} == {n for n, share in own.items() if share}
        shares.update({name: round(share * BATCH) for name, share in own.items()})
    if schedule == "sync":  # the numbers of a step's answers, over the run
        assert shares == Counter({name: EPOCHS * num for name, num in ITEMS.items()})
        for row, parts in zip(rows, told, strict=True):
            mean = sum(parts[name] * parts[f"{name}/share"] for name in SIZES if name in parts)
            assert row["critic/score/mean"] == near(mean)
    (last,) = [row for row in metrics_of(files) if "eval/accuracy" in row][-1:]
    assert {name: last[f"eval/num_problems/{name}"] for name in SIZES} == HELD_OUT
    right = sum(float(str(last[f"eval/accuracy/{name}"])) * HELD_OUT[name] for name in SIZES)
    assert right == pytest.approx(float(str(last["eval/accuracy"])) * sum(HELD_OUT.values()))


def test_kills_and_resumes_train_each_record_of_each_source_as_often(
    module_trials: Trials, undisturbed: TrialFiles, folder: Path, tmp_path: Path
) -> None:
    """Killed twice after steps without a checkpoint, resumed twice: as the run nobody disturbed."""
    (experiment, *words), _ = launches(folder)
    pace = Pace(tmp_path, STEP_S, sequences=4)
    files = module_trials.launch(experiment, "killed", *words, *SMALL, *slowed(pace.words))
    for step in (3, 7):
        module_trials.wait_for_step(files, step)
        kill_everything(files)
        view = wait_until(files, lambda v: v.state not in State.live(), timeout_s=60)
        assert view.state is State.LOST
        if step == 7:
            pace.set(0.0)
        module_trials.resume(files)
    view = module_trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    assert_each_record_as_often_as_its_weight_says(files)
    assert trained_ids(files) == trained_ids(undisturbed)
    assert metrics_of(files) == metrics_of(undisturbed)
    assert weights_of(files, "actor") == weights_of(undisturbed, "actor")


def test_an_asynchronous_run_that_was_killed_trains_each_record_as_often(
    module_trials: Trials, folder: Path, tmp_path: Path
) -> None:
    _, (experiment, *words) = launches(folder)
    pace = Pace(tmp_path, STEP_S, sequences=4)
    files = module_trials.launch(experiment, "killed-async", *words, *SMALL, *slowed(pace.words))
    module_trials.wait_for_step(files, 5)
    kill_everything(files)
    view = wait_until(files, lambda v: v.state not in State.live(), timeout_s=60)
    assert view.state is State.LOST
    pace.set(0.0)
    module_trials.resume(files)
    view = module_trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    assert_each_record_as_often_as_its_weight_says(files)
