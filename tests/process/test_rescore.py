"""`realsys rescore`: stored answers scored by a new rule get the rewards that a run with it gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_trials import SMALL_PPO, Trials, explain, name_of

from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

RULES = """
import asyncio
from dataclasses import dataclass

from realsys.api.registry import register_reward


def letters(response: str) -> float:
    return len(set(response)) / 7


@dataclass(frozen=True, kw_only=True)
class Brief:
    tokens: int = 4

    def __call__(self, token_ids: tuple[int, ...], finish_reason: str) -> dict[str, float]:
        short = float(len(token_ids) <= self.tokens)
        return {"reward": short - 0.1, "cut": finish_reason == "length", "correct": short}


async def topical(response: str, record: dict, answer: str) -> float:
    await asyncio.sleep(0)
    return record["weight"] * len(response) + float(answer)


def together(response: list[str], prompt: list[str]) -> list[float]:
    return [len(r) / len(p) for r, p in zip(response, prompt, strict=True)]


def picky(response: str, record: dict) -> float:
    if record["weight"] > 0.25:
        raise ValueError("too heavy")
    return 1.0


register_reward("letters", letters)
register_reward("brief", Brief)
register_reward("topical", topical)
register_reward("together", together, batched=True)
register_reward("picky", picky)
"""
NEW = ("letters + 0.3*brief + 0.01*topical + -0.2*together", "task.reward_args.brief.tokens=9")
# The same answers in both runs, whatever they earn: weights that stay, and no datapoint too old.
SAME = (
    *(word for word in SMALL_PPO if not word.startswith(("task.train", "exp_ctrl.total"))),
    "task=file",
    "actor.optimizer.lr=1e-30",
    "schedule.max_staleness=0",
    "exp_ctrl.benchmark_steps=3",
)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    trials = Trials(tmp_path_factory.mktemp("rescore") / "root")
    yield trials
    trials.end_all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    rows = [{"prompt": f"{i} + 7 = ?", "answer": str(i + 7), "weight": i / 100} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "my_rules.py"
    path.write_text(RULES)
    return path


@pytest.fixture(scope="module")
def launched(trials: Trials, data: Path, rules: Path, tiny_policy: Path) -> list[TrialFiles]:
    """A trial by the old rule, and one by the new."""
    found = []
    for name, rule in (("old", ("letters",)), ("new", NEW)):
        words = (f"actor.path={tiny_policy}", f"task.path={data}", f"task.reward={rule[0]}")
        files = trials.launch(
            "grpo-math-async", name, "--import", str(rules), *words, *rule[1:], *SAME
        )
        view = trials.wait(files)
        assert view.state is State.COMPLETED, explain(files, view)
        found.append(files)
    return found


def rescore(trials: Trials, files: TrialFiles, out: Path, *words: str) -> dict[str, dict[str, Any]]:
    done = trials.run("rescore", name_of(files), *words, "--out", str(out))
    assert done.returncode == 0, done.stderr
    return {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}


def test_a_new_rule_gives_the_rewards_of_a_run_that_had_it(
    trials: Trials, launched: list[TrialFiles], rules: Path, tmp_path: Path
) -> None:
    old = launched[0]
    before = sorted((p, p.stat().st_mtime_ns) for p in old.root.rglob("*"))
    own = [rescore(trials, files, tmp_path / "own") for files in launched]
    for rows in own:  # the trial's own rule: exactly what it stored
        assert len(rows) == 24
        assert all(row["new"] == row["old"] for row in rows.values())
    words = ("--import", str(rules), "--reward", *NEW)
    changed = rescore(trials, old, tmp_path / "changed", *words)
    stored = {id_: row["old"] for id_, row in own[1].items()}
    assert {id_: row["new"] for id_, row in changed.items()} == stored
    assert len({reward for rewards in stored.values() for reward in rewards}) > 10
    assert {key for row in changed.values() for parts in row["parts"] for key in parts} == {
        "letters", "brief", "topical", "together", "brief/cut", "brief/correct",
    }  # fmt: skip
    assert sorted((p, p.stat().st_mtime_ns) for p in old.root.rglob("*")) == before


def test_the_table_the_document_and_what_gets_no_score(
    trials: Trials, launched: list[TrialFiles], tmp_path: Path
) -> None:
    name = name_of(launched[0])
    shown = trials.run("rescore", name, "--reward", "brief")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[1].split()[:7] == [
        "weights", "datapoints", "unscored", "answers", "old", "new", "correct",
    ]  # fmt: skip
    assert lines[-1].split()[:4] == ["all", "24", "0", "48"]
    nowhere = trials.run("rescore", name, "--out", str(tmp_path / "no" / "file"))
    assert (nowhere.returncode, "can't be written" in nowhere.stderr) == (4, True)
    done = trials.run("rescore", name, "--reward", "picky", "--json")
    assert "too heavy" in done.stderr
    found = json.loads(done.stdout)["weights"]["all"]
    assert found["new"] == found["correct"] == 1.0
    assert found["datapoints"] == 24
    assert 0 < found["unscored"] < 24
    assert found["answers"] == 2 * (24 - found["unscored"])


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--reward", "nothing_such"), "nothing_such"),
        (("--reward", "letters", "task.reward_args.brief.tokens=2"), "brief"),
        (("--reward", "brief", "task.reward_args.brief.token=2"), "token"),
        (("--reward", "letters", "seed=2"), "no argument of a rule"),
    ],
)
def test_a_wrong_rule_is_refused(
    trials: Trials, launched: list[TrialFiles], words: tuple[str, ...], what: str
) -> None:
    done = trials.run("rescore", name_of(launched[0]), *words)
    assert done.returncode == 4
    assert what in done.stderr


def test_other_records_than_the_trials_are_refused(
    trials: Trials, launched: list[TrialFiles], data: Path
) -> None:
    text = data.read_text()
    data.write_text(text.replace(" + 7", " - 7"))
    try:
        done = trials.run("rescore", name_of(launched[0]))
    finally:
        data.write_text(text)
    assert done.returncode != 0
    assert "answer has changed" in done.stderr
