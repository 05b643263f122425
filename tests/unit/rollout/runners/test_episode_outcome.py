"""What an agent's reward file or return value means."""

from __future__ import annotations

from pathlib import Path

import pytest

from realsys.api.errors import RolloutError
from realsys.rollout.runners.command_agent import read_reward
from realsys.rollout.runners.episode_outcome import outcome_of


def test_rewards_answer_and_other_numbers_are_told_apart() -> None:
    outcome = outcome_of({"reward": 1, "answer": 42, "turns": 3, "note": "text", "solved": True})
    assert (outcome.reward, outcome.text) == (1.0, "42")
    assert outcome.stats == {"turns": 3.0, "solved": 1.0}
    assert outcome_of({"rewards": {"solver": 1}}).rewards == {"solver": 1.0}


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ({}, "neither a reward nor an answer"),
        ({"turns": 3}, "neither a reward nor an answer"),
        ({"reward": float("nan")}, "not a finite number"),
        ({"rewards": {"solver": float("inf")}}, "not a finite number"),
        ({"reward": 10**400}, "too large"),
        ({"rewards": {"solver": 10**400}}, "too large"),
        ({"rewards": [1]}, "no object"),
        ({"reward": 1, "": 2}, "empty name"),
        ({"reward": 1, " ": 2}, "empty name"),
    ],
)
def test_what_means_nothing_is_refused(written: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        outcome_of(written)


@pytest.mark.parametrize("written", ["[" * 30_000, "1" + "0" * 400, "1" * 5000, "nan", "[1]"])
def test_a_reward_file_that_holds_no_reward_is_told(written: str, tmp_path: Path) -> None:
    path = tmp_path / "reward.json"
    path.write_text(written)
    with pytest.raises(RolloutError) as caught:
        read_reward(path, problem="")
    assert caught.value.where == "$REALSYS_REWARD_FILE"
