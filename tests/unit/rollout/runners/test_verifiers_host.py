"""The program that runs rollouts of environments: its values, without verifiers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import golden
import pytest

from realsys.api.agent import DoubtfulEnd
from realsys.api.errors import RolloutError
from realsys.rollout.runners.export_verifiers import launch_command
from realsys.rollout.runners.hosted_agent import returned_outcome
from realsys.rollout.runners.hosts.function_host import usable
from realsys.rollout.runners.hosts.verifiers_host import export, messages_text, result_of, row_of


class Rows:
    """An environment of these rows."""

    def __init__(self, **splits: list[tuple[dict[str, Any], str, Any]]) -> None:
        self._splits = splits

    def rows(self, split: str) -> Iterator[tuple[dict[str, Any], str, Any]]:
        yield from self._splits.get(split, [])

    async def play(self, order: Any) -> dict[str, float]:
        raise AssertionError(order)

    async def close(self) -> None: ...


def test_a_result_is_a_reward_with_figures() -> None:
    given = {"calls": 2, "reward": 5, "answer": 1, "bad": float("nan"), "text": "x", "none": None}
    made = result_of(0.5, given, cut=True)
    assert made == {"calls": 2.0, "reward_": 5.0, "answer_": 1.0, "truncated": 1.0, "reward": 0.5}
    outcome = returned_outcome(made)
    assert (outcome.reward, outcome.text, outcome.stats["reward_"]) == (0.5, None, 5.0)


@pytest.mark.parametrize("reward", [float("inf"), float("nan"), Decimal("NaN")])
def test_a_reward_that_is_not_finite_is_a_doubtful_end(reward: Any) -> None:
    sent = json.loads(json.dumps(usable(result_of(reward, {}, cut=False))))
    with pytest.raises(DoubtfulEnd):
        returned_outcome(sent)


@pytest.mark.parametrize("reward", [None, "1", [1], b"1"])
def test_a_reward_of_a_wrong_type_is_a_mistake_of_the_environments(reward: Any) -> None:
    with pytest.raises((ValueError, RolloutError)) as caught:  # the former is a line of the host
        returned_outcome(json.loads(json.dumps(usable(result_of(reward, {}, cut=False)))))
    assert not isinstance(caught.value, DoubtfulEnd)


def test_an_export_has_the_rows_whole_and_only_the_splits_that_there_are(tmp_path: Path) -> None:
    rows = [
        ({"prompt": [{"role": "user", "content": f"é{i}"}], "info": {"i": i}}, f"é{i}", i)
        for i in range(3)
    ]
    assert export(Rows(train=rows), tmp_path, 2) == {"train": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["train.jsonl"]
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert records[1] == {"prompt": "é1", "number": 1, "answer": "1", "verifiers": rows[1][0]}
    assert row_of({"task": records[1]}) == rows[1][0]
    assert export(Rows(train=rows, eval=rows[:1]), tmp_path, 0) == {"train": 3, "eval": 1}


def test_a_row_that_json_can_not_hold_is_refused(tmp_path: Path) -> None:
    with golden.raises(TypeError):
        export(Rows(train=[({"picture": b"x"}, "?", None)]), tmp_path, 0)
    assert not (tmp_path / "train.jsonl").exists()


def test_a_record_that_was_not_exported_is_refused() -> None:
    with golden.raises(ValueError):
        row_of({"task": {"prompt": "?"}})


def test_prompts_are_texts() -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "image_url"}]
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": parts}]
    assert messages_text("x") == "x"
    assert messages_text(messages) == "a\n\nb\n"
    assert messages_text(["", "y"]) == "y"


def test_the_printed_command_names_what_was_exported() -> None:
    command = launch_command("my-env", "/venv/bin/python", '{"seed": 1}', Path("/out"))
    golden.check(command)
