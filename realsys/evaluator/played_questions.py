"""Has an agent play questions with a saved model.

What an episode is, and what it is worth, are as in a rollout worker (realsys/rollout/worker/group.py); the
policy is an engine in this process, whose weights stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from realsys.api.agent import AgentHost
from realsys.api.basics.reward import TASK_SOURCE
from realsys.api.errors import ConfigError, InternalError, RewardError, RolloutError
from realsys.api.worker_configs import RolloutWorker
from realsys.evaluator.answer_statistics import ACCURACY, SUCCESS, QuestionResult
from realsys.evaluator.evaluation_errors import one_line
from realsys.evaluator.local_asks import LocalAsks
from realsys.generation.http.served_engine import ServedEngine
from realsys.rewards.raised_scores import may_be_the_texts
from realsys.rollout.worker.build import Parts, make_parts
from realsys.rollout.worker.group import EpisodeGroup, GroupRunner, gather_all
from realsys.runtime.first_error import first_of
from realsys.transport.rollout_messages import Ticket

logger = logging.getLogger(__name__)

MOST_TRIES = 3  # of a question whose agent or environment raises
PAUSES_S = (1.0, 8.0)  # between them, where a service may have been away
HOPELESS = 5  # first questions: if no question has a score when these are over, none will
_RIGHT = 0.5  # an episode with more is right, as is an answer that a rule gives more
_NAME = "evaluation"
_LOOK_S = 1.0


def share_of_right(config: RolloutWorker) -> str:
    """Returns what the share of right episodes is called: of an agent that alone rewards, no rule says what
    is right."""
    return SUCCESS if config.env_args.get("reward") == "" else ACCURACY


def prepared(path: Path, config: RolloutWorker) -> Parts:
    """Makes data set, agent and environment for the model in ``path``.

    Raises:
        ConfigError: an unknown name, or wrong arguments.
    """
    return make_parts(replace(config, tokenizer_path=str(path)))


@dataclass(kw_only=True)
class Match:
    """Questions that an agent plays, some at a time, each ``config.group_size`` times.

    Attributes:
        config: ``max_concurrent_rollouts`` bounds episodes here, not questions.
        logs: folder for what the agent's programs write.
        place: ``AgentHost.place``.
        note: gets the number of questions that are over, after each.
    """

    parts: Parts
    config: RolloutWorker
    indices: Sequence[int]
    logs: Path
    place: str = ""
    note: Callable[[int], None] = lambda done: None
    results: dict[int, QuestionResult] = field(default_factory=dict, init=False)


def play(
    engine: ServedEngine, matches: Sequence[Match], *, look: Callable[[], None] = lambda: None
) -> list[list[QuestionResult]]:
    """Starts the engine, plays the matches one after the other, and closes it; returns the results of each.

    Args:
        look: called every second; what it raises ends the matches.
    Raises:
        ConfigError: agent or environment refuse their arguments. WorkerLost: the engine has ended.
        RolloutError: none of the first questions could be played or scored.
    """
    asyncio.run(_play(engine, matches, look))
    return [[match.results[index] for index in match.indices] for match in matches]


async def _play(engine: ServedEngine, matches: Sequence[Match], look: Callable[[], None]) -> None:
    async def all_matches() -> None:
        for match in matches:
            await _play_one(engine, match)

    async def looking() -> None:
        while True:
            look()
            await asyncio.sleep(_LOOK_S)

    try:
        await engine.start()
        await first_of({"matches": all_matches(), "engine": engine.ended(), "look": looking()})
    finally:
        await engine.close()


async def _play_one(engine: ServedEngine, match: Match) -> None:
    parts, config = match.parts, match.config
    groups = GroupRunner(
        dataset=parts.dataset,
        tokenizer=parts.tokenizer,
        agent=parts.agent,
        make_environment=parts.make_environment,
        caller=LocalAsks(engine, parts.settings),
        group_size=config.group_size,
        agent_name=config.agent,
        environment_name=config.env,
        environment_s=config.rollout_request_timeout,
    )
    places = asyncio.Semaphore(max(1, config.max_concurrent_rollouts // config.group_size))

    async def one(index: int) -> None:
        async with places:
            _note(match, index, await _result(groups, index))

    try:
        await parts.agent.open(
            AgentHost(
                name=_NAME,
                tokenizer=parts.tokenizer,
                end_ids=frozenset(parts.settings.stop_token_ids),
                folder=match.logs,
                secret=secrets.token_bytes(32),
                place=match.place,
            )
        )
        await gather_all([one(index) for index in match.indices], name="question")
        _check_hope(match)
    finally:
        await parts.agent.close()


def _note(match: Match, index: int, result: QuestionResult) -> None:
    match.results[index] = result
    if result.problem:
        found = "failed" if result.rewards else "got no score"
        logger.warning("question %s id=%s why=%s", found, result.id, result.problem)
    if all(first in match.results for first in match.indices[:HOPELESS]):
        _check_hope(match)
    match.note(len(match.results))


def _check_hope(match: Match) -> None:
    results = match.results.values()
    if results and not any(result.rewards for result in results):
        wrote = any(match.logs.glob("*"))
        logs = f"; what programs wrote is in {match.logs}" if wrote else ""
        raise RolloutError(
            f"none of {len(results)} questions got a score: {next(iter(results)).problem}",
            where=f"agent {match.config.agent!r} and environment {match.config.env!r}",
            fix=f"mend what the message names{logs}",
        )


async def _result(groups: GroupRunner, index: int) -> QuestionResult:
    """Plays a question, again if that raises; what can't be played or scored is a result too."""
    id_ = f"eval-{index}"  # as the trainer's evaluation names it: sampled answers belong to it
    for number in range(MOST_TRIES):
        try:
            group = await groups.run(Ticket(id=id_, index=index, tries=number, min_version=0))
            return _scored(id_, group, source=_source(groups.dataset, index))
        except (ConfigError, InternalError):
            raise  # another try has the same end
        except RewardError as error:  # of this record, by a rule that has seen its answers
            problem = one_line(error)
            break
        except Exception as error:  # plug-ins may raise anything
            problem = one_line(error)
            plugins_own = isinstance(error, RolloutError) or may_be_the_texts(error, is_async=True)
            if number + 1 < MOST_TRIES and not plugins_own:
                await asyncio.sleep(PAUSES_S[number])
    return QuestionResult(
        id=id_, rewards=(), num_correct=0, lengths=(), truncated=(), problem=problem
    )


def _scored(id_: str, group: EpisodeGroup, *, source: str) -> QuestionResult:
    return QuestionResult(
        id=id_,
        rewards=group.rewards,
        num_correct=sum(reward > _RIGHT for reward in group.rewards),
        lengths=group.answer_lengths,
        truncated=tuple(any(t.truncated for t in e.sequences) for e in group.episodes),
        source=source,
        stats=group.figures,
        problem=next((one_line(e.problem) for e in group.episodes if e.problem), ""),
    )


def _source(dataset: Any, index: int) -> str:
    read: Callable[[int], Mapping[str, Any]] | None = getattr(dataset, "record", None)
    return "" if read is None else str(read(index).get(TASK_SOURCE, ""))
