"""Questions and episodes of a trial, found by id and shown as lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden
import pytest

from launcher.trials.rollout_samples import (
    RolloutSample,
    find_samples,
    rollout_samples,
    sample_lines,
)
from realsys.api.errors import TrialError
from realsys.trial.records import TrialFiles

PIECES = [{"by": "context", "text": "What is\n1+1?"}, {"by": "policy", "text": "\x1b[31m2"}]
AGENTS = {
    "prompt": "",
    "episodes": [
        {
            "reward": 1.0,
            "numbers": {"calls": 2.0},
            "answers": [
                {"id": "a", "messages": 2, "prompt_tokens": 9, "tokens": 3, "calls": ["add"]},
                {"id": "b", "continues": 0, "messages": 4, "prompt_tokens": 15, "reward": 0.5},
            ],
            "sequences": [{"reward": 1.0, "pieces": PIECES}],
        },
        {
            "reward": 0.0,
            "problem": "it ended with status 1",
            "answers": [{"id": "c", "role": "critic", "stopped": False, "read": False}],
            "sequences": [
                {"reward": 0.0, "role": "critic", "pieces": PIECES, "truncated": True},
                {"reward": 0.0, "role": "solver", "pieces": PIECES[:1]},
            ],
        },
    ],
}
OLD = {"prompt": "1+1?", "answers": ["2", "3"]}  # as trials of before have it


def line(id_: str, tries: int = 0, **more: Any) -> dict[str, Any]:
    row = {"id": id_, "tries": tries, "outcome": "kept", "seconds": 1.5, "oldest": 3, "newest": 4}
    return {**row, "rewards": [1.0, 0.0], **more}


@pytest.fixture
def files(tmp_path: Path) -> TrialFiles:
    found = TrialFiles(tmp_path)
    of_attempts = {
        1: {0: [line("0-4", texts=OLD)], 1: [line("0-46", outcome="failed", why="no answer")]},
        2: {0: [line("0-46", tries=1, texts=AGENTS), line("0-7")], 1: [line("1-46")]},
    }
    for attempt, workers in of_attempts.items():
        (found.attempts / f"{attempt:04d}").mkdir(parents=True)
        folder = TrialFiles.phase(tmp_path).rows_of(attempt).rollouts
        folder.mkdir(parents=True)
        for index, rows in workers.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{index}.jsonl").write_text(text + '{"id": "0-46", "rewa')
    agents = TrialFiles.phase(tmp_path).rows_of(2).root / "agents/0"
    agents.mkdir(parents=True)
    for name in ("0-46.1-1", "0-46.1-1-try2", "0-46.1-12", "0-46-0", "0-46.1-x"):
        (agents / f"{name}.log").touch()
    return found


def test_a_question_is_found_with_all_its_grants_an_episode_by_its_number(
    files: TrialFiles,
) -> None:
    both, index = find_samples(files, "0-46")
    assert [(s.id, s.attempt, s.worker) for s in both] == [
        ("0-46", 1, "rollout_worker/1"),
        ("0-46.1", 2, "rollout_worker/0"),
    ]
    assert index is None
    for name in ("0-46.1-1", "0-46.1-1-try2"):
        (one,), index = find_samples(files, name)
        assert (one.id, index) == ("0-46.1", 1)
    names = {number: Path(log).name for number, log in one.logs.items()}
    assert names == {1: "0-46.1-1-try2.log", 12: "0-46.1-12.log"}
    assert len(list(rollout_samples(files))) == 5


@pytest.mark.parametrize("name", ["0-5", "46", "../0-46", "0-46.2", ""])
def test_a_question_that_nobody_wrote_about_is_refused(files: TrialFiles, name: str) -> None:
    with pytest.raises(TrialError) as caught:
        find_samples(files, name)
    assert caught.value.where == str(files.root)


def test_an_episode_is_shown_with_requests_branches_and_texts(files: TrialFiles) -> None:
    (sample,), _ = find_samples(files, "0-46.1-0")
    golden.check("\n".join(sample_lines(sample)))
    golden.check("\n".join(sample_lines(sample, index=1)))


def test_a_trial_of_before_is_shown(files: TrialFiles) -> None:
    (sample,), _ = find_samples(files, "0-4")
    golden.check("\n".join(sample_lines(sample)))


def test_texts_of_before_that_are_more_than_the_rewards_are_told_without_them(
    files: TrialFiles,
) -> None:
    branches = {"prompt": "", "answers": ["a", "b", "c"]}
    row = line("0-4", texts=branches)
    sample = RolloutSample(attempt=1, worker="rollout_worker/0", row=row, logs={})
    (group,) = sample.episodes
    texts = [one["pieces"][0]["text"] for one in group["sequences"]]
    assert (texts, group["reward"]) == (["a", "b", "c"], None)
    golden.check("\n".join(sample_lines(sample, index=1)))


def test_an_episode_that_a_question_does_not_have_is_refused(files: TrialFiles) -> None:
    with golden.raises(TrialError):
        find_samples(files, "0-46-2")


def test_what_a_question_begins_with_is_the_prompt_or_the_first_text_of_others(
    files: TrialFiles,
) -> None:
    begins = {sample.id: sample.begins for sample in rollout_samples(files)}
    assert begins["0-4"] == "1+1?"
    assert begins["0-46.1"] == PIECES[0]["text"]
    assert begins["0-7"] == ""


def test_a_question_without_texts_says_which_setting_keeps_them(files: TrialFiles) -> None:
    (sample,), _ = find_samples(files, "0-7")
    assert not sample.episodes
    golden.check("\n".join(sample_lines(sample)))
