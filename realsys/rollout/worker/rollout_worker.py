"""Main loop of a rollout worker: requests tickets from the master, runs several at once, delivers
results.

    master ── tickets ──▶ RolloutLoop ── GroupRunner.run ──▶ tensors to a model worker, metadata to master

group.py runs one ticket, and plays an episode that fails again; the master decides whether a prompt is
given out again that could not be played, and hears of every try (RolloutLoop adds them to what it sends).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from realsys.api.basics.success_range import SuccessPlace, place_of_success
from realsys.api.errors import ClusterError, RealsysError, RewardError, encodable
from realsys.data.sequence_sample import SequenceSample
from realsys.rollout.worker.episode_log import EpisodeLog, TicketEnd
from realsys.rollout.worker.episode_tries import first_line
from realsys.rollout.worker.group import EpisodeGroup, GroupRunner
from realsys.rollout.worker.peers import Peer
from realsys.rollout.worker.rollout_log import RolloutLog, TicketOutcome
from realsys.runtime.first_error import first_error
from realsys.runtime.progress import tick
from realsys.transport.rollout_messages import (
    AskPlaces,
    Deliver,
    EpisodeTry,
    GaveUp,
    GiveUp,
    Places,
    TakeWork,
    Ticket,
    Verdict,
    Work,
)
from realsys.trial.episode_records import EpisodeState

logger = logging.getLogger(__name__)

Put = Callable[[int, SequenceSample], Awaitable[None]]
SETUP_S = 3600.0  # covers loading of models and of a checkpoint
MASTER_S = 300.0  # the master may be writing a checkpoint
POLL_S = 5.0  # time for which the master holds a request for work; also the loop's tick interval
_IDLE_S = 0.05  # pause after an immediate reply without work
_STATES = {
    TicketOutcome.KEPT: EpisodeState.DELIVERED,
    TicketOutcome.REFUSED: EpisodeState.REFUSED,
    TicketOutcome.FILTERED: EpisodeState.FILTERED,
    TicketOutcome.FAILED: EpisodeState.FAILED,
    TicketOutcome.UNSCORED: EpisodeState.UNSCORED,
}


@dataclass(frozen=True, kw_only=True)
class RolloutLimits:
    """Concurrency limit and reward filter of groups. Fields as in ``RolloutWorker``."""

    max_concurrent_rollouts: int = 16
    success_rate_lb: float | None = None
    success_rate_ub: float | None = None

    def why_filtered(
        self, rewards: Sequence[float], by_role: Mapping[str, Sequence[float]] | None = None
    ) -> str:
        """Returns why a group with these rewards is not trained on; empty if it is (dynamic sampling).

        Args:
            rewards: one per episode.
            by_role: of each role's sequences, where there are several roles. These are compared within
                themselves: what one wins the other may lose, so that the mean over both says nothing.
        """
        if by_role is not None and len(by_role) > 1:
            return self._why_roles_filtered(by_role)
        rate, low, high = fmean(rewards), self.success_rate_lb, self.success_rate_ub
        match place_of_success(rate, lowest=low, highest=high):
            case SuccessPlace.LOW:
                return f"its mean reward {rate:g} is below {low:g}"
            case SuccessPlace.HIGH:
                return f"its mean reward {rate:g} is above {high:g}"
            case _:
                return ""

    def _why_roles_filtered(self, by_role: Mapping[str, Sequence[float]]) -> str:
        """Of each role that all rewards are equal, below the range or above it; empty: not of each."""
        low, high = self.success_rate_lb, self.success_rate_ub
        if low is None and high is None:
            return ""
        why = []
        for role, rewards in by_role.items():
            least, most = min(rewards), max(rewards)
            if least == most:
                why.append(f"all of {role or 'the policy'} are {least:g}")
            elif low is not None and most < low:
                why.append(f"all of {role or 'the policy'} are below {low:g}")
            elif high is not None and least > high:
                why.append(f"all of {role or 'the policy'} are above {high:g}")
            else:
                return ""
        return f"its rewards teach no role: {', '.join(why)}"


@dataclass(eq=False, repr=False, kw_only=True)
class RolloutLoop:
    """Work of one rollout worker. ``run`` is called once.

    Args:
        connect: tensor servers' endpoints → function that sends a sample to a model worker by index.
    """

    name: str
    master: Peer
    groups: GroupRunner
    connect: Callable[[tuple[str, ...]], Put]
    log: RolloutLog
    episodes: EpisodeLog
    limits: RolloutLimits

    def __post_init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs until the master ends the run; groups in progress are then dropped.

        Raises:
            WaitTimeout: the master does not answer.
        """
        places = await self._places()
        put = self.connect(places.endpoints)
        async with first_error(), asyncio.TaskGroup() as tasks:
            while True:
                room = await self._room()
                work = await self._take(room)
                for ticket in work.tickets:
                    self.episodes.granted(ticket)
                    task = tasks.create_task(
                        self._one(ticket, places.holders[ticket.target], put), name=ticket.id
                    )
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
                if work.over:
                    break
            logger.info("work ended dropped=%d", len(self._running))
            for task in tuple(self._running):
                task.cancel()

    async def _places(self) -> Places:
        """Requests the destinations of results from the master, which replies when everything is set up."""
        dataset = self.groups.dataset
        ask = AskPlaces(
            worker=self.name,
            dataset_size=len(dataset),
            source_items=getattr(dataset, "source_items", {}),
            group_size=self.groups.group_size,
        )
        call = self.master.call(ask, what="the first question", timeout_s=SETUP_S)
        async with first_error(), asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(call, name="first question")
            while not asking.done():
                tick()
                await asyncio.wait({asking}, timeout=POLL_S)
        places: Places = asking.result()
        if not places.holders:
            raise ClusterError(
                "no model worker accepts trajectories",
                where=self.master.name,
                fix="report this as a bug",
            )
        return places

    async def _room(self) -> int:
        """Returns how many more tickets may be started; waits a while for one to end if none may."""
        limit = self.limits.max_concurrent_rollouts
        if len(self._running) >= limit:
            tick()
            await asyncio.wait(self._running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        return max(0, limit - len(self._running))

    async def _take(self, room: int) -> Work:
        tick()
        clock = asyncio.get_running_loop().time
        began_s = clock()
        take = TakeWork(
            worker=self.name,
            room=room,
            wait_s=POLL_S if room else 0.0,  # without room it only reports
            episodes=self._report(),
        )
        work: Work = await self.master.call(take, what="a question for work", timeout_s=MASTER_S)
        self.groups.retries.nothing_succeeds = work.nothing_succeeds
        if not work.tickets and not work.over and clock() - began_s < _IDLE_S:
            await asyncio.sleep(_IDLE_S)
        return work

    def _report(self) -> tuple[EpisodeTry, ...]:
        return self.groups.retries.report(now_s=asyncio.get_running_loop().time())

    # ---- one ticket ---------------------------------------------------------------------------

    async def _one(self, ticket: Ticket, holder: int, put: Put) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        group: EpisodeGroup | None = None
        closed = False
        try:
            group = await self.groups.run(ticket)
            if why := self.limits.why_filtered(group.rewards, group.rewards_of_roles):
                outcome = TicketOutcome.FILTERED
            else:
                await put(holder, group.sample)
        # An error of agent, environment or server: the prompt is tried again.
        except Exception as error:
            outcome, why = TicketOutcome.FAILED, first_line(error)
            # Errors of realsys already carry place and reason
            with_trace = not isinstance(error, RealsysError)
            if isinstance(error, RewardError):
                outcome, why = TicketOutcome.UNSCORED, f"{why} ({error.where})"
                with_trace = ticket.tries == 0
            text = "rollout failed id=%s tries=%d why=%s"
            logger.warning(text, ticket.id, ticket.tries, why, exc_info=with_trace)
        else:
            if not why:
                verdict = await self._deliver(ticket, holder, group, clock() - began_s)
                outcome = TicketOutcome.KEPT if verdict.kept else TicketOutcome.REFUSED
                why, version = verdict.why, verdict.version
        why = encodable(why)  # of any exception's text
        if outcome in (TicketOutcome.FILTERED, TicketOutcome.FAILED, TicketOutcome.UNSCORED):
            gave_up = await self._give_up(ticket, outcome, why, group, clock() - began_s)
            closed, version = gave_up.closed, gave_up.version
        end = TicketEnd(state=_STATES[outcome], why=why, version=version, is_closed=closed)
        self.episodes.ended(ticket, end, group=group)
        self.log.note(ticket, outcome, why=why, group=group, seconds=clock() - began_s)
        tick()

    async def _deliver(
        self, ticket: Ticket, holder: int, group: EpisodeGroup, seconds: float
    ) -> Verdict:
        deliver = Deliver(
            worker=self.name,
            id=ticket.id,
            tries=ticket.tries,
            holder=holder,
            meta=group.sample.meta,
            oldest=group.oldest,
            newest=group.newest,
            stats=stats_of(group, seconds=seconds),
            episodes=self._report(),
        )
        verdict: Verdict = await self.master.call(
            deliver, what=f"the delivery of {ticket.id}", timeout_s=MASTER_S
        )
        if not verdict.kept:
            logger.info("delivery refused id=%s why=%s", ticket.id, verdict.why)
        return verdict

    async def _give_up(
        self,
        ticket: Ticket,
        outcome: TicketOutcome,
        why: str,
        group: EpisodeGroup | None,
        seconds: float,
    ) -> GaveUp:
        give_up = GiveUp(
            worker=self.name,
            id=ticket.id,
            tries=ticket.tries,
            why=why,
            filtered=outcome is TicketOutcome.FILTERED,
            unscored=outcome is TicketOutcome.UNSCORED,
            undelivered=outcome is TicketOutcome.FAILED and group is not None,
            episodes=self._report(),
            stats=stats_of(group, seconds=seconds) if group is not None else {},
        )
        reply: GaveUp = await self.master.call(
            give_up, what=f"giving up {ticket.id}", timeout_s=MASTER_S
        )
        return reply


def stats_of(group: EpisodeGroup, *, seconds: float) -> dict[str, float]:
    """Statistics of a group for the metrics: means over its episodes, and their requests."""
    return {
        **group.figures,
        "seconds": seconds,
        "reward": fmean(group.rewards),
        "answer_length": fmean(group.answer_lengths),
        "truncated": fmean(t.truncated for t in group.trajectories),
        "requests": float(group.request_stats.requests),
        "broken_requests": float(group.request_stats.broken),
        "lag_in_group": float(group.newest - group.oldest),
    }
