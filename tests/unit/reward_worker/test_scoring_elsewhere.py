"""The client of reward workers, on a channel that is played: what is lost, fails, waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import golden
import pytest
from stand_in_slurm import wait_until

from realsys.api.basics.grader import set_grader
from realsys.api.basics.reward import Completion, Score
from realsys.api.errors import ClusterError, RewardError, StoreUnavailable, WaitTimeout, WorkerLost
from realsys.reward_worker import connection, reward_workers
from realsys.reward_worker.reward_workers import RewardWorkers
from realsys.reward_worker.time_limit import time_limit
from realsys.reward_worker.worker_choice import WorkerChoice
from realsys.rewards.rule import rule_of
from realsys.rewards.set_aside import Answered, SetAsideRecords
from realsys.transport.reward_messages import (
    AskPresence,
    Present,
    ScoreAnswers,
    ScoredAnswers,
    answer_of_json,
    scored_answer,
)
from realsys.trial.records import WorkerRecord

Rule = Callable[[int, str], Score | RewardError]
LOST = RuntimeError("the worker ends")


def length(worker: int, response: str) -> Score:
    """Another rule than that of the process itself."""
    return Score(value=float(len(response)), correct=True)


def no_score(worker: int) -> RewardError:
    return RewardError(f"no score on {worker}", where="rule", fix="none")


def answers(*responses: str) -> list[Completion]:
    return [Completion(response=text) for text in responses]


@dataclass
class PlayedWorkers:
    """Reward workers whose rule may end them; they come back when looked for again, as other processes."""

    num_workers: int
    rule: Rule = length
    pause_s: float = 0.0
    uneven: bool = False  # some take up to seven times as long
    scored: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    most_at_once: int = 0
    _starts: dict[int, int] = field(default_factory=dict)
    _at_once: int = 0
    _requests: int = 0
    _ended: set[asyncio.Event] = field(default_factory=set)

    def look_up(self) -> dict[int, WorkerRecord]:
        return {i: self.record(i) for i in range(self.num_workers)}

    def record(self, index: int) -> WorkerRecord:
        return WorkerRecord(
            worker=f"reward_worker/{index}", host="h", pid=self._starts.get(index, 0), start=0,
            attempt=1, token="t", control=f"{index}",
        )  # fmt: skip

    def connect(self, endpoint: str, **given: Any) -> PlayedClient:
        return PlayedClient(self, int(endpoint))

    async def reply(self, index: int, request: Any, lost: asyncio.Event) -> Any:
        if isinstance(request, AskPresence):
            return Present()
        assert isinstance(request, ScoreAnswers)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        self._requests += 1
        await asyncio.sleep(self.pause_s * (1 + self.uneven * (self._requests % 7)))
        self._at_once -= 1
        texts = tuple(answer_of_json(text).response for text in request.answers)
        self.scored.append((index, texts))
        try:
            results = [self.rule(index, text) for text in texts]
        except RuntimeError:
            self._starts[index] = self._starts.get(index, 0) + 1  # another process from now on
            self._ended.add(lost)
        if lost in self._ended:  # with all that it has
            await lost.wait()
            raise WorkerLost("it ended", where=f"{index}", fix="none")
        return ScoredAnswers(answers=tuple(map(scored_answer, results)))


@dataclass
class PlayedClient:
    """Plays ``RequestClient``."""

    workers: PlayedWorkers
    index: int

    def open(self) -> PlayedClient:
        self._lost = asyncio.Event()
        return self

    def fail(self, reason: str) -> None:
        self._lost.set()

    async def close(self) -> None:
        self._lost.set()

    async def call(self, body: Any, *, timeout_s: float, what: str) -> Any:
        return await self.workers.reply(self.index, body, self._lost)


@contextmanager
def client(workers: PlayedWorkers, *, limit: int = 32, **given: Any) -> Iterator[RewardWorkers]:
    choice = WorkerChoice(num_workers=workers.num_workers, limit=limit)
    parts = {"look_up": workers.look_up, "connect": workers.connect, "looked_at": {"response"}}
    with RewardWorkers(choice, **{**parts, **given}) as made:
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_workers, "LOOK_S", 0.02)
    monkeypatch.setattr(reward_workers, "LOOK_WHOLE_S", 0.02)
    monkeypatch.setattr(connection, "ASK_S", 0.02)


def test_scores_come_in_order_from_all_workers() -> None:
    workers = PlayedWorkers(2)
    with client(workers) as made:
        found = made.score_all(answers(*("a" * i for i in range(40))))
    assert [score.value for score in found if isinstance(score, Score)] == list(range(40))
    assert {index for index, _ in workers.scored} == {0, 1}


def test_no_more_answers_are_at_a_worker_than_the_limit_and_the_rest_waits() -> None:
    workers = PlayedWorkers(1, pause_s=0.2)
    with client(workers, limit=16) as made:
        made.score_all(answers("a"))  # it is there
        made.none_s = 0.05  # and is waited for longer than that, since it is at work
        found = made.score_all(answers(*["a"] * 32))
    assert [score.value for score in found if isinstance(score, Score)] == [1.0] * 32
    assert workers.most_at_once == 2, "requests of eight answers"


def test_answers_of_a_lost_worker_go_to_others_one_by_one_and_all_get_their_scores() -> None:
    ended: list[int] = []

    def ends_once(worker: int, response: str) -> Score:
        if not ended:
            ended.append(worker)
            raise LOST
        return length(worker, response)

    workers = PlayedWorkers(2, ends_once)
    with client(workers) as made:
        found = made.score_all(answers("a", "bb", "ccc"))
    assert [score.value for score in found if isinstance(score, Score)] == [1.0, 2.0, 3.0]
    assert sorted(texts for _, texts in workers.scored[1:]) == [("a",), ("bb",), ("ccc",)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_answer_with_which_three_workers_were_lost_is_the_only_one_without_a_score(
    num_workers: int,
) -> None:
    def ends_by_bad(worker: int, response: str) -> Score:
        if response == "bad":
            raise LOST
        return length(worker, response)

    workers = PlayedWorkers(num_workers, ends_by_bad, pause_s=0.02)
    with client(workers) as made:
        bad, *others = made.score_all(answers("bad", *["good"] * 20))
    assert isinstance(bad, RewardError)
    golden.check(bad)
    assert [s.value for s in others if isinstance(s, Score)] == [4.0] * 20
    assert sum("bad" in texts for _, texts in workers.scored) == 3


def test_what_fails_on_one_worker_is_scored_by_another() -> None:
    def only_on_one(worker: int, response: str) -> Score | RewardError:
        return length(worker, response) if worker == 1 or response == "a" else no_score(worker)

    workers = PlayedWorkers(2, only_on_one)
    with client(workers) as made:
        made.choice.first = 0
        found = made.score_all(answers("a", "bb"))
    assert [score.value for score in found if isinstance(score, Score)] == [1.0, 2.0]
    assert (1, ("bb",)) in workers.scored or workers.scored[0][0] == 1


def test_a_request_that_needs_a_worker_alone_waits_for_those_before_it_only() -> None:
    workers = PlayedWorkers(1, pause_s=0.005, uneven=True)

    async def run(made: RewardWorkers) -> None:
        async def load(until: Callable[[], bool]) -> None:
            while len(workers.scored) < 4000 and not until():
                await made.score(Completion(response="a"))

        async with asyncio.TaskGroup() as group:
            large = asyncio.Event()
            for _ in range(20):
                group.create_task(load(large.is_set))
            while len(workers.scored) < 100:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(made.score_all, answers(*["b"] * 8))
            large.set()

    with client(workers, limit=8) as made:
        asyncio.run(run(made))
    assert (0, ("b",) * 8) in workers.scored
    assert len(workers.scored) < 4000, "those after it did not end before it began"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_fails_twice_is_set_aside_and_counted(num_workers: int) -> None:
    workers = PlayedWorkers(
        num_workers, lambda w, text: no_score(w) if text == "bad" else length(w, text)
    )
    aside = SetAsideRecords()
    records = [
        Answered(id=text, prompt=str, answers=answers(text, "x")) for text in ("good", "bad")
    ]
    with client(workers) as made, scoring(made):
        good, bad = aside.scores(rule_of("math_verify"), records)
    assert [score.value for score in good or ()] == [4.0, 1.0]
    assert bad is None, "and not 0"
    assert aside.ids == ["bad"]
    tried = [index for index, texts in workers.scored if "bad" in texts]
    assert len(tried) == 2
    assert len(set(tried)) == num_workers


@contextmanager
def scoring(made: RewardWorkers) -> Iterator[None]:
    set_grader("math_verify", {}, made)
    try:
        yield
    finally:
        set_grader("math_verify", {}, None)


def test_only_the_runs_own_rules_are_called_elsewhere() -> None:
    with client(PlayedWorkers(1)) as made, scoring(made):
        (elsewhere,) = rule_of("math_verify", {}).score_all([Completion(response="1", answer="2")])
        (own,) = rule_of("2*math_verify").score_all([Completion(response="1", answer="2")])
    (after,) = rule_of("math_verify").score_all([Completion(response="1", answer="2")])
    values = [score.value for score in (elsewhere, own, after) if isinstance(score, Score)]
    assert values == [1.0, 0.0, 0.0]


def test_without_any_worker_the_wait_ends_and_names_them() -> None:
    def look_up() -> dict[int, WorkerRecord]:
        raise StoreUnavailable("away", where="store", fix="none")

    with (
        client(PlayedWorkers(2), none_s=0.05, look_up=look_up) as made,
    ):
        with golden.raises(WaitTimeout):
            made.score_all(answers("a"))
        wait_until(lambda: made._trouble)  # its first look may be later than that
        with golden.raises(WaitTimeout):
            made.score_all(answers("a"))


def test_an_error_that_ends_a_run_is_raised_here() -> None:
    def broken(worker: int, response: str) -> Score:
        raise ClusterError("no namespaces", where="node", fix="another node")

    with client(PlayedWorkers(2, broken)) as made, golden.raises(ClusterError):
        made.score_all(answers("a"))


def test_a_rollouts_time_limit_does_not_count_the_wait_for_a_score() -> None:
    class Ahead(asyncio.SelectorEventLoop):
        """Whose time goes on where the test says so, too."""

        ahead_s = 0.0

        def time(self) -> float:
            return super().time() + self.ahead_s

    limits: list[asyncio.Timeout] = []

    def takes_minutes(worker: int, response: str) -> Score:
        wait_until(lambda: limits[-1].when() is None)  # the caller waits
        loop.ahead_s += 200.0
        return length(worker, response)

    async def run(made: RewardWorkers, then_s: float) -> float:
        async with time_limit(100.0) as limit:
            limits.append(limit)
            score = await made.score(Completion(response="aaaa"))
            loop.ahead_s += then_s
            await asyncio.sleep(0.001)
        return score.value

    with (
        client(PlayedWorkers(1, takes_minutes)) as made,
        asyncio.Runner(loop_factory=Ahead) as runner,
    ):
        loop = runner.get_loop()
        assert isinstance(loop, Ahead)
        assert runner.run(run(made, 0.0)) == 4.0
        with pytest.raises(TimeoutError):
            runner.run(run(made, 200.0))


def test_a_cancelled_wait_frees_its_place() -> None:
    async def run(made: RewardWorkers) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await made.score(Completion(response="slow"))

    workers = PlayedWorkers(1, pause_s=3600.0)
    with client(workers, limit=1) as made:
        asyncio.run(run(made))
        wait_until(lambda: not any(made.choice.in_flight.values()))
    assert "reward workers" not in {thread.name for thread in threading.enumerate()}
