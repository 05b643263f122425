"""``task.curriculum=learnability``: sources come exactly as the formula says, over kills and schedules."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import pytest
from paced import Pace
from real_trials import (
    Trials,
    explain,
    kill_everything,
    metrics_of,
    name_of,
    trained_ids,
    wait_until,
    weights_of,
)

from realsys.data.sources.record_parts import place
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SIZES = {"coin": 24, "right": 5, "wrong": 7}  # in the order of the data set
WEIGHTS = {"coin": 1, "right": 1, "wrong": 2}
FLOOR, NEWEST = Fraction(1, 10), 3
EPOCHS, BATCH, GROUP = 4, 8, 4
STEPS = EPOCHS * sum(SIZES.values()) // BATCH
STEP_S = 0.7
RULES = """
from zlib import crc32
from realsys.api.registry import register_reward

register_reward("right", lambda response: 1.0, trusted=True)
register_reward("wrong", lambda response: 0.0, trusted=True)
register_reward("coin", lambda response: float(crc32(response.encode()) & 1), trusted=True)
"""
ONE_SIDED = ("rollout/", "rew_inf/", "staleness/", "mismatch/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> Path:
    """Rules, a file for each source, and a policy."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "rules.py").write_text(RULES)
    (folder / "MODEL").symlink_to(tiny_policy)
    for name, size in SIZES.items():
        rows = [{"prompt": f"{name} {i}", "answer": "1"} for i in range(size)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def launch(trials: Trials, folder: Path, name: str, pace: Pace, *words: str) -> TrialFiles:
    """A run on the three sources, whose rule for ``coin`` also takes its time."""
    rules = {**{source: source for source in SIZES}, "coin": "coin + 0*paced"}
    return trials.launch(
        "grpo-math", name, f"actor.path={folder / 'MODEL'}", "task=mixture",
        *(f"task.sources.{source}=file" for source in SIZES),
        *(f"task.sources.{source}.path={folder / source}.jsonl" for source in SIZES),
        *(f"task.sources.{source}.reward={rule}" for source, rule in rules.items()),
        *(f"task.sources.{source}.eval_size=0" for source in SIZES),
        *(f"task.weights.{source}={weight}" for source, weight in WEIGHTS.items()),
        "task.curriculum=learnability", f"task.curriculum_steps={NEWEST}",
        "--import", str(folder / "rules.py"), *pace.words[:2],
        f"train_bs_n_seqs={BATCH}", f"group_size={GROUP}", "gen.max_new_tokens=6",
        f"exp_ctrl.total_train_epochs={EPOCHS}", "exp_ctrl.ckpt_freq_steps=2",
        "exp_ctrl.ckpt_freq_secs=none", "scheduling.model_worker.cpu=1", *words,
    )  # fmt: skip


def run_to_the_end(trials: Trials, folder: Path, name: str, *words: str) -> TrialFiles:
    files = launch(trials, folder, name, Pace(folder, 0.0), *words)
    return completed(trials, files)


def run_with_kills(
    trials: Trials, folder: Path, name: str, pace: Pace, *words: str, after: Iterable[int]
) -> TrialFiles:
    """Killed as by a power cut after each of these steps, and resumed."""
    files = launch(trials, folder, name, pace, *words)
    for step in after:
        trials.wait_for_step(files, step)
        kill_everything(files)
        view = wait_until(files, lambda v: v.state not in State.live(), timeout_s=60)
        assert view.state is State.LOST
        trials.resume(files)
    pace.set(0.0)
    return completed(trials, files)


def completed(trials: Trials, files: TrialFiles) -> TrialFiles:
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


def rows_of(files: TrialFiles) -> list[dict[str, float]]:
    rows = [{k: float(str(v)) for k, v in row.items()} for row in metrics_of(files)]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return rows


def records_of(files: TrialFiles) -> dict[str, list[tuple[int, int]]]:
    """Epoch and record of what was trained of each source, in order."""
    found = defaultdict(list)
    for id_ in trained_ids(files):
        epoch, _, index = id_.partition("-")
        name, number = place(SIZES, int(index))
        found[name].append((int(epoch), number))
    return found


def assert_every_record_once_a_source_epoch(files: TrialFiles) -> None:
    for name, trained in records_of(files).items():
        size = SIZES[name]
        assert [epoch for epoch, _ in trained] == [k // size for k in range(len(trained))]
        for epoch in range(len(trained) // size):
            numbers = [number for at, number in trained if at == epoch]
            assert sorted(numbers) == list(range(size)), (name, epoch)
        assert len(set(trained)) == len(trained)
    assert len(trained_ids(files)) == STEPS * BATCH
    assert len(records_of(files)["coin"]) > 3 * SIZES["coin"], "no second epoch was reached"


def rates_before(rows: list[dict[str, float]], step: int, lag: int) -> dict[str, Fraction]:
    """Success rates by the formula, from what the metrics say of the answers."""
    found = {}
    for name in SIZES:
        seen = [
            (row[f"rew_inf/reward/{name}/correct"], row[f"rew_inf/reward/{name}/share"])
            for row in rows[: max(0, step - 1 - lag)]
            if row[f"rew_inf/reward/{name}/share"] > 0
        ][-NEWEST:]
        asked = [round(share * BATCH * GROUP) for _, share in seen]
        right = [round(mean * num) for (mean, _), num in zip(seen, asked, strict=True)]
        found[name] = Fraction(sum(right), sum(asked)) if asked else Fraction(1, 2)
    return found


def assert_sources_come_as_the_formula_says(files: TrialFiles, lag: int) -> None:
    """Who is owed most is next: the numbers of each step, worked out anew from the metrics alone."""
    rows, ids = rows_of(files), trained_ids(files)
    owed = dict.fromkeys(SIZES, 0)
    for step, row in enumerate(rows, 1):
        rates = rates_before(rows, step, lag)
        factors = {n: WEIGHTS[n] * max(FLOOR, 4 * p * (1 - p)) for n, p in rates.items()}
        due = {n: round(10**6 * f / sum(factors.values())) for n, f in factors.items()}
        order = []
        for _ in range(BATCH):
            owed = {name: owed[name] + due[name] for name in SIZES}
            order.append(max(SIZES, key=lambda name: owed[name]))
            owed[order[-1]] -= sum(due.values())
        own = ids[(step - 1) * BATCH : step * BATCH]
        assert [place(SIZES, int(i.partition("-")[2]))[0] for i in own] == order, step
        for name, rate in rates.items():
            assert row[f"curriculum/success/{name}"] == pytest.approx(float(rate), abs=1e-12)
            assert row[f"curriculum/share/{name}"] == order.count(name) / BATCH
            assert row[f"rew_inf/reward/{name}/share"] == pytest.approx(order.count(name) / BATCH)


@pytest.fixture(scope="module")
def synchronous(module_trials: Trials, folder: Path) -> TrialFiles:
    return run_to_the_end(module_trials, folder, "sync")


def test_what_is_half_right_comes_most_exactly_as_often_as_the_formula_says(
    synchronous: TrialFiles,
) -> None:
    assert_sources_come_as_the_formula_says(synchronous, lag=0)
    assert_every_record_once_a_source_epoch(synchronous)
    rows = rows_of(synchronous)
    assert [rows[0][f"curriculum/share/{name}"] for name in SIZES] == [2 / 8, 2 / 8, 4 / 8]
    last = rows[-1]
    assert (last["curriculum/success/right"], last["curriculum/success/wrong"]) == (1.0, 0.0)
    assert 0.2 < last["curriculum/success/coin"] < 0.8
    late = [row["curriculum/share/coin"] for row in rows[4:]]
    assert sum(late) / len(late) > 0.65, "by the formula 1 / (1 + 0.1 + 0.2) where it is half right"
    assert all(sum(row[f"curriculum/share/{name}"] for row in rows[4:]) for name in SIZES)


def test_kills_and_resumes_change_nothing(
    module_trials: Trials, synchronous: TrialFiles, folder: Path, tmp_path: Path
) -> None:
    pace = Pace(tmp_path, STEP_S, sequences=BATCH * GROUP)
    files = run_with_kills(module_trials, folder, "killed", pace, after=(3, 7))
    assert trained_ids(files) == trained_ids(synchronous)
    assert metrics_of(files) == metrics_of(synchronous)
    assert weights_of(files, "actor") == weights_of(synchronous, "actor")


def test_with_dynamic_sampling_filtered_answers_count_and_kills_change_nothing(
    module_trials: Trials, folder: Path, tmp_path: Path
) -> None:
    """Only ``coin`` is ever in range; records that were given back are asked again, not drawn again."""
    words = ("schedule.success_range=0.01,0.99", "schedule.max_gen_batches=50")
    whole = run_to_the_end(module_trials, folder, "filtered", *words)
    assert {name for name, trained in records_of(whole).items() if trained} == {"coin"}
    last = rows_of(whole)[-1]
    assert (last["curriculum/success/right"], last["curriculum/success/wrong"]) == (1.0, 0.0)
    pace = Pace(tmp_path, STEP_S, sequences=2 * BATCH * GROUP)
    killed = run_with_kills(module_trials, folder, "filtered-killed", pace, *words, after=(3, 7))
    assert trained_ids(killed) == trained_ids(whole)
    assert metrics_of(killed) == metrics_of(whole)
    assert weights_of(killed, "actor") == weights_of(whole, "actor")


def test_one_step_off_goes_by_what_is_trained_when_a_step_is_loaded(
    module_trials: Trials, folder: Path, tmp_path: Path
) -> None:
    """Checkpoints hold a step that was loaded ahead, and its records are not drawn again."""
    words = ("schedule=one_step_off",)
    whole = run_to_the_end(module_trials, folder, "off", *words)
    assert_sources_come_as_the_formula_says(whole, lag=1)
    assert_every_record_once_a_source_epoch(whole)
    pace = Pace(tmp_path, STEP_S, sequences=BATCH * GROUP)
    killed = run_with_kills(module_trials, folder, "off-killed", pace, *words, after=(5,))
    assert trained_ids(killed) == trained_ids(whole)
    assert metrics_of(killed) == metrics_of(whole)
    assert weights_of(killed, "actor") == weights_of(whole, "actor")


def comparable(files: TrialFiles) -> list[Mapping[str, object]]:
    """The metrics that both ways of answering have."""
    return [
        {k: v for k, v in row.items() if not any(part in k for part in ONE_SIDED)}
        for row in metrics_of(files)
    ]


def test_staleness_0_is_the_synchronous_run_bit_for_bit(
    module_trials: Trials, synchronous: TrialFiles, folder: Path
) -> None:
    words = ("schedule=async", "schedule.max_staleness=0", "schedule.workers=2")
    files = run_to_the_end(module_trials, folder, "async", *words)
    assert trained_ids(files) == trained_ids(synchronous)
    assert comparable(files) == comparable(synchronous)
    assert weights_of(files, "actor") == weights_of(synchronous, "actor")


def test_an_asynchronous_run_that_was_killed_trains_every_record_once_and_is_replayed(
    module_trials: Trials, folder: Path, tmp_path: Path
) -> None:
    words = ("schedule=async", "schedule.max_staleness=2", "schedule.workers=2")
    pace = Pace(tmp_path, STEP_S, sequences=BATCH * GROUP)
    files = run_with_kills(module_trials, folder, "ahead", pace, *words, after=(4, 9))
    assert_every_record_once_a_source_epoch(files)
    rows = rows_of(files)
    assert {row[f"curriculum/success/{name}"] for row in rows[:3] for name in SIZES} == {0.5}
    assert rows[-1]["curriculum/share/coin"] > 0.5
    replayed = module_trials.run("replay", name_of(files), "--trial", "again", timeout_s=240)
    assert replayed.returncode == 0, replayed.stderr
