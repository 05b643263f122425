"""What a rollout worker writes of what was said in its episodes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from realsys.api.agent import AnsweredRequest, Episode, Trajectory
from realsys.rollout.worker.shown_episodes import shared_prompt_length, shown_episodes


class Letters:
    """Token i is the letter i of the alphabet."""

    def decode(self, token_ids: list[int], /) -> str:
        return "".join(chr(97 + i) for i in token_ids)


def sequence(text: str, reward: float = 0.0, **more: Any) -> Trajectory:
    """Upper-case letters are the policy's."""
    by_policy = tuple(c.isupper() for c in text)
    return Trajectory(
        tokens=tuple(ord(c) - 97 for c in text.lower()),
        from_policy=by_policy,
        logprobs=(0.0,) * len(text),
        versions=(0,) * len(text),
        reward=reward,
        truncated=more.pop("truncated", False),
        **more,
    )


def test_a_group_of_answers_has_one_prompt_and_a_piece_each() -> None:
    episodes = [Episode(sequences=(sequence("abCD", 1.0),), reward=1.0)]
    episodes.append(Episode(sequences=(sequence("abE", truncated=True),), reward=0.0))
    assert shown_episodes(episodes, Letters()) == {
        "prompt": "ab",
        "episodes": [
            {
                "reward": 1.0,
                "sequences": [{"reward": 1.0, "pieces": [{"by": "policy", "text": "cd"}]}],
            },
            {
                "reward": 0.0,
                "sequences": [
                    {"reward": 0.0, "pieces": [{"by": "policy", "text": "e"}], "truncated": True}
                ],
            },
        ],
    }


def test_a_conversation_is_shown_piece_by_piece_with_its_requests() -> None:
    """Prompts of their own have a mark in common and nothing else: that is no prompt."""
    answers = (
        AnsweredRequest(id="a", messages=2, prompt_tokens=2, tokens=1, calls=("add",)),
        AnsweredRequest(id="b", continues=0, messages=4, prompt_tokens=5, tokens=2, read=False),
    )
    episode = Episode(
        sequences=(sequence("abCdeFG", 0.5, role="solver"), sequence("aghI", 0.25, role="critic")),
        reward=0.375,
        stats={"calls": 2.0, "loss": math.nan, "best": math.inf},  # JSON has no such numbers
        problem="killed",
        answers=answers,
    )
    shown = shown_episodes([episode], Letters())
    assert json.loads(json.dumps(shown)) == {
        "prompt": "",
        "episodes": [
            {
                "reward": 0.375,
                "problem": "killed",
                "numbers": {"calls": 2.0},
                "answers": [
                    {"id": "a", "messages": 2, "prompt_tokens": 2, "tokens": 1, "calls": ["add"]},
                    {
                        "id": "b",
                        "continues": 0,
                        "messages": 4,
                        "prompt_tokens": 5,
                        "tokens": 2,
                        "read": False,
                    },
                ],
                "sequences": [
                    {
                        "role": "solver",
                        "reward": 0.5,
                        "pieces": [
                            {"by": "context", "text": "ab"},
                            {"by": "policy", "text": "c"},
                            {"by": "context", "text": "de"},
                            {"by": "policy", "text": "fg"},
                        ],
                    },
                    {
                        "role": "critic",
                        "reward": 0.25,
                        "pieces": [{"by": "context", "text": "agh"}, {"by": "policy", "text": "i"}],
                    },
                ],
            }
        ],
    }


@pytest.mark.parametrize(
    ("texts", "length"),
    [
        (["abC"], 2),
        (["abC", "abD"], 2),
        (["abC", "acD"], 0),
        (["abC", "abcD"], 0),
        (["abC", "Ab"], 0),
        (["A", "B"], 0),
    ],
)
def test_a_prompt_is_what_all_sequences_begin_with(texts: list[str], length: int) -> None:
    assert shared_prompt_length([sequence(text) for text in texts]) == length
