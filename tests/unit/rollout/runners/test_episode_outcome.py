"""What an agent's reward file or return value means."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import golden
import pytest
from scripted_policy import END, scripted

from realsys.api.agent import DoubtfulEnd, EpisodeTask
from realsys.api.errors import RemoteError, RolloutError
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest
from realsys.rollout.runners.command_agent import read_reward
from realsys.rollout.runners.episode_outcome import (
    AgentOutcome,
    EpisodeAddress,
    EpisodeSeat,
    finished_episode,
    outcome_of,
)


def test_rewards_answer_and_other_numbers_are_told_apart() -> None:
    outcome = outcome_of({"reward": 1, "answer": 42, "turns": 3, "note": "text", "solved": True})
    assert (outcome.reward, outcome.text) == (1.0, "42")
    assert outcome.stats == {"turns": 3.0, "solved": 1.0}
    assert outcome_of({"rewards": {"solver": 1}}).rewards == {"solver": 1.0}


@pytest.mark.parametrize(
    "written",
    [
        {},
        {"turns": 3},
        {"reward": float("nan")},
        {"rewards": {"solver": float("inf")}},
        {"reward": 10**400},
        {"rewards": {"solver": 10**400}},
        {"rewards": [1]},
        {"reward": 1, "": 2},
        {"reward": 1, " ": 2},
    ],
)
def test_what_means_nothing_is_refused(written: dict[str, object]) -> None:
    with golden.raises(ValueError):
        outcome_of(written)


@pytest.mark.parametrize("written", ["[" * 30_000, "1" + "0" * 400, "1" * 5000, "nan", "[1]"])
def test_a_reward_file_that_holds_no_reward_is_told(written: str, tmp_path: Path) -> None:
    path = tmp_path / "reward.json"
    path.write_text(written)
    with pytest.raises(RolloutError) as caught:
        read_reward(path, problem="")
    assert caught.value.where == "$REALSYS_REWARD_FILE"


# By somebody who had not read the code: ``reward.txt`` and ``reward.json`` of verifiers, one file here.
FILES = [
    json.loads(line)
    for line in Path(__file__).with_name("reward_files.jsonl").read_text().splitlines()
]
# Where we judge otherwise: content → what it is worth. JSON's true is 1, as a function's True is; either
# form may be in either file; Python's reader takes the last of equal keys.
OTHERWISE = {"true": 1.0, '{"reward": 1.0}': 1.0, '{"reward": 0, "reward": 1}': 1.0}


def written(content: str | dict[str, str | int]) -> bytes:
    if isinstance(content, str):
        return content.encode("utf-8", "surrogatepass")
    if "hex" in content:
        return bytes.fromhex(str(content["hex"]))
    return (str(content["repeat"]) * int(content["times"])).encode()


def test_reward_files_are_worth_what_an_outsider_takes_them_for(tmp_path: Path) -> None:
    path, others = tmp_path / "reward", []
    for row in FILES:
        path.write_bytes(written(row["content"]))
        try:
            found = read_reward(path, problem="").reward
        except DoubtfulEnd:
            found = None
        content = row["content"] if isinstance(row["content"], str) else ""
        if found != OTHERWISE.get(content, row["value"]):
            others.append((row["name"], str(row["content"])[:40], row["value"], found))
    assert others == []


def test_an_empty_reward_file_is_the_agents_failure(tmp_path: Path) -> None:
    path = tmp_path / "reward"
    for content in ("", " \n", "\ufeff"):
        path.write_text(content)
        outcome = read_reward(path, problem="")
        assert outcome.reward is None
        assert "empty" in outcome.problem
        assert read_reward(path, problem="status 3").problem == "status 3"


LOST = RemoteError("the server is gone", where="server", fix="ask again")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ([], ""),
        ([LOST], ""),
        ([LOST] * 2, "it raised"),
        ([f"hi{END}"], ""),
        ([f"hi{END}"] * 2, ""),
        ([None], ""),
        ([LOST, None], ""),
    ],
    ids=[
        *("no request", "not answered", "two not answered", "not read", "two not read"),
        *("left", "one of two left"),
    ],
)
def test_an_episode_without_an_answer_is_told_by_what_happened(
    script: list[Any], problem: str
) -> None:
    async def play() -> None:
        session, _ = scripted(*[f"hi{END}" if said is None else said for said in script])
        for number, said in enumerate(script):
            asked = ChatRequest(messages=(ChatMessage(role="user", content=f"{number}"),))
            with suppress(RemoteError):
                async with session.call(asked) as live:
                    if said is None:  # it leaves before there is anything
                        continue
                    await live.result()  # and it leaves before it is written
        await session.close()
        address = EpisodeAddress(base_url="", session_url="", key="k")
        seat = EpisodeSeat(role="", session=session, address=address)
        task = EpisodeTask(
            id="0-1-0",
            prompt=(),
            record={},
            ask=None,  # type: ignore[arg-type]
            environment=None,  # type: ignore[arg-type]
            tokenizer=None,
        )
        outcome = AgentOutcome(reward=0.5, problem=problem)
        with golden.raises(RolloutError):
            await finished_episode(task, [seat], outcome, failed_reward=0.0)

    asyncio.run(play())
