"""All episodes of one prompt, at the same time, and the datapoint that they make."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from realsys.api.agent import Agent, Environment, Observation, Trajectory
from realsys.api.errors import DataError, RealsysError, RewardError, WaitTimeout
from realsys.data.sequence_sample import SequenceSample
from realsys.rewards import scores
from realsys.rollout.worker.policy_client import AskedFor, EpisodeAsk, PolicyCaller
from realsys.rollout.worker.trajectories import check, trajectories_sample, versions_of
from realsys.runtime.first_error import first_error
from realsys.transport.rollout_messages import Ticket, sample_id

T = TypeVar("T")
PROMPTS = "packed_prompts"


@dataclass(frozen=True, kw_only=True)
class EpisodeGroup:
    """The finished episodes of a ticket. ``oldest`` and ``newest`` are versions of weights."""

    sample: SequenceSample
    trajectories: tuple[Trajectory, ...]
    prompt_length: int
    oldest: int
    newest: int
    took: AskedFor

    @property
    def rewards(self) -> tuple[float, ...]:
        """One an episode."""
        return tuple(t.reward for t in self.trajectories)

    @property
    def answer_lengths(self) -> tuple[int, ...]:
        """Tokens that the policy wrote in each episode."""
        return tuple(sum(t.from_policy) for t in self.trajectories)


@dataclass(frozen=True, kw_only=True)
class GroupRunner:
    """Turns tickets into groups.

    Attributes:
        dataset: as model workers make it: ``batch``, and ``record`` where it has one.
        make_environment: a new one for each episode.
        agent_name, environment_name: for errors.
        environment_s: most seconds for one call of an environment.
    """

    dataset: Any
    tokenizer: Any
    agent: Agent
    make_environment: Callable[[], Environment]
    caller: PolicyCaller
    group_size: int
    agent_name: str = "agent"
    environment_name: str = "environment"
    environment_s: float = 300.0

    async def run(self, ticket: Ticket) -> EpisodeGroup:
        """All episodes of ``ticket``. The first failure ends the others and is raised.

        Raises:
            DataError: no such record, or an agent's trajectory is wrong. RewardError: an environment
                raised, or its reward is no finite number. WaitTimeout: the policy or an environment did
                not answer in time. Whatever agent and environment raise.
        """
        prompt, record, metadata = self._prompt(ticket)
        asks = [self.caller.ask_for(ticket, index) for index in range(self.group_size)]
        try:
            trajectories = await all_of(
                [self._episode(prompt, record, ask) for ask in asks], name=ticket.id
            )
        except RewardError as error:
            text = str(self.tokenizer.decode(prompt, skip_special_tokens=True))
            raise scores.with_record(error, id=ticket.id, prompt=text) from error
        oldest, newest = versions_of(trajectories)
        name = sample_id(ticket.id, ticket.tries)
        return EpisodeGroup(
            sample=trajectories_sample(name, trajectories, metadata=metadata),
            trajectories=tuple(trajectories),
            prompt_length=len(prompt),
            oldest=oldest,
            newest=newest,
            took=_sum_of(asks),
        )

    def _prompt(self, ticket: Ticket) -> tuple[list[int], Mapping[str, Any], dict[str, Any]]:
        """Tokens, record for the environment, and the datapoint's metadata as in the synchronous graph."""
        if not 0 <= ticket.index < len(self.dataset):
            raise DataError(
                f"no record {ticket.index}, the data set has {len(self.dataset)}",
                where=f"ticket {ticket.id}",
                fix="all workers must read the same data set",
            )
        batch = self.dataset.batch([ticket.index], [ticket.id])
        metadata = {name: values[0] for name, values in batch.meta.metadata.items()}
        read = getattr(self.dataset, "record", None)
        record = {**(read(ticket.index) if read is not None else {}), **metadata}
        return batch.data[PROMPTS].tolist(), record, metadata

    async def _episode(
        self, prompt: Sequence[int], record: Mapping[str, Any], ask: EpisodeAsk
    ) -> Trajectory:
        environment = TimeoutEnvironment(
            self.make_environment(), name=self.environment_name, timeout_s=self.environment_s
        )
        try:
            await environment.reset(record)
            trajectory = await self.agent.run(
                prompt, ask=ask, environment=environment, tokenizer=self.tokenizer
            )
        finally:
            await environment.close()
        scores.checked_score(trajectory.reward, source=f"agent {self.agent_name!r}")
        check(trajectory, prompt, agent=self.agent_name)
        return trajectory


class TimeoutEnvironment(Environment):
    """An environment whose every call has a deadline, and whose rewards are numbers."""

    def __init__(self, inner: Environment, *, name: str, timeout_s: float) -> None:
        self._inner, self._name, self._timeout_s = inner, name, timeout_s

    async def reset(self, record: Mapping[str, Any]) -> None:
        await self._in_time(self._inner.reset(record), "reset")

    async def step(self, action: str) -> Observation:
        source = f"environment {self._name!r}"
        try:
            observation = await self._in_time(self._inner.step(action), "step")
        except (RealsysError, OSError):  # says itself what is wrong, or is not the record's fault
            raise
        except Exception as error:  # a plug-in's
            raise scores.exception_error(error, source) from error
        return replace(observation, reward=scores.checked_score(observation.reward, source=source))

    async def close(self) -> None:
        await self._in_time(self._inner.close(), "close")

    async def _in_time(self, call: Coroutine[Any, Any, T], what: str) -> T:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await call
        except TimeoutError as error:
            if not limit.expired():
                raise  # the environment's own
            raise WaitTimeout(
                f"{what} of environment {self._name!r} took more than {self._timeout_s:g} s",
                where=f"environment {self._name!r}",
                fix="make it quicker, or raise rollout_request_timeout",
            ) from error


async def all_of(calls: Sequence[Coroutine[Any, Any, T]], *, name: str) -> list[T]:
    """Their results in order. The first failure cancels the others and is raised as itself."""
    async with first_error(), asyncio.TaskGroup() as group:
        tasks = [group.create_task(c, name=f"{name}/{i}") for i, c in enumerate(calls)]
    return [task.result() for task in tasks]


def _sum_of(asks: Sequence[EpisodeAsk]) -> AskedFor:
    return AskedFor(
        requests=sum(ask.took.requests for ask in asks),
        broken=sum(ask.took.broken for ask in asks),
        servers=set().union(*(ask.took.servers for ask in asks)),
    )
