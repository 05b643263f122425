"""Failed episodes in virtual time: a whole run of worker, ledger and master's desk, with faults by seed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from virtual_time import run_virtually

from realsys.api.agent import (
    Answer,
    DoubtfulEnd,
    Environment,
    Episode,
    EpisodeAgent,
    EpisodeTask,
    Observation,
)
from realsys.api.errors import RolloutError, WaitTimeout
from realsys.data.sequence_sample import SequenceSample
from realsys.master.graph.data_schedule import DataSchedule
from realsys.master.rollouts.recent_episodes import RecentEpisodes
from realsys.master.rollouts.rollout_dispatcher import RolloutDispatcher
from realsys.master.rollouts.routes import Routes
from realsys.rollout.agents.transcript import Transcript
from realsys.rollout.staleness.ledger import StalenessLedger
from realsys.rollout.worker.episode_log import EpisodeLog
from realsys.rollout.worker.episode_tries import EpisodeTries
from realsys.rollout.worker.group import GroupRunner
from realsys.rollout.worker.policy_client import RequestStats
from realsys.rollout.worker.rollout_log import RolloutLog
from realsys.rollout.worker.rollout_worker import RolloutLimits, RolloutLoop
from realsys.transport.rollout_messages import Ticket

GROUP, QUESTIONS = 8, 20
TIMEOUT_S = 5.0  # of the agent


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Shares of the tries that fail, and when the servers are away, in seconds."""

    before: float = 0.0
    hang: float = 0.0
    nan: float = 0.0
    away: tuple[float, float] = (0.0, 0.0)
    waits_inside: bool = (
        False  # requests hang while they are away, until the agent's limit; else refused
    )
    records: frozenset[int] = frozenset()  # that always fail

    def are_away(self) -> bool:
        first, last = self.away
        return first <= asyncio.get_running_loop().time() < last


class Records:
    def __len__(self) -> int:
        return 5000

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        data = {"packed_prompts": torch.tensor([5, 6])}
        return SequenceSample.from_tensors(ids, {"packed_prompts": [[2]]}, data)

    def record(self, index: int) -> Mapping[str, Any]:
        return {"index": index}


class Letters:
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i) for i in ids)


class Nothing(Environment):
    async def reset(self, record: Mapping[str, Any]) -> None:
        pass

    async def step(self, action: str) -> Observation:
        return Observation()


@dataclass
class Policy:
    """Answers in a second, unless the servers are away."""

    faults: Faults

    def ask_for(self, ticket: Ticket, index: int, **_: Any) -> PolicyAsk:
        return PolicyAsk(self.faults, ticket.min_version)


@dataclass
class PolicyAsk:
    faults: Faults
    version: int
    request_stats: RequestStats = field(default_factory=RequestStats)

    async def __call__(
        self, tokens: Sequence[int], limit: int | None = None, /, **_: Any
    ) -> Answer:
        await asyncio.sleep(0.5)
        while self.faults.are_away():
            if not self.faults.waits_inside:
                raise WaitTimeout("no generation server is well", where="here", fix="wait")
            await asyncio.sleep(1)
        await asyncio.sleep(0.5)
        return Answer(tokens=(20,), logprobs=(-0.5,), versions=(self.version,), stopped=True)

    async def trouble(self) -> str:
        return "generation_server/0 fails a health check" if self.faults.are_away() else ""


@dataclass(eq=False)
class FaultyAgent(EpisodeAgent):
    """As a function behind the endpoint: asks twice, and fails as it is told.

    Attributes:
        played: finished episodes by what became of them. in_outage: failed scores given while servers
            were away.
    """

    faults: Faults
    seed: int = 1
    played: Counter[str] = field(default_factory=Counter)
    in_outage: int = 0

    async def run_episode(self, task: EpisodeTask) -> Episode:
        draw = random.Random(f"{self.seed}/{task.id}").random()
        faults = self.faults
        if draw < faults.before or task.record["index"] in faults.records:
            raise RolloutError("ConnectionError: the provider said 429", where="it", fix="wait")
        is_away_s, problem = asyncio.get_running_loop().time(), ""
        transcript = Transcript(task.prompt)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                transcript.answered(await task.ask(transcript.tokens))
                transcript.observed([7])
                if faults.before <= draw < faults.before + faults.hang:
                    await asyncio.sleep(1000)
                transcript.answered(await task.ask(transcript.tokens))
        except TimeoutError:
            problem = "it was still running after 5 s"
        except WaitTimeout:  # a client tells of status 502
            problem = "InternalServerError: 502"
        if len(transcript.tokens) == len(task.prompt):
            raise RolloutError(f"no answer of the policy: {problem}", where="it", fix="see")
        if faults.before + faults.hang <= draw < faults.before + faults.hang + faults.nan:
            if not task.is_doubtful:
                raise DoubtfulEnd("it returned nan", where="it", fix="mend it")
            problem = "it returned nan"
        if problem and self._overlaps(is_away_s):
            self.in_outage += 1
        self.played["failed" if problem else "good"] += 1
        reward = 0.0 if problem else 1.0
        trajectory = transcript.trajectory(reward=reward, truncated=False)
        return Episode(sequences=(trajectory,), reward=reward, problem=problem)

    def _overlaps(self, began_s: float) -> bool:
        first, last = self.faults.away
        return began_s < last and asyncio.get_running_loop().time() >= first


@dataclass
class Outcome:
    agent: FaultyAgent
    desk: RolloutDispatcher
    trained: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    error: Exception | None = None
    said: list[str] = field(default_factory=list)
    ended_s: float = 0.0
    row: dict[str, float] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of lines would take longer than all the rest."""
    caplog.set_level(logging.CRITICAL)


def play(
    faults: Faults, folder: Path, *, steps: int = 10, at_once: int = 64, **limits: Any
) -> Outcome:
    """Plays ``steps`` steps of QUESTIONS groups of GROUP episodes; a step trains in two seconds."""
    return run_virtually(_play(faults, folder, steps, at_once, **limits))


async def _play(faults: Faults, folder: Path, steps: int, at_once: int, **limits: Any) -> Outcome:
    clock = asyncio.get_running_loop().time
    agent = FaultyAgent(faults)
    said: list[str] = []
    desk = RolloutDispatcher(RecentEpisodes(**limits), clock=clock, say=said.append)
    found = Outcome(agent, desk, said=said)

    class Master:
        name = "master_worker/0"

        async def call(self, body: Any, *, what: str, timeout_s: float) -> Any:
            return await desk.handle(body)

    rewards: dict[str, list[float]] = {}

    def connect(endpoints: tuple[str, ...]) -> Any:
        async def give(holder: int, sample: SequenceSample) -> None:
            rewards[sample.ids[0]] = sample.data["rewards"].tolist()

        return give

    log = RolloutLog(folder / "rollouts.jsonl", tokenizer=Letters(), texts=0)
    episodes = EpisodeLog(folder / "episodes.jsonl")
    loop = RolloutLoop(
        name="rollout_worker/0",
        master=Master(),  # type: ignore[arg-type]
        groups=GroupRunner(
            dataset=Records(),
            tokenizer=Letters(),
            agent=agent,
            make_environment=Nothing,
            caller=Policy(faults),
            group_size=GROUP,
            retries=EpisodeTries(),
        ),
        connect=connect,
        log=log,
        episodes=episodes,
        limits=RolloutLimits(max_concurrent_rollouts=at_once),
    )
    worker = asyncio.create_task(loop.run())
    size = await desk.dataset_size()
    ledger = StalenessLedger(
        batch_size=QUESTIONS, max_staleness=1, policy="wait", total_steps=steps
    )
    schedule = DataSchedule(dataset_size=size, batch_size=QUESTIONS, seed=1, shuffle=False)

    async def clear(holder: int, ids: Sequence[str]) -> None:
        pass

    await desk.open(ledger, schedule, routes=Routes(holders=[0], endpoints=["a"]), clear=clear)
    try:
        for step in range(1, steps + 1):
            names = [meta.ids[0] for meta, _ in await desk.load(step)]
            found.trained += names
            found.rewards += [r for name in names for r in rewards[name]]
            await asyncio.sleep(2)
            await desk.trained(step)
    except RolloutError as error:
        found.error = error
    if worker.done():
        await worker
    found.ended_s = clock()
    found.row = desk.metrics()
    await desk.close()
    await worker
    log.close()
    episodes.close()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("waits_inside", "steps"), [(True, 10), (False, 2)], ids=["hanging", "refusing"]
)
def test_failed_episodes_and_an_outage_cost_neither_the_run_nor_good_episodes(
    tmp_path: Path, waits_inside: bool, steps: int
) -> None:
    """200 groups of 8: 10 % fail before the first call, 3 % hang, 1 % return NaN; 5 minutes no servers."""
    away = (20.0, 320.0) if steps > 2 else (1.2, 300.0)
    faults = Faults(before=0.1, hang=0.03, nan=0.01, away=away, waits_inside=waits_inside)
    found = play(faults, tmp_path, steps=steps)
    assert found.error is None
    assert len(found.trained) == len(set(found.trained)) == steps * QUESTIONS
    good, trained_good, num = found.agent.played["good"], sum(found.rewards), len(found.rewards)
    assert num == steps * QUESTIONS * GROUP
    assert trained_good >= 0.98 * good, "good episodes thrown away"
    # What hung after an answer, or returned NaN twice, is failed; nothing else is.
    assert trained_good < num
    assert 1 - trained_good / num < 0.06
    if waits_inside:
        assert found.agent.in_outage, "they ended as failed, and got no score"
    assert "rollout/set_aside" not in found.row
    golden.line(found.said, "succeeded")
    assert found.said[-1] == ""


def test_an_outage_is_one_where_few_are_played_at_a_time(tmp_path: Path) -> None:
    """Three records at a time, where seven may fail by themselves: each is at one of its tries."""
    faults = Faults(before=0.1, away=(20.0, 320.0), waits_inside=True)
    found = play(faults, tmp_path, steps=3, at_once=3, failed_share=0.35)
    assert found.error is None
    assert "rollout/set_aside" not in found.row
    assert sum(text.startswith("no episode has succeeded for 4 min") for text in found.said) > 0
    given_up = (tmp_path / "rollouts.jsonl").read_text().count('"failed"')
    assert given_up == 0, "none is given up in an outage"


def test_too_many_failures_end_the_run_within_the_window_and_are_named(tmp_path: Path) -> None:
    found = play(Faults(before=0.6), tmp_path)
    assert isinstance(found.error, RolloutError)
    golden.check(found.error)
    assert "schedule.failed_share" in found.error.fix
    assert sum(found.agent.played.values()) <= 3 * 200


def test_a_higher_share_may_be_allowed(tmp_path: Path) -> None:
    found = play(Faults(before=0.5), tmp_path, failed_share=0.5, steps=1)
    assert found.error is None


def test_records_that_always_fail_are_set_aside(tmp_path: Path) -> None:
    found = play(Faults(records=frozenset({3, 30})), tmp_path, steps=2)
    assert found.error is None
    assert len(found.trained) == 40
    assert {"0-3", "0-30"}.isdisjoint(found.trained)
    assert found.row["rollout/set_aside"] == 2
    assert sum(found.rewards) == found.agent.played["good"] == 320


def test_what_can_not_succeed_ends_the_run_soon(tmp_path: Path) -> None:
    found = play(Faults(before=1.0), tmp_path)
    assert isinstance(found.error, RolloutError)
    golden.check(found.error)
    assert found.ended_s < 120


def test_servers_that_stay_away_end_the_run_when_the_patience_is_over(tmp_path: Path) -> None:
    found = play(Faults(away=(4.0, 1e9)), tmp_path, steps=3, wait_limit_s=300.0)
    assert isinstance(found.error, RolloutError)
    golden.check(found.error)
    assert 300 < found.ended_s < 400
    assert not found.agent.played["failed"]  # nor in the outage's first minute


def test_what_was_never_there_is_told_within_a_minute_with_its_address_to_look_at(
    tmp_path: Path,
) -> None:
    """A wrong URL is refused as one is whose service is away."""
    found = play(Faults(away=(0.0, 1e9)), tmp_path, steps=1, wait_limit_s=30.0)
    assert found.ended_s < 60
    first = next(text for text in found.said if text)
    assert "no generation server is well" in first
    assert all("address" in told for told in (first, str(found.error)))
    away_later = play(Faults(away=(4.0, 1e9)), tmp_path, steps=3, wait_limit_s=30.0)
    assert not any("address" in told for told in (*away_later.said, str(away_later.error)))
