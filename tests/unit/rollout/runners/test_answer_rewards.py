"""Rewards of single answers and of roles, as they reach metrics, filters and groups."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from realsys.api.agent import Answer, Environment, Episode, EpisodeTask, Observation
from realsys.api.basics.reward import EPISODES
from realsys.interfaces.ppo.episode_groups import EpisodeGroups
from realsys.rollout.conversation.answer_forms import ANSWER_FORMS
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest
from realsys.rollout.conversation.chat_rendering import RenderedChat
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.conversation.session_settings import SessionSettings
from realsys.rollout.runners.episode_outcome import (
    AgentOutcome,
    EpisodeAddress,
    EpisodeSeat,
    finished_episode,
)
from realsys.rollout.worker.group import EpisodeGroup
from realsys.rollout.worker.policy_client import RequestStats
from realsys.rollout.worker.rollout_worker import RolloutLimits, stats_of
from realsys.rollout.worker.trajectories import episodes_sample

LIMITS = RolloutLimits(success_rate_lb=0.01, success_rate_ub=0.99)
QUESTION = ChatMessage(role="user", content="q")


class Renderer:
    """A token a message."""

    template, own_args, can_continue = "", {}, False

    def reads(self, name: str) -> bool:
        return False

    def whole(self, messages: Sequence[ChatMessage], tools: Any, **_: Any) -> RenderedChat:
        return RenderedChat(tokens=tuple(range(1, 1 + len(messages))))

    def behind(
        self, messages: Sequence[ChatMessage], answered: int, tools: Any, **_: Any
    ) -> RenderedChat:
        return RenderedChat(tokens=(7,) * (len(messages) - answered))


class Policy:
    async def sample(self, tokens: Sequence[int], **_: Any) -> Answer:
        return Answer(tokens=(5, 6), logprobs=(-0.1, -0.2), versions=(0, 0), stopped=True)


class Scored(Environment):
    """Counts what it is asked, and gives 0.25."""

    steps = 0

    async def reset(self, record: Any) -> None:
        pass

    async def step(self, action: str) -> Observation:
        self.steps += 1
        return Observation(reward=0.25)


def session() -> EpisodeSession:
    settings = SessionSettings(
        renderer=Renderer(),
        form=ANSWER_FORMS["plain"],
        decode=lambda tokens: " ".join(map(str, tokens)),
        end_ids=frozenset({6}),
    )
    return EpisodeSession(id="e", policy=Policy(), settings=settings)


async def talk(asked: EpisodeSession, own: Sequence[float | None]) -> None:
    """Asks a turn for each reward, which its answer gets; None: it gets none."""
    messages = [QUESTION]
    for reward in own:
        async with asked.call(ChatRequest(messages=tuple(messages))) as live:
            reply = await live.result()
            live.read()
        if reward is not None:
            asked.set_reward(reward, call_id=reply.id)
        messages += [reply.replies[0].message, QUESTION]
    await asked.close()


def episode(
    roles: dict[str, Sequence[float | None]],
    outcome: AgentOutcome | None = None,
    *,
    environment: Environment | None = None,
) -> Episode:
    """An episode whose roles' answers have these rewards of their own."""

    async def play() -> Episode:
        address = EpisodeAddress(base_url="", session_url="", key="")
        seats = [EpisodeSeat(role=r, session=session(), address=address) for r in roles]
        for seat in seats:
            await talk(seat.session, roles[seat.role])
        task = EpisodeTask(
            id="e",
            prompt=(1,),
            record={},
            ask=None,
            environment=environment or Scored(),
            tokenizer=None,
        )  # type: ignore[arg-type]
        return await finished_episode(task, seats, outcome or AgentOutcome(), failed_reward=-1.0)

    return asyncio.run(play())


def group(episodes: Sequence[Episode]) -> EpisodeGroup:
    return EpisodeGroup(
        sample=episodes_sample("a", episodes, metadata={}, may_branch=True),
        episodes=tuple(episodes),
        prompt_length=1,
        oldest=0,
        newest=0,
        request_stats=RequestStats(),
    )


def filtered(made: EpisodeGroup) -> bool:
    return bool(LIMITS.why_filtered(made.rewards, made.rewards_of_roles))


def test_answers_own_rewards_are_the_episodes_and_the_environment_is_not_asked() -> None:
    environment = Scored()
    episodes = [episode({"": (1.0, float(i % 2))}, environment=environment) for i in range(4)]
    assert [[s.reward for s in e.sequences] for e in episodes] == [[1, 0], [1, 1], [1, 0], [1, 1]]
    assert [e.reward for e in episodes] == [0.5, 1.0, 0.5, 1.0]
    assert environment.steps == 0
    made = group(episodes)
    assert stats_of(made, seconds=1.0)["reward"] == 0.75
    assert not filtered(made)
    assert filtered(group([episode({"": (0.0, 0.0)}) for _ in range(4)]))
    assert filtered(group([episode({"": (1.0, 1.0)}) for _ in range(4)]))


@pytest.mark.parametrize(
    ("own", "outcome", "rewards", "steps"),
    [
        ((1.0, None), None, [1.0, 0.25], 1),  # the branch's end has none
        ((None, 1.0), None, [1.0], 0),  # the first answer shares that of the second
        ((None, None), None, [0.25], 1),
        ((None, None), AgentOutcome(reward=2.0), [2.0], 0),
        ((1.0, 0.5), AgentOutcome(reward=2.0), [1.0, 0.5], 0),
        ((1.0, None), AgentOutcome(problem="it fell"), [1.0, -1.0], 0),
        ((1.0, 0.5), AgentOutcome(problem="it fell"), [1.0, 0.5], 0),
    ],
)
def test_the_environment_is_asked_where_a_sequence_has_no_other_reward(
    own: Sequence[float | None],
    outcome: AgentOutcome | None,
    rewards: list[float],
    steps: int,
) -> None:
    environment = Scored()
    made = episode({"": own}, outcome, environment=environment)
    assert [s.reward for s in made.sequences] == rewards
    assert made.reward == sum(rewards) / len(rewards)
    assert environment.steps == steps
    assert made.shares_reward == (own[0] is None and own[1] is None)


def game(white: float, black: float) -> Episode:
    return episode(
        {"white": (None,), "black": (None,)},
        AgentOutcome(rewards={"white": white, "black": black}),
    )


def test_a_zero_sum_game_is_trained_on_and_compared_by_role() -> None:
    episodes = [game(won, -won) for won in (1.0, -1.0, 1.0, -1.0)]
    made = group(episodes)
    assert [e.reward for e in episodes] == [0.0] * 4
    assert episodes[0].stats["reward_white"] == 1.0
    assert episodes[0].stats["reward_black"] == -1.0
    assert not filtered(made)
    groups = EpisodeGroups.of(made.sample, torch.device("cpu"))
    assert groups.group_E.tolist() == [0, 1] * 4
    assert len(json.loads(made.sample.meta.metadata[EPISODES][0])) == 8


def test_a_role_counts_once_however_many_sequences_it_has() -> None:
    made = episode({"white": (1.0,), "black": (-1.0, -0.5)}, None)
    assert len(made.sequences) == 3
    assert made.reward == pytest.approx((1.0 - 0.75) / 2)


@pytest.mark.parametrize(
    ("games", "dropped"),
    [
        ([(1.0, -1.0)] * 4, True),  # white always wins: equal within each role
        ([(0.0, 0.0)] * 4, True),
        ([(1.0, -1.0), (1.0, -1.0), (1.0, 0.5)], False),  # black has something to learn
        ([(2.0, -1.0), (3.0, -2.0)], True),  # all above, all below
        ([(2.0, -1.0), (3.0, 0.5)], False),
    ],
)
def test_a_group_of_roles_is_dropped_where_each_roles_rewards_teach_nothing(
    games: list[tuple[float, float]], dropped: bool
) -> None:
    made = group([game(*each) for each in games])
    assert filtered(made) == dropped
    unbounded: Callable[..., str] = RolloutLimits().why_filtered
    assert not unbounded(made.rewards, made.rewards_of_roles)
