"""Runs all episodes of one prompt concurrently and packs them into a datapoint."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol, TypeVar

from realsys.api.agent import (
    Answer,
    Ask,
    Environment,
    Episode,
    EpisodeAgent,
    EpisodeTask,
    Observation,
    Trajectory,
    rewards_of_roles,
)
from realsys.api.basics.reward import QUESTION_TEXT, is_count
from realsys.api.errors import DataError, RealsysError, RewardError, RolloutError, WaitTimeout
from realsys.data.sequence_sample import SequenceSample
from realsys.reward_worker.time_limit import time_limit
from realsys.rewards import scores
from realsys.rollout.environments.scoring import ASKED, without_question_text
from realsys.rollout.worker.episode_tries import EpisodeTries, fault_of, first_line
from realsys.rollout.worker.policy_client import RequestStats
from realsys.rollout.worker.trajectories import (
    check_episode,
    episodes_sample,
    versions_of,
    with_plain_numbers,
)
from realsys.rollout.worker.watched_ask import PolicyPulse, WatchedAsk
from realsys.runtime.first_error import first_error
from realsys.transport.rollout_messages import FAILED_AGAIN, Ticket, TryFault, sample_id

logger = logging.getLogger(__name__)

T = TypeVar("T")
PROMPTS = "packed_prompts"
TRIES_A_GRANT = 1000  # more than an episode has; after a grant that failed, seeds begin behind it


class CountedAsk(Ask, Protocol):
    """An ``Ask`` that counts its requests."""

    request_stats: RequestStats


class AsksPolicy(Protocol):
    """What gives each episode its way to the policy."""

    def ask_for(
        self, ticket: Ticket, index: int, *, own_prompt: bool = False, number: int = 0
    ) -> CountedAsk:
        """Makes the ``Ask`` of the ticket's episode ``index``, for its try ``number`` (from 0)."""


@dataclass(frozen=True, kw_only=True)
class EpisodeGroup:
    """Finished episodes of a ticket. ``oldest`` and ``newest`` are weight versions."""

    sample: SequenceSample
    episodes: tuple[Episode, ...]
    prompt_length: int
    oldest: int
    newest: int
    request_stats: RequestStats

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards, one per episode."""
        return tuple(episode.reward for episode in self.episodes)

    @property
    def rewards_of_roles(self) -> dict[str, list[float]]:
        """Rewards of each role's sequences, of all episodes."""
        return rewards_of_roles(self.trajectories)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All sequences, those of an episode one after the other."""
        return tuple(t for episode in self.episodes for t in episode.sequences)

    @property
    def answer_lengths(self) -> tuple[int, ...]:
        """Numbers of tokens that the policy wrote, one per episode."""
        return tuple(sum(sum(t.from_policy) for t in e.sequences) for e in self.episodes)

    @property
    def figures(self) -> dict[str, float]:
        """Parts of rewards, and other numbers as ``agent/<name>``; means over the episodes that have a
        finite one, sums of counts (``reward/raised``)."""
        found: dict[str, list[float]] = {}
        for episode in self.episodes:
            for name, value in episode.stats.items():
                if math.isfinite(value):
                    found.setdefault(name, []).append(value)
        return {
            (name if name.startswith("reward/") else f"agent/{name}"): (
                sum(values) if name.startswith("reward/") and is_count(name) else fmean(values)
            )
            for name, values in sorted(found.items())
        }


@dataclass(frozen=True, kw_only=True)
class GroupRunner:
    """Runs tickets to groups of episodes.

    Attributes:
        dataset: as on model workers: ``batch``, and optionally ``record``.
        make_environment: makes a new environment for each episode.
        agent_name, environment_name: for errors.
        environment_s: time limit for one call of an environment, in seconds.
        kept_sets: answers come with kept sets, which trajectories must have too.
        retries: how often an episode is played that fails; by default once.
    """

    dataset: Any
    tokenizer: Any
    agent: EpisodeAgent
    make_environment: Callable[[], Environment]
    caller: AsksPolicy
    group_size: int
    agent_name: str = "agent"
    environment_name: str = "environment"
    environment_s: float = 300.0
    kept_sets: bool = False
    retries: EpisodeTries = field(default_factory=lambda: EpisodeTries(waits_s=()))
    pulse: PolicyPulse = field(default_factory=PolicyPulse)

    async def run(self, ticket: Ticket) -> EpisodeGroup:
        """Runs all episodes of ``ticket``, each again by itself as long as ``retries`` lets it.

        Raises:
            DataError: the record is missing, or an agent's trajectory is wrong. RewardError: an environment
                raised, or its reward is not finite. WaitTimeout: the policy or an environment did not
                respond in time. Also any exception of agent and environment. It is that of the first
                episode whose tries are used up; the others were played to their ends.
        """
        prompt, record, metadata = self._prompt(ticket)
        played = await gather_all(
            [self._played(ticket, i, prompt, record) for i in range(self.group_size)],
            name=ticket.id,
        )
        if (failed := next((p for p in played if p.error is not None), None)) is not None:
            assert failed.error is not None
            if not isinstance(failed.error, RewardError):
                raise failed.error
            text = str(self.tokenizer.decode(prompt, skip_special_tokens=True))
            raise scores.with_record(failed.error, id=ticket.id, prompt=text) from failed.error
        episodes = [p.episode for p in played if p.episode is not None]
        oldest, newest = versions_of([t for e in episodes for t in e.sequences])
        name = sample_id(ticket.id, ticket.tries)
        return EpisodeGroup(
            sample=episodes_sample(
                name, episodes, metadata=metadata, may_branch=self.agent.own_prompt
            ),
            episodes=tuple(episodes),
            prompt_length=len(prompt),
            oldest=oldest,
            newest=newest,
            request_stats=_sum_of([stats for p in played for stats in p.request_stats]),
        )

    async def _played(
        self, ticket: Ticket, index: int, prompt: Sequence[int], record: Mapping[str, Any]
    ) -> _PlayedEpisode:
        """Plays an episode until it has a score, or its tries are used up."""
        clock = asyncio.get_running_loop().time
        chances = self.retries.episode()
        played, first_s = _PlayedEpisode(), math.inf  # time of the first failure
        while True:
            id_, began_s = episode_id(ticket, index, chances.failures), clock()
            asks = self.caller.ask_for(
                ticket,
                index,
                own_prompt=self.agent.own_prompt,
                number=chances.failures + TRIES_A_GRANT * ticket.failures,
            )
            played.request_stats.append(asks.request_stats)
            ask, episode = WatchedAsk(asks, self.pulse), None
            try:
                episode = await self._episode(
                    id_, prompt, record, ask, is_doubtful=chances.is_doubtful
                )
                error: Exception | None = None
            except Exception as raised:  # of agent, environment or server
                error = raised
            trouble = await ask.trouble(ended_well=episode is not None and not episode.problem)
            first_s = min(first_s, clock())
            if episode is not None and not trouble:
                if episode.was_doubtful:  # it has a score, and is a failure all the same
                    self.retries.failed(
                        ticket.id,
                        first_s=first_s,
                        failures=FAILED_AGAIN,
                        fault=TryFault.DOUBTFUL,
                        why=episode.problem,
                    )
                else:
                    self.retries.succeeded(ticket.id, began_s=began_s)
                played.episode = episode
                return played
            if trouble and (error is None or first_line(error) != trouble):
                error = RolloutError(
                    f"the policy did not answer: {trouble}",
                    where=f"episode {id_}",
                    fix="see the logs of those named; the episode is played again",
                )
            assert error is not None
            fault = fault_of(error, servers_trouble=trouble)
            if chances.begins_outage(fault):  # what it failed for before was its own
                first_s = clock()
            wait_s = chances.wait_s(fault, nothing_succeeds=self.retries.nothing_succeeds)
            if fault is not TryFault.UNSCORED:  # which records get no score is counted apart
                self.retries.failed(
                    ticket.id,
                    first_s=first_s,
                    failures=chances.failures,
                    fault=fault,
                    why=first_line(error),
                )
            if wait_s is None:
                played.error = error
                return played
            logger.warning(
                "episode failed episode=%s fault=%s again_in_s=%g why=%s",
                id_,
                fault.value,
                wait_s,
                first_line(error),
                exc_info=None if isinstance(error, RealsysError) or chances.failures > 1 else error,
            )
            del error  # its frames hold the episode
            await asyncio.sleep(wait_s)

    def _prompt(self, ticket: Ticket) -> tuple[list[int], Mapping[str, Any], dict[str, Any]]:
        """Returns prompt tokens, the environment's record, and the metadata as in the synchronous graph."""
        if not 0 <= ticket.index < len(self.dataset):
            raise DataError(
                f"no record {ticket.index}, the data set has {len(self.dataset)}",
                where=f"ticket {ticket.id}",
                fix="all workers must read the same data set",
            )
        batch = self.dataset.batch([ticket.index], [ticket.id])
        metadata = {name: values[0] for name, values in batch.meta.metadata.items()}
        own = self._record(ticket)
        # A column of the user's may be called like the question's text.
        more = {ASKED if name == QUESTION_TEXT else name: x for name, x in metadata.items()}
        record = {**own, **more}
        return batch.data[PROMPTS].tolist(), record, metadata

    def _record(self, ticket: Ticket) -> Mapping[str, Any]:
        """Returns the data set's record; of a mixture that of the ticket's epoch."""
        if (read_of := getattr(self.dataset, "record_of", None)) is not None:
            of_epoch: Mapping[str, Any] = read_of(ticket.index, ticket.id)
            return of_epoch
        read = getattr(self.dataset, "record", None)
        return read(ticket.index) if read is not None else {}

    async def _episode(
        self,
        id_: str,
        prompt: Sequence[int],
        record: Mapping[str, Any],
        ask: Ask,
        *,
        is_doubtful: bool,
    ) -> Episode:
        environment = TimeoutEnvironment(
            self.make_environment(), name=self.environment_name, timeout_s=self.environment_s
        )
        task = EpisodeTask(
            id=id_,
            prompt=prompt,
            record=without_question_text(record),
            ask=ask,
            environment=environment,
            tokenizer=self.tokenizer,
            is_doubtful=is_doubtful,
        )
        try:
            await environment.reset(record)
            episode = await _without_exit(
                self.agent.run_episode(task), source=f"agent {self.agent_name!r}"
            )
        finally:
            try:
                await environment.close()
            except Exception as error:  # what the episode is worth is known by now
                logger.warning("environment not closed episode=%s why=%s", id_, first_line(error))
        episode = with_plain_numbers(episode, source=f"agent {self.agent_name!r}")
        check_episode(
            episode,
            () if self.agent.own_prompt else prompt,
            agent=self.agent_name,
            has_kept=self.kept_sets,
        )
        return episode


@dataclass(eq=False, kw_only=True)
class _PlayedEpisode:
    """An episode after its last try: itself, or why it failed. ``request_stats`` are of each try."""

    episode: Episode | None = None
    error: Exception | None = None
    request_stats: list[RequestStats] = field(default_factory=list)


def episode_id(ticket: Ticket, index: int, number: int) -> str:
    """Returns the id of an episode's try ``number``, from 0 (pure)."""
    again = f"-try{number}" if number else ""
    return f"{sample_id(ticket.id, ticket.tries)}-{index}{again}"


class TimeoutEnvironment(Environment):
    """Wraps an environment: every call has a deadline, and rewards must be finite."""

    def __init__(self, inner: Environment, *, name: str, timeout_s: float) -> None:
        self._inner, self._name, self._timeout_s = inner, name, timeout_s

    async def reset(self, record: Mapping[str, Any]) -> None:
        await self._in_time(self._inner.reset(record), "reset")

    def sampled(self, answer: Answer) -> None:
        self._inner.sampled(answer)

    def opening(self) -> str:
        return self._inner.opening()

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._inner.tools()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        return await self._observed(self._inner.call(name, arguments), "call")

    async def step(self, action: str) -> Observation:
        return await self._observed(self._inner.step(action), "step")

    async def _observed(self, call: Coroutine[Any, Any, Observation], what: str) -> Observation:
        source = f"environment {self._name!r}"
        try:
            observation = await self._in_time(call, what)
        except (RealsysError, OSError):  # already describes the error, or is not the record's fault
            raise
        except Exception as error:  # a plug-in may raise anything
            raise scores.exception_error(error, source) from error
        return replace(observation, reward=scores.checked_score(observation.reward, source=source))

    async def close(self) -> None:
        await self._in_time(self._inner.close(), "close")

    async def _in_time(self, call: Coroutine[Any, Any, T], what: str) -> T:
        try:
            async with time_limit(self._timeout_s) as limit:
                return await _without_exit(call, source=f"environment {self._name!r}")
        except TimeoutError as error:
            if not limit.expired():
                raise  # raised by the environment itself
            raise WaitTimeout(
                f"{what} of environment {self._name!r} took more than {self._timeout_s:g} s",
                where=f"environment {self._name!r}",
                fix="make it quicker, or raise schedule.rollout_request_timeout",
            ) from error


async def _without_exit(call: Coroutine[Any, Any, T], *, source: str) -> T:
    """Awaits what a plug-in does. One that ends, or cancels itself, ends its episode, not the process."""
    try:
        return await call
    except SystemExit as error:
        ended = f"SystemExit: {error}"
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        ended = "CancelledError"
    raise RolloutError(
        f"{source} raised {ended}", where=source, fix="let it raise an error of its own"
    )


async def gather_all(calls: Sequence[Coroutine[Any, Any, T]], *, name: str) -> list[T]:
    """Awaits all calls and returns their results in order; the first failure cancels the others and
    is raised.
    """
    async with first_error(), asyncio.TaskGroup() as group:
        tasks = [group.create_task(c, name=f"{name}/{i}") for i, c in enumerate(calls)]
    return [task.result() for task in tasks]


def _sum_of(stats: Sequence[RequestStats]) -> RequestStats:
    return RequestStats(
        requests=sum(each.requests for each in stats),
        broken=sum(each.broken for each in stats),
        servers=set().union(*(each.servers for each in stats)),
    )
