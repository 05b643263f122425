"""What stored datapoints can't be rescored: answers of several turns, and records that are others now."""

from __future__ import annotations

import json
from pathlib import Path

import golden
import pytest

from realsys.api.agent import Episode, Trajectory
from realsys.api.errors import DataError
from realsys.api.model import DatasetAbstraction
from realsys.api.worker_configs import RolloutWorker
from realsys.data.rollout_dump import DumpWriter
from realsys.evaluator.rescore import StoredRollouts
from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.models.hf import load_tokenizer
from realsys.rollout.worker.trajectories import episodes_sample

QUESTION = "1 + 2 = ?"


@pytest.fixture
def config(tmp_path: Path) -> RolloutWorker:
    build_tiny_llama(
        tmp_path / "m", seed=1, corpus=[QUESTION], hidden_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, vocab_size=261,
    )  # fmt: skip
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"prompt": QUESTION, "answer": "3"}) + "\n")
    args = {"path": str(path), "eval_size": 0, "split": "train", "max_prompt_len": 64}
    data = DatasetAbstraction("math_prompts", args)
    return RolloutWorker(tokenizer_path=str(tmp_path / "m"), datasets=(data,))


def stored(
    config: RolloutWorker, folder: Path, id_: str, pieces: list[tuple[str, bool]]
) -> StoredRollouts:
    """One answer in pieces, each with whether the policy wrote it; rescored by math_verify."""
    tokenizer = load_tokenizer(config.tokenizer_path)
    rows = [(tokenizer(text, add_special_tokens=False).input_ids, mine) for text, mine in pieces]
    mine = tuple(flag for ids, flag in rows for _ in ids)
    trajectory = Trajectory(
        tokens=tuple(token for ids, _ in rows for token in ids),
        from_policy=mine,
        logprobs=(0.0,) * len(mine),
        versions=tuple(4 if flag else -1 for flag in mine),
        reward=0.5,
        truncated=False,
    )
    with DumpWriter(folder / "0.rollouts") as dump:
        episode = Episode(sequences=(trajectory,), reward=0.5)
        dump.append(episodes_sample(id_, [episode], metadata={"answer": "3"}))
    return StoredRollouts(config, folder, "math_verify", {})


def prompt(config: RolloutWorker) -> str:
    """The text of the question as the data set shows it to the policy."""
    from realsys.api import registry

    tokenizer = load_tokenizer(config.tokenizer_path)
    data = registry.make_dataset(config.datasets[0], tokenizer=tokenizer, seed=1)
    return str(tokenizer.decode(data.prompt_tokens(0)))


def test_an_answer_is_scored_with_the_record_of_its_id(
    config: RolloutWorker, tmp_path: Path
) -> None:
    found = stored(config, tmp_path / "d", "7-0.2", [(prompt(config), False), ("is 3", True)])
    assert len(found) == 1
    (datapoint,) = found
    assert (datapoint.id, datapoint.version, datapoint.old) == ("7-0.2", 4, (0.5,))
    assert (datapoint.new, datapoint.correct) == ((1.0,), (True,))


def test_the_rule_is_told_the_question_whatever_the_trials_own_rule_was(
    config: RolloutWorker, tmp_path: Path
) -> None:
    (repeats,) = stored(config, tmp_path / "d", "1-0", [(prompt(config), False), ("$1+2$", True)])
    (made,) = stored(config, tmp_path / "e", "1-0", [(prompt(config), False), ("$3^1$", True)])
    (worked,) = stored(config, tmp_path / "f", "1-0", [(prompt(config), False), ("$3!/2$", True)])
    assert (repeats.new, made.new, worked.new) == ((0.0,), (0.0,), (1.0,))


@pytest.mark.parametrize(
    ("id_", "question", "more"),
    [
        ("1-0", "", [("again", False), ("3", True)]),
        ("1-0", "another", []),
        ("1-1", "", []),
        ("mine", "", []),
    ],
)
def test_what_can_not_be_rescored_is_an_error_that_names_the_datapoint(
    config: RolloutWorker,
    tmp_path: Path,
    id_: str,
    question: str,
    more: list[tuple[str, bool]],
) -> None:
    asked = question or prompt(config)
    found = stored(config, tmp_path / "d", id_, [(asked, False), ("is 3", True), *more])
    with golden.raises(DataError) as caught:
        list(found)
    assert id_ in caught.value.where
