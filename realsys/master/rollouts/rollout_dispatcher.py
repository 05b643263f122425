"""Dispatches prompts to rollout workers and collects their experience, on the master's side.

Answers their requests, consults the staleness ledger (realsys/rollout/staleness/ledger.py, which makes
all decisions) and gives each step its datapoints. Handles metadata only: tensors go from rollout workers
to model workers. Everything runs in the master's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from realsys.api.basics.reward import CORRECT, is_count
from realsys.api.errors import InternalError, RolloutError, WaitTimeout
from realsys.api.worker_configs import DELIVERY_SILENCE_S
from realsys.master.graph.curriculum import Curriculum
from realsys.master.graph.data_schedule import Datapoint, DataSchedule
from realsys.master.graph.feeds import Held
from realsys.master.graph.master_state import Delivered, Rollouts
from realsys.master.rollouts.recent_episodes import RecentEpisodes
from realsys.master.rollouts.routes import Routes
from realsys.rewards.scores import too_many
from realsys.rollout.staleness.ledger import StalenessLedger
from realsys.rollout.staleness.tickets import PromptGrant
from realsys.runtime.progress import tick
from realsys.transport import rollout_messages as rm
from realsys.worker.live_scaling import DrainDeadlines, Scaling

logger = logging.getLogger(__name__)

SETUP_TIMEOUT_S = 1800.0
SAY_EVERY_S = 60.0
LOOK_S = 10.0  # at what it waits for
MAX_UNDELIVERED = 5  # times that the answers to one prompt could not be sent
MAX_UNPLAYED = 2  # times that a prompt could not be played or scored: then it is set aside
PROBE_S = 16.0  # between two prompts that a worker gets while nothing succeeds there
JUDGE_EVERY_S = 1.0  # the newest episodes, at most

Clear = Callable[[int, Sequence[str]], Awaitable[None]]


async def _nothing(worker: int, ids: Sequence[str]) -> None:
    pass


class RolloutDispatcher:
    """Grants prompts to rollout workers and accepts their deliveries.

    Args:
        recent: judges the episodes that workers tell of.
        clock: in seconds.
        say: called with what the run waits for, and with nothing when it goes on.
        silence_s: a step waits so long for its batch after the last delivery, or after it began to wait.
    """

    def __init__(
        self,
        recent: RecentEpisodes | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda text: None,
        silence_s: float = DELIVERY_SILENCE_S,
    ) -> None:
        self._recent, self._clock, self._say = recent or RecentEpisodes(), clock, say
        self._silence_s, self._delivered_s = silence_s, -math.inf
        self._next_probe_s: dict[str, float] = {}  # worker → its next prompt while nothing succeeds
        self._judged_s = -math.inf
        self._is_awaited = False  # a step waits for its batch
        self._clear: Clear = _nothing
        self._unused: list[tuple[int, str]] = []
        self._changed = asyncio.Condition()
        self._sizes: dict[str, int] = {}
        self.source_items: Mapping[str, int] = {}  # of the rollout workers' data set, a mixture
        self._routes: Routes | None = None
        self._ledger: StalenessLedger | None = None
        self._schedule: DataSchedule | None = None
        self._curriculum: Curriculum | None = None
        self._drawn: dict[int, Datapoint] = {}  # a datapoint's place → it, with a curriculum
        self._numbers: dict[str, int] = {}  # id of a datapoint that was given out → its place
        self._given: dict[int, str] = {}  # its place → the try of it that was given out last
        self._delivered: dict[int, Delivered] = {}
        self._undelivered: Counter[int] = Counter()
        self._unplayed: Counter[int] = Counter()  # prompt → times that it was not played or scored
        self._in_outages: Counter[int] = Counter()  # the same, while nothing succeeded
        self._set_aside: list[str] = []  # ids of those with which that happened too often
        self._num_unscored = 0  # of these, those that got no reward
        self._num_kept = 0
        self._losses: Counter[str] = Counter()  # times that a worker has ended or begun anew
        self._taken: tuple[int, ...] = ()
        self._failed: RolloutError | None = None
        self._stats: list[Mapping[str, float]] = []
        self._over = False
        self._scaling: Scaling | None = None
        self._leaving = DrainDeadlines()

    # ---- set-up -----------------------------------------------------------------------------

    async def dataset_size(self, *, timeout_s: float = SETUP_TIMEOUT_S) -> int:
        """Returns the number of records in the rollout workers' data set, once the first has reported it.

        Raises:
            WaitTimeout: none has reported. RolloutError: they have different sizes.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._sizes)
        except TimeoutError:
            raise WaitTimeout(
                f"no rollout worker asked for work in {timeout_s:g} s",
                where="rollout workers",
                fix="see their logs: realsys logs TRIAL rollout_worker",
            ) from None
        return next(iter(self._sizes.values()))

    async def open(
        self,
        ledger: StalenessLedger,
        schedule: DataSchedule,
        *,
        routes: Routes,
        clear: Clear,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Starts granting prompts.

        Args:
            clear: makes a model worker drop unused datapoints.
            curriculum: chooses the records instead of ``schedule``.
        """
        async with self._changed:
            self._ledger, self._schedule, self._routes = ledger, schedule, routes
            self._curriculum = curriculum
            self._recent.batch_size = ledger.batch_size
            self._recent.has_succeeded |= bool(ledger.version or self._delivered)
            for found in self._delivered.values():
                routes.took(found.number, found.holder)
            self._clear = clear
            self._changed.notify_all()

    async def close(self) -> None:
        """Answers every further request with the end of work."""
        async with self._changed:
            self._over = True
            self._changed.notify_all()

    # ---- requests of rollout workers --------------------------------------------------------

    async def handle(self, request: Any) -> Any:
        """Answers one request of a rollout worker."""
        async with self._changed:
            if isinstance(request, rm.AskPlaces):
                return await self._ask_places(request)
            self._note_episodes(request.worker, request.episodes)
            if isinstance(request, rm.TakeWork):
                return await self._take_work(request)
            if isinstance(request, rm.Deliver):
                return self._deliver(request)
            return self._give_up(request)

    def _note_episodes(self, worker: str, outcomes: Sequence[rm.EpisodeTry]) -> None:
        """Takes what a worker tells; the run ends, or waits, by what the newest episodes say."""
        if not outcomes:
            return
        now_s, waited = self._clock(), self._recent.nothing_succeeds
        self._recent.note(worker, outcomes, now_s=now_s)
        self._judge()
        if self._failed is not None or waited != self._recent.nothing_succeeds:
            self._changed.notify_all()

    def _judge(self) -> None:
        """Decides whether the run must end by its newest episodes; at most each JUDGE_EVERY_S."""
        now_s = self._clock()
        if self._failed is not None or now_s - self._judged_s < JUDGE_EVERY_S:
            return
        self._judged_s = now_s
        in_flight = {id for id, number in self._numbers.items() if self._is_in_flight(number)}
        self._failed = self._recent.fault(
            now_s=now_s, in_flight=in_flight, is_awaited=self._is_awaited
        )

    def _is_in_flight(self, number: int) -> bool:
        return self._ledger is not None and self._ledger.is_in_flight(number)

    async def _ask_places(self, request: rm.AskPlaces) -> rm.Places:
        first = next(iter(self._sizes.values()), request.dataset_size)
        if first != request.dataset_size:
            raise RolloutError(
                f"its data set has {request.dataset_size} records, another worker's has {first}",
                where=request.worker,
                fix="all rollout workers must see the same files",
            )
        sources = self.source_items if self._sizes else request.source_items
        if sources != request.source_items:
            raise RolloutError(
                f"its sources have {dict(request.source_items)} records, another worker's {dict(sources)}",
                where=request.worker,
                fix="all rollout workers must see the same files",
            )
        self._sizes[request.worker], self.source_items = request.dataset_size, sources
        self._recent.group_size = request.group_size
        self._changed.notify_all()
        await self._changed.wait_for(
            lambda: self._routes is not None and self._routes.is_known(request.worker)
        )
        self._lose(request.worker)
        self._recent.joined(request.worker)
        assert self._routes is not None
        return self._routes.places(request.worker)

    async def _take_work(self, request: rm.TakeWork) -> rm.Work:
        tickets: list[rm.Ticket] = []
        deadline = self._clock() + request.wait_s
        losses = self._losses[request.worker]
        while not (over := self._over or self._may_leave(request.worker)):
            if self._losses[request.worker] != losses:
                break  # the requesting worker has ended
            while len(tickets) < request.room and (ticket := self._next_ticket(request.worker)):
                tickets.append(ticket)
            left = deadline - self._clock()
            if tickets or left <= 0:
                break
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                break
        return rm.Work(
            tickets=tuple(tickets),
            over=over,
            # not that of the worker alone: others can play what it gives up
            nothing_succeeds=self._recent.nothing_succeeds and not self._recent.is_of_one,
        )

    def _next_ticket(self, worker: str) -> rm.Ticket | None:
        if self._ledger is None or self._schedule is None or self._routes is None:
            return None
        if worker in self._leaving or not self._may_try(worker):
            return None
        offer = self._ledger.offer()
        if offer is None:
            return None
        urgent = offer.target_step == self._ledger.next_step  # the next step can't do without it
        target = self._routes.target(worker, urgent=urgent)
        if target is None or self._ledger.admit(worker) is None:
            return None
        self._recent.at_once = max(self._recent.at_once, self._ledger.num_in_flight)
        if self._recent.nothing_succeeds_at(worker):
            self._next_probe_s[worker] = self._clock() + PROBE_S
        self._routes.gave(offer.number, worker, target)
        point = self._datapoint(offer)
        self._numbers[point.id] = offer.number
        self._given[offer.number] = rm.sample_id(point.id, offer.tries)
        return rm.Ticket(
            id=point.id,
            index=point.index,
            tries=offer.tries,
            min_version=offer.min_version,
            target=target,
            failures=self._unplayed[offer.number] + self._in_outages[offer.number],
        )

    def _may_try(self, worker: str) -> bool:
        """True if a prompt may be given to a worker; while nothing succeeds, one from time to time."""
        if not self._recent.nothing_succeeds_at(worker):
            return True
        return self._clock() >= self._next_probe_s.get(worker, -math.inf)

    def _datapoint(self, grant: PromptGrant) -> Datapoint:
        """Returns the record of a prompt that is granted, the same one each time."""
        if self._curriculum is None:
            assert self._schedule is not None
            return self._schedule.at(grant.number)
        if grant.number not in self._drawn:
            self._drawn[grant.number] = self._curriculum.draw(grant.target_step)
        return self._drawn[grant.number]

    def _deliver(self, request: rm.Deliver) -> rm.Verdict:
        number = self._numbers.get(request.id)
        sample_id = rm.sample_id(request.id, request.tries)
        if self._is_kept(sample_id, request.holder):
            # told twice: its tensors are those that we keep
            return rm.Verdict(kept=True, version=self._version)
        if number is None or self._ledger is None:
            self._unused.append((request.holder, sample_id))
            return rm.Verdict(kept=False, why="nobody asked for it", version=self._version)
        verdict = self._ledger.deliver(
            number, request.tries, oldest=request.oldest, newest=request.newest
        )
        if not verdict.kept:
            logger.info("delivery refused id=%s reason=%s", sample_id, verdict.why)
            self._unused.append((request.holder, sample_id))
        elif request.meta.ids != (sample_id,):
            raise InternalError(
                f"datapoint {sample_id} came as {request.meta.ids}", where=request.worker
            )
        else:
            self._num_kept += 1
            self._delivered_s = self._clock()
            tick()  # the master waits, but not for nothing
            if self._routes is not None:
                self._routes.took(number, request.holder)
            self._delivered[number] = Delivered(
                number=number, holder=request.holder, meta=request.meta, stats=request.stats
            )
        self._changed.notify_all()
        return rm.Verdict(kept=verdict.kept, why=verdict.why, version=self._version)

    def _is_kept(self, sample_id: str, holder: int) -> bool:
        kept = self._delivered.values()
        return any(d.holder == holder and d.meta.ids == (sample_id,) for d in kept)

    @property
    def _version(self) -> int:
        return self._ledger.version if self._ledger is not None else 0

    def _give_up(self, request: rm.GiveUp) -> rm.GaveUp:
        number, gone = self._numbers.get(request.id), False
        if number is not None and self._ledger is not None:
            if not (request.filtered or request.unscored or request.undelivered):
                now_s = self._clock()
                self._recent.gave_up(request.worker, request.id, request.why, now_s=now_s)
            set_aside = self._is_set_aside(number, request)
            gone = request.filtered or set_aside
            done = self._ledger.give_up(number, request.tries, filtered=gone)
            if not done.kept:  # somebody else has it by now
                return rm.GaveUp(version=self._version)
            self._left(number, rm.sample_id(request.id, request.tries))
            if gone:
                self._stats.append(request.stats)
                self._note_success(request.id, request.stats)
                del self._numbers[request.id], self._given[number]
                self._drawn.pop(number, None)
                self._forget_failures(number)
                if set_aside:
                    self._put_aside(request)
            else:
                self._note_failure(number, request)
            self._changed.notify_all()
        return rm.GaveUp(closed=gone, version=self._version)

    def _is_set_aside(self, number: int, request: rm.GiveUp) -> bool:
        """True if a prompt that is given up is not given out again, unlike those of an outage."""
        if request.filtered or request.undelivered:
            return False
        return self._counts(request) and self._unplayed[number] + 1 >= MAX_UNPLAYED

    def _counts(self, request: rm.GiveUp) -> bool:
        """True if it is the prompt's fault that it was given up, not an outage's."""
        return request.unscored or not self._recent.nothing_succeeds_at(request.worker)

    def _note_failure(self, number: int, request: rm.GiveUp) -> None:
        logger.warning(
            "rollout failed id=%s by=%s reason=%s", request.id, request.worker, request.why
        )
        if not request.undelivered:
            counter = self._unplayed if self._counts(request) else self._in_outages
            counter[number] += 1
            return
        self._undelivered[number] += 1
        if self._undelivered[number] >= MAX_UNDELIVERED:
            self._failed = RolloutError(
                f"the answers to prompt {request.id} could not be sent {MAX_UNDELIVERED} times: "
                f"{request.why}",
                where=request.worker,
                fix="see the rollout workers' logs; then realsys resume",
            )

    def _forget_failures(self, number: int) -> None:
        self._undelivered.pop(number, None)
        self._unplayed.pop(number, None)
        self._in_outages.pop(number, None)

    def _note_success(self, id: str, stats: Mapping[str, float]) -> bool:
        """Notes for the curriculum how many answers to a prompt are correct; False if nothing says it."""
        if self._curriculum is None:
            return True
        rate = stats.get(f"reward/{self._curriculum.source_of(id)}/{CORRECT}")
        if rate is not None:
            self._curriculum.answered(id, rate)
        return rate is not None

    def _put_aside(self, request: rm.GiveUp) -> None:
        """Counts a prompt that could not be played or scored for the second time; it is as if filtered.

        How many may not be played is the recent episodes' affair; without a reward may be few.
        """
        self._set_aside.append(request.id)
        logger.warning(
            "record set aside id=%s num=%d reason=%s", request.id, len(self._set_aside), request.why
        )
        if not request.unscored:
            return
        self._num_unscored += 1
        num_aside, num_all = self._num_unscored, self._num_unscored + self._num_kept
        if self._failed is None and too_many(num_aside, num_all):
            self._failed = RolloutError(
                f"{request.why}; {num_aside} of {num_all} records got no reward",
                where=request.worker,
                fix="mend the reward rule or the environment; then realsys resume",
            )

    def _forget_delivered(self, number: int) -> None:
        old = self._delivered.pop(number)
        if self._routes is not None:
            self._routes.left(number)
        self._unused.append((old.holder, old.meta.ids[0]))

    def _left(self, number: int, sample_id: str) -> None:
        """Handles a grant that ended without a delivery. Its tensors may have been stored all the same."""
        if self._routes is not None:
            if (holder := self._routes.holder(number)) is not None:
                self._unused.append((holder, sample_id))
            self._routes.left(number)

    async def lost(self, worker: str) -> None:
        """Handles the end of a rollout worker: its prompts are reassigned."""
        async with self._changed:
            self._lose(worker)

    def _lose(self, worker: str) -> None:
        self._losses[worker] += 1
        self._recent.lost(worker)
        if self._ledger is not None and (numbers := self._ledger.lost(worker)):
            logger.warning("prompts reassigned worker=%s num=%d", worker, len(numbers))
            for number in numbers:
                self._left(number, self._given[number])
        self._changed.notify_all()

    # ---- workers that come and go -----------------------------------------------------------

    async def scaled(self, scaling: Scaling) -> None:
        """Applies the added and draining workers. Call it repeatedly, because deadlines pass.

        A draining worker receives no new prompts and is dismissed when idle; prompts it still holds at
        the deadline are reassigned.
        """
        async with self._changed:
            if self._routes is not None:
                for worker, like in scaling.added.items():
                    self._routes.add(worker, like=like)
            now_s = time.monotonic()
            self._leaving.update(scaling, now_s=now_s)
            for worker in self._leaving.overdue(now_s=now_s):
                self._lose(worker)
            if scaling != self._scaling:
                self._scaling = scaling
                self._changed.notify_all()

    def _may_leave(self, worker: str) -> bool:
        holds = self._ledger is not None and self._ledger.is_holding(worker)
        return worker in self._leaving and not holds

    # ---- for the steps ----------------------------------------------------------------------

    async def load(self, step: int) -> list[Held]:
        """Returns the datapoints of step ``step`` in training order; waits until the ledger has a batch.

        Raises:
            WaitTimeout: nothing was delivered for ``silence_s``; names what it waits for.
            RolloutError: too many episodes fail, or nothing succeeds.
        """
        async with self._changed:
            ledger = self._open_ledger()
            self._recent.begin_to_wait(now_s=self._clock())
            self._is_awaited, self._judged_s = True, -math.inf
            try:
                numbers = await self._next_batch(ledger, step)
            finally:
                self._is_awaited = False
            self._say("")
            for late in ledger.batch_taken(numbers):  # made again
                self._forget_delivered(late)
            self._taken = numbers
            batch = [self._delivered[number] for number in numbers]
            return [(delivered.meta, delivered.holder) for delivered in batch]

    async def _next_batch(self, ledger: StalenessLedger, step: int) -> tuple[int, ...]:
        """Returns the places of step ``step``'s datapoints; waits until there are enough."""
        began_s = self._clock()
        say_s = self._clock() + SAY_EVERY_S
        while (numbers := ledger.next_batch()) is None:
            tick()  # it waits, as long as it may; it does not stand still
            waits = self._recent.waits(now_s=self._clock())
            self._say(waits)
            self._judge()
            if self._failed is not None:
                raise self._failed
            if self._clock() > max(began_s, self._delivered_s) + self._silence_s:
                raise WaitTimeout(
                    f"no batch for step {step}, and no delivery in {self._silence_s:g} s; it waits for "
                    + "; ".join(map(str, ledger.waits_for()[:5])),
                    where="rollouts",
                    fix="see the logs of those workers: realsys logs TRIAL WORKER",
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            if self._clock() >= say_s:
                say_s = self._clock() + SAY_EVERY_S
                logger.info(
                    "waiting for rollouts step=%d for=%s why_no_more=%s%s",
                    step,
                    "; ".join(map(str, ledger.waits_for()[:5])),
                    ledger.why_not(),
                    f" waits={waits}" if waits else "",
                )
        return numbers

    async def trained(self, step: int) -> None:
        """Notes that a step is done: one version more, and room for new prompts.

        Raises:
            RolloutError: a curriculum does not get to know which answers are correct.
        """
        async with self._changed:
            self._open_ledger().trained(self._taken)
            for number in self._taken:
                delivered = self._delivered.pop(number)
                self._stats.append(delivered.stats)
                id = base_id(delivered.meta.ids[0])
                if not self._note_success(id, delivered.stats):
                    raise RolloutError(
                        f"nothing says how many answers to prompt {id} are correct",
                        where="task.agent, task.env and task.curriculum",
                        fix="score with AnswerScoring and keep its info in the trajectory's stats "
                        "(docs/adding_an_agent.md), or use task.curriculum=none",
                    )
                self._drawn.pop(number, None)
                self._numbers.pop(id, None)
                self._forget_failures(number)
                self._given.pop(number, None)
                if self._routes is not None:
                    self._routes.left(number)
            if self._curriculum is not None:
                self._curriculum.trained(step)
            unused, self._unused = self._unused, []
            self._changed.notify_all()
        for holder in sorted({holder for holder, _ in unused}):
            names = dict.fromkeys(name for at, name in unused if at == holder)
            await self._clear(holder, list(names))

    def metrics(self) -> dict[str, float]:
        """Returns means of the rollouts' statistics since the last call (of ``reward/raised`` the sum), and
        the ledger's counts."""
        rows, self._stats = self._stats, []
        row: dict[str, float] = {f"rollout/{k}": v for k, v in self._open_ledger().counts().items()}
        if self._set_aside:
            row["rollout/set_aside"] = len(self._set_aside)
        row |= {f"rollout/{k}": v for k, v in self._recent.metrics().items()}
        for key in sorted({key for stats in rows for key in stats}):
            values = [stats[key] for stats in rows if key in stats]
            is_sum = key.startswith("reward/") and is_count(key)
            row[f"rollout/{key}"] = sum(values) / (1 if is_sum else len(values))
        return row

    def _open_ledger(self) -> StalenessLedger:
        if self._ledger is None:
            raise InternalError("no prompts have been given out yet", where="rollouts")
        return self._ledger

    # ---- for a checkpoint -------------------------------------------------------------------

    def snapshot(self) -> Rollouts:
        """Returns the state between two steps."""
        return Rollouts(
            ledger=self._open_ledger().snapshot(),
            delivered=tuple(self._delivered[number] for number in sorted(self._delivered)),
            dataset_size=next(iter(self._sizes.values())),
            drawn=dict(self._drawn),
            set_aside=tuple(self._set_aside),
            num_unscored=self._num_unscored,
            num_kept=self._num_kept,
            unplayed=dict(self._unplayed),
            in_outages=dict(self._in_outages),
        )

    def restore(self, rollouts: Rollouts) -> None:
        """Restores what ``snapshot`` returned; before ``open``."""
        self._delivered = {found.number: found for found in rollouts.delivered}
        self._drawn = dict(rollouts.drawn)
        self._set_aside = list(rollouts.set_aside)
        self._num_unscored, self._num_kept = rollouts.num_unscored, rollouts.num_kept
        self._unplayed = Counter(rollouts.unplayed)
        self._in_outages = Counter(rollouts.in_outages)


def base_id(sample_id: str) -> str:
    """Returns the datapoint id of a sample, without the number of tries."""
    return sample_id.partition(".")[0]


def base_ids(ids: Sequence[str]) -> list[str]:
    """Returns the datapoint ids of samples."""
    return [base_id(name) for name in ids]
