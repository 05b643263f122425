"""An agent's episode: where it finds the policy, how it ended, and what is trained on of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from realsys.api.agent import (
    AnsweredRequest,
    DoubtfulEnd,
    Episode,
    EpisodeTask,
    Trajectory,
    mean_of,
    rewards_of_roles,
)
from realsys.api.errors import RolloutError
from realsys.api.users_code.reward_numbers import NoNumber, finite_number, is_number, shown_value
from realsys.rollout.conversation.answer_tree import AnswerNode
from realsys.rollout.conversation.episode_session import EpisodeSession

logger = logging.getLogger(__name__)

_MEANINGS = ("reward", "rewards", "answer")  # names in a result that are no figures


class NumberNotFinite(ValueError):
    """A number that an agent gave is infinite or NaN: of the right type, so the text may be the cause."""


class EpisodeDropped(RolloutError):
    """An episode was ended through no fault of its own; it is begun anew."""


@dataclass(frozen=True, kw_only=True)
class EpisodeAddress:
    """Where an agent finds the policy.

    Attributes:
        session_url: holds the key, for clients that can't be given one.
        certificate: to be trusted; None: plain HTTP.
    """

    base_url: str
    session_url: str
    key: str = field(repr=False)
    model: str = "policy"
    certificate: Path | None = None

    @property
    def root_url(self) -> str:
        """Without ``/v1``, as Anthropic's clients want it."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, kw_only=True)
class EpisodeSeat:
    """A role's conversation with the policy in an episode, and where it is held."""

    role: str
    session: EpisodeSession
    address: EpisodeAddress


def seat_json(seat: EpisodeSeat) -> dict[str, str]:
    """Returns a role's address, as agents get it."""
    address = seat.address
    return {
        "base_url": address.base_url,
        "session_url": address.session_url,
        "key": address.key,
        "model": address.model,
    }


@dataclass(frozen=True, kw_only=True)
class AgentOutcome:
    """How an agent's episode ended.

    Attributes:
        reward: that it gave itself; None: it gave none.
        rewards: of single roles.
        text: what the environment scores; None: the policy's last answer.
        problem: why it failed; empty: it did not.
        stats: numbers for the metrics.
        doubt: how it ended, if the policy's text may have caused it, or something else.
    """

    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    text: str | None = None
    problem: str = ""
    stats: Mapping[str, float] = field(default_factory=dict)
    doubt: DoubtfulEnd | None = None


def outcome_of(given: Mapping[str, Any], *, problem: str = "") -> AgentOutcome:
    """Reads what an agent has written or returned: ``reward``, ``rewards`` by role, ``answer``, other
    numbers.

    Raises:
        ValueError: there is no reward and no answer in it, a reward is no number, or a number has no name.
        NumberNotFinite: one is infinite or NaN.
    """
    by_role = given.get("rewards") or {}
    if not isinstance(by_role, Mapping):
        raise ValueError(f"its rewards are {shown_value(by_role)}, and no object")
    answer, reward = given.get("answer"), given.get("reward")
    if reward is None and answer is None and not by_role:
        raise ValueError("there is neither a reward nor an answer")
    if not (answer is None or isinstance(answer, str) or is_number(answer)):
        raise ValueError(f"its answer is {shown_value(answer)}, which is no text")
    stats = {k: _number(v, k) for k, v in given.items() if k not in _MEANINGS and is_number(v)}
    if not all(name.strip() for name in stats):
        raise ValueError("a number has an empty name")
    return AgentOutcome(
        reward=None if reward is None else _number(reward, "reward"),
        rewards={str(role): _number(v, f"reward of {role}") for role, v in by_role.items()},
        text=None if answer is None else str(answer),
        problem=problem,
        stats=stats,
    )


def _number(value: Any, name: str) -> float:
    try:
        return finite_number(value)
    except NoNumber as error:
        kind = NumberNotFinite if is_number(value) else ValueError
        raise kind(f"its {name} is {error}") from None


async def finished_episode(
    task: EpisodeTask, seats: Sequence[EpisodeSeat], outcome: AgentOutcome, *, failed_reward: float
) -> Episode:
    """Scores an episode and turns its conversations into sequences.

    The environment is asked for a score only where a sequence has no other reward. The episode's reward is
    the mean of its sequences', of several roles the mean of the roles' means.

    Raises:
        RolloutError: the policy was not asked, so there is nothing to train on; or a reward is of no role.
        DoubtfulEnd: it ended in doubt, for the first time. At the second it gets ``failed_reward``.
    """
    if outcome.doubt is not None:
        outcome = replace(outcome, problem=outcome.doubt.what)
    used = [seat for seat in seats if seat.session.last_node() is not None]
    if not used:
        raise _no_answer(task, seats, outcome.problem)
    if outcome.doubt is not None and not task.is_doubtful:
        raise outcome.doubt
    if unknown := sorted(set(outcome.rewards) - {seat.role for seat in seats}):
        raise RolloutError(
            f"a reward is for role {unknown[0]!r}",
            where=f"episode {task.id}",
            fix="reward the roles of task.agent_args.roles: " + ", ".join(s.role for s in seats),
        )
    rewards = {
        seat.role: given for seat in used if (given := _own_reward(seat, outcome)) is not None
    }
    stats: dict[str, float] = {**outcome.stats, "failed": float(bool(outcome.problem))}
    if outcome.problem:
        logger.info("agent failed episode=%s problem=%s", task.id, outcome.problem)
    made = [
        replace(sequence, role=seat.role)
        for seat in used
        for sequence in seat.session.sequences(reward=rewards.get(seat.role, math.nan))
    ]
    if unscored := {one.role for one in made if math.isnan(one.reward)}:
        if outcome.problem:
            scored = failed_reward
        else:
            last = used[0].session.last_node()
            assert last is not None
            scored, info = await _scored(task, last, outcome.text)
            stats |= info
        rewards |= dict.fromkeys(unscored, scored)
    sequences = [replace(s, reward=rewards[s.role]) if math.isnan(s.reward) else s for s in made]
    return Episode(
        sequences=tuple(sequences),
        reward=mean_of([mean_of(found) for found in rewards_of_roles(sequences).values()]),
        stats={**stats, **_figures(seats, sequences)},
        shares_reward=all(s.reward == rewards.get(s.role) for s in sequences),
        problem=outcome.problem,
        was_doubtful=outcome.doubt is not None,
        answers=tuple(_answered(used)),
    )


def _answered(seats: Sequence[EpisodeSeat]) -> Iterator[AnsweredRequest]:
    nodes = [(seat.role, node) for seat in seats for node in seat.session.tree.nodes]
    numbers = {id(node): number for number, (_, node) in enumerate(nodes)}
    lengths: dict[int, int] = {}  # tokens up to an answer's last
    for role, node in nodes:
        for each in node.line:
            if id(each) not in lengths:
                before = 0 if each.parent is None else lengths[id(each.parent)]
                lengths[id(each)] = before + len(each.observed) + len(each.answer.tokens)
        tokens = len(node.answer.tokens)
        yield AnsweredRequest(
            id=node.id,
            role=role,
            continues=None if node.parent is None else numbers.get(id(node.parent)),
            messages=node.num_messages,
            prompt_tokens=lengths[id(node)] - tokens,
            tokens=tokens,
            stopped=node.answer.stopped,
            read=node.delivered,
            calls=tuple(call.name for call in node.message.tool_calls),
            reward=node.reward,
        )


def _no_answer(task: EpisodeTask, seats: Sequence[EpisodeSeat], problem: str) -> RolloutError:
    """Returns the error of an episode in which no answer of the policy has reached the agent."""
    asked = sum(seat.session.num_calls() for seat in seats)
    unread = sum(int(seat.session.figures()["unread_answers"]) for seat in seats)
    if unread:
        what = f"{_many(unread, 'answer')} of the policy {_was(unread)} not read"
        fix = "see its log: it left before an answer had reached it, or its time was too short"
    elif left := sum(seat.session.num_left() for seat in seats):
        others = f", and {asked - left} failed" if asked > left else ""
        what = f"it made {_many(asked, 'request')} and received nothing: it left {left}{others}"
        fix = "see its log: it left before an answer had begun, or its time was too short"
    elif asked:
        what = f"it made {_many(asked, 'request')}, and none was answered"
        fix = "see its log for the errors that it got, or its time limit"
    else:
        what = "it made no request"
        fix = "see its log; it must use the base URL and the key that it is given"
    before = f"{problem}: " if problem else ""
    return RolloutError(
        f"{before}the agent ended without an answer of the policy: {what}",
        where=f"episode {task.id}",
        fix=fix,
    )


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _own_reward(seat: EpisodeSeat, outcome: AgentOutcome) -> float | None:
    if seat.session.reward is not None:
        return seat.session.reward
    return outcome.rewards.get(seat.role, outcome.reward)


async def _scored(
    task: EpisodeTask, last: AnswerNode, text: str | None
) -> tuple[float, Mapping[str, float]]:
    task.environment.sampled(last.scored_answer if text is None else last.whole_answer)
    observation = await task.environment.step(last.message.content if text is None else text)
    return observation.reward, observation.info


def _figures(seats: Sequence[EpisodeSeat], sequences: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the sessions' numbers, summed over roles, and each role's mean reward."""
    figures = [seat.session.figures() for seat in seats]
    summed = {name: sum(f[name] for f in figures) for name in figures[0]}
    by_role = rewards_of_roles(sequences)
    return {**summed, **{f"reward_{r}": mean_of(found) for r, found in by_role.items() if r}}
