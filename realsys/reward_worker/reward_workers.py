"""Scores a process's answers on the run's reward workers, whichever thread has them.

    answers ── WorkerChoice ──▶ reward_worker/i ──▶ scores
                  ▲   lost, or no score: another worker │
                  └─────────────────────────────────────┘

What a worker had when it was lost goes to others. An answer whose rule gives no score on two workers (the
only one: twice) gets its RewardError, as does one with which three workers were lost. No answer gets a
score that no rule gave.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial

from realsys.api.basics.reward import Completion, Score
from realsys.api.errors import RealsysError, RewardError, WaitTimeout, WorkerLost
from realsys.api.scheduling import WorkerType
from realsys.reward_worker.connection import Connection
from realsys.reward_worker.time_limit import not_counted
from realsys.reward_worker.worker_choice import ANSWERS_A_REQUEST, WorkerChoice
from realsys.runtime.event_loop_thread import EventLoopThread
from realsys.runtime.first_error import first_error
from realsys.runtime.progress import tick
from realsys.transport.channel import RequestClient, client_context
from realsys.transport.reward_messages import answer_to_json
from realsys.trial.records import WorkerRecord

logger = logging.getLogger(__name__)

# Intervals of looking for registrations while answers are waited for; the latter while all are connected.
# Each look lists a folder if the store is one.
LOOK_S, LOOK_WHOLE_S = 1.0, 3.0
NONE_S = 300.0  # how long none may be connected; the supervisor restarts them, or ends the run
SAY_S = 30.0  # interval of saying whom is waited for
MOST_LOSSES = 3  # an answer with which so many workers were lost is taken for the cause

Result = Score | RewardError
LookUp = Callable[[], Mapping[int, WorkerRecord]]


@dataclass(eq=False)
class RewardWorkers:
    """The client of all reward workers of a run; a ``Grader``. Use as a context manager.

    Args:
        look_up: returns the registered workers of this attempt by index; blocks; may raise a RealsysError.
        connect: endpoint, name of the worker and a context → a client, not yet open.
        looked_at: fields of an answer that the rules look at.
        waiting_for: shows whom a blocked caller waits for.
    """

    choice: WorkerChoice
    _: KW_ONLY
    look_up: LookUp
    connect: Callable[..., RequestClient]
    looked_at: Collection[str]
    waiting_for: Callable[[str], AbstractContextManager[None]] = lambda text: nullcontext()
    none_s: float = NONE_S

    def __post_init__(self) -> None:
        self._connections: dict[int, Connection] = {}
        self._waiting = 0  # answers of this process without a score
        self._trouble = ""  # why the last look at registrations failed
        self._thread = EventLoopThread(self._serve, name="reward workers")

    def __enter__(self) -> RewardWorkers:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.stop()

    # ---- called by any thread -----------------------------------------------------------------

    def score_all(self, answers: Sequence[Completion]) -> list[Result]:
        """Scores answers, in order; blocks.

        Raises:
            WaitTimeout: no reward worker was there for five minutes. Also errors of theirs that end a run.
        """
        if not answers:
            return []
        with self.waiting_for(f"reward_worker/0…{self.choice.num_workers - 1}"):
            return asyncio.run_coroutine_threadsafe(self._all(answers), self._loop).result()

    async def score(self, answer: Completion) -> Score:
        """Scores one answer, without blocking the caller's event loop.

        Raises:
            RewardError: two workers gave it no score. Also as ``score_all``.
        """
        scored = asyncio.run_coroutine_threadsafe(self._all([answer]), self._loop)
        with not_counted():
            (result,) = await asyncio.wrap_future(scored)
        if isinstance(result, RewardError):
            raise result
        return result

    # ---- on the thread's event loop -----------------------------------------------------------

    async def _serve(self, ready: Callable[[], None]) -> None:
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        self._has_work, self._turn, self._context = (
            asyncio.Event(),
            asyncio.Lock(),
            client_context(),
        )
        ready()
        try:
            await self._follow()
        finally:
            for connection in self._connections.values():
                await connection.close()
            self._context.term()

    async def _follow(self) -> None:
        """Keeps a connection to each registered worker while answers are waited for."""
        while True:
            await self._has_work.wait()
            tick()  # waiting is no stall: it has a deadline of its own
            try:
                found = await asyncio.to_thread(self.look_up)
            except RealsysError as error:  # those that are connected still score
                self._trouble = f"; {error.what}"
                logger.info("reward workers not looked up error=%s", error.what)
            else:
                self._trouble = ""
                await self._connect_to(found)
            is_whole = len(self.choice.up) == self.choice.num_workers
            await asyncio.sleep(LOOK_WHOLE_S if is_whole else LOOK_S)

    async def _connect_to(self, found: Mapping[int, WorkerRecord]) -> None:
        for index, connection in list(self._connections.items()):
            if found.get(index) != connection.record:
                connection.lose("it ended")
            if connection.is_lost:
                await connection.close()
                del self._connections[index]
        for index in found.keys() - self._connections.keys():
            name = f"{WorkerType.REWARD_WORKER}/{index}"
            self._connections[index] = Connection(
                name=name,
                record=found[index],
                connect=partial(self.connect, peer_name=name, context=self._context),
                on_change=self._notify,
            )
            self._connections[index].open()

    def _notify(self) -> None:
        self.choice.up = {index for index, c in self._connections.items() if c.is_up}
        self._changed.set()  # wakes all that wait
        self._changed = asyncio.Event()

    async def _all(self, answers: Sequence[Completion]) -> list[Result]:
        """Scores answers in requests of a few; at most so many are in flight as ``choice`` allows."""
        texts = [answer_to_json(answer, self.looked_at) for answer in answers]
        self._waiting += len(texts)
        self._has_work.set()
        try:
            return await self._each(
                [texts[i : i + ANSWERS_A_REQUEST] for i in range(0, len(texts), ANSWERS_A_REQUEST)]
            )
        finally:
            self._waiting -= len(texts)
            if not self._waiting:
                self._has_work.clear()

    async def _each(
        self, parts: Sequence[Sequence[str]], avoid: Collection[int] = (), losses: int = 0
    ) -> list[Result]:
        async with first_error(), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._scored(part, avoid, losses), name="scores")
                for part in parts
            ]
        return [result for task in tasks for result in task.result()]

    async def _scored(
        self, answers: Sequence[str], avoid: Collection[int], losses: int
    ) -> list[Result]:
        """Scores the answers of one request.

        Args:
            avoid: the worker on which they failed.
            losses: workers that were lost with them.
        """
        try:
            # At last alone on a worker, so that no answer is taken for the cause that was only beside it.
            room = self.choice.limit if losses + 1 == MOST_LOSSES else len(answers)
            async with self._worker(room, avoid) as (index, connection):
                results = await connection.score(answers)
        except WorkerLost as error:
            if error.from_worker:
                raise
            logger.info("answers go to another reward worker num=%d", len(answers))
            if losses + 1 == MOST_LOSSES:
                return [_lost_error(error)] * len(answers)
            # One by one: if one of them ended the worker, the others are scored.
            return await self._each([[answer] for answer in answers], avoid, losses + 1)
        failed = [i for i, result in enumerate(results) if isinstance(result, RewardError)]
        if failed and not avoid:
            again = await self._scored([answers[i] for i in failed], (index,), losses)
            for i, result in zip(failed, again, strict=True):
                results[i] = result
        return results

    @asynccontextmanager
    async def _worker(
        self, num_answers: int, avoid: Collection[int]
    ) -> AsyncIterator[tuple[int, Connection]]:
        """Takes a worker with room while the block runs. Raises WaitTimeout: none was there."""
        # In turn, or one that needs much room would never get it; but none waits for one that may have
        # to wait for another worker's restart.
        async with nullcontext() if avoid else self._turn:
            index = await self._free_worker(num_answers, avoid)
        try:
            yield index, self._connections[index]
        finally:
            self.choice.give_back(index, num_answers)
            self._notify()

    async def _free_worker(self, num_answers: int, avoid: Collection[int]) -> int:
        clock = asyncio.get_running_loop().time
        there_s = logged_s = clock()
        while (index := self.choice.take(num_answers, avoid=avoid)) is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout=LOOK_S)
            now_s = clock()
            if self.choice.candidates(avoid):
                there_s = now_s  # they are at work: no time-out
            if now_s - logged_s > SAY_S:
                logged_s = now_s
                logger.info("waiting for=%s", self.choice.describe())
            if now_s - there_s > self.none_s:
                raise WaitTimeout(
                    f"no reward worker was there for {self.none_s:g} s: {self.choice.describe()}"
                    f"{self._trouble}",
                    where="name resolution",
                    fix="see their logs: realsys logs TRIAL reward_worker",
                )
        return index


def _lost_error(error: RealsysError) -> RewardError:
    return RewardError(
        f"{MOST_LOSSES} reward workers were lost while they scored an answer; the last: {error.what}",
        where="reward workers",
        fix="see why: realsys logs TRIAL reward_worker; for more memory, scheduling.reward_worker.mem",
    )
