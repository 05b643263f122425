"""The master's desk lets rollout workers come and go: no prompt is lost, none is given to who leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from realsys.api.data import SequenceMeta
from realsys.api.worker_configs import MakerRoute
from realsys.master.graph.data_schedule import DataSchedule
from realsys.master.rollouts import rollout_dispatcher
from realsys.master.rollouts.rollout_dispatcher import RolloutDispatcher
from realsys.master.rollouts.routes import Routes
from realsys.rollout.staleness.ledger import StalenessLedger
from realsys.transport import rollout_messages as rm
from realsys.worker.live_scaling import Scaling

A, B, C = (f"rollout_worker/{i}" for i in range(3))
EMPTY = Scaling(attempt=1, token="ours", phase="main")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that have passed: no others do."""
    passed = [1000.0]
    played = SimpleNamespace(monotonic=lambda: passed[0])
    monkeypatch.setattr(rollout_dispatcher, "time", played)
    return passed


def maker(name: str, index: int, *holders: int) -> MakerRoute:
    own = (index,)
    return MakerRoute(name=name, rollout_workers=own, servers=own, holders=holders, sources=(0,))


async def open_desk(makers: Sequence[MakerRoute] = ()) -> RolloutDispatcher:
    desk = RolloutDispatcher()
    ledger = StalenessLedger(batch_size=2, max_staleness=3, policy="wait", total_steps=10)
    schedule = DataSchedule(dataset_size=20, batch_size=2, seed=0, shuffle=False)
    routes = Routes(holders=(0, 1), endpoints=("tcp://a", "tcp://b"), makers=makers)

    async def clear(worker: int, ids: Sequence[str]) -> None:
        pass

    await desk.open(ledger, schedule, routes=routes, clear=clear)
    return desk


async def take(desk: RolloutDispatcher, worker: str, room: int = 1, wait_s: float = 0.0) -> rm.Work:
    work = await desk.handle(rm.TakeWork(worker=worker, room=room, wait_s=wait_s))
    assert isinstance(work, rm.Work)
    return work


async def deliver(desk: RolloutDispatcher, worker: str, ticket: rm.Ticket) -> rm.Verdict:
    meta = SequenceMeta(ids=(rm.sample_id(ticket.id, ticket.tries),))
    verdict = await desk.handle(
        rm.Deliver(
            worker=worker, id=ticket.id, tries=ticket.tries, holder=0, meta=meta, oldest=0, newest=0
        )
    )
    assert isinstance(verdict, rm.Verdict)
    return verdict


def test_who_is_to_go_finishes_gets_nothing_more_and_is_sent_home():
    async def test() -> None:
        desk = await open_desk()
        held = (await take(desk, A, room=2)).tickets
        await desk.scaled(EMPTY.with_drained({A: 60.0}))
        asks = asyncio.create_task(take(desk, A, wait_s=30.0))
        assert (await deliver(desk, A, held[0])).kept
        await asyncio.sleep(0.02)
        assert not asks.done(), "it holds one still"
        assert (await deliver(desk, A, held[1])).kept
        home = await asyncio.wait_for(asks, 60.0)
        assert (home.tickets, home.over) == ((), True)
        assert not (await take(desk, B)).over, "the others go on"

    asyncio.run(test())


def test_who_waits_for_prompts_when_it_is_told_goes_at_once():
    async def test() -> None:
        desk = await open_desk()
        await take(desk, B, room=8)  # all that the staleness allows
        asks = asyncio.create_task(take(desk, A, wait_s=30.0))
        await asyncio.sleep(0.02)
        await desk.scaled(EMPTY.with_drained({A: 60.0}))
        assert (await asyncio.wait_for(asks, 60.0)).over

    asyncio.run(test())


def test_what_is_held_when_the_time_is_up_is_given_to_another(clock):
    async def test() -> None:
        desk = await open_desk()
        (held,) = (await take(desk, A)).tickets
        wanted = EMPTY.with_drained({A: 60.0})
        await desk.scaled(wanted)
        clock[0] += 59.0
        await desk.scaled(wanted)
        assert not (await take(desk, A)).over
        clock[0] += 2.0
        await desk.scaled(wanted)
        assert (await take(desk, A)).over
        (again,) = (await take(desk, B)).tickets
        assert (again.id, again.tries) == (held.id, 1)
        assert not (await deliver(desk, A, held)).kept
        assert (await deliver(desk, B, again)).kept

    asyncio.run(test())


def test_one_that_comes_to_a_maker_run_waits_until_it_is_known_where_it_sends_to():
    async def test() -> None:
        desk = await open_desk([maker("maker_0", 0, 0), maker("maker_1", 1, 1, 0)])
        asks = asyncio.create_task(desk.handle(rm.AskPlaces(worker=C, dataset_size=20)))
        await asyncio.sleep(0.02)
        assert not asks.done()
        await desk.scaled(EMPTY.with_added({C: B, "generation_server/2": "generation_server/1"}))
        places = await asyncio.wait_for(asks, 60.0)
        assert places.holders == (1, 0)
        assert (await take(desk, C)).tickets

    asyncio.run(test())


def test_one_that_comes_to_a_plain_run_sends_to_all():
    async def test() -> None:
        desk = await open_desk()
        places = await asyncio.wait_for(desk.handle(rm.AskPlaces(worker=C, dataset_size=20)), 60.0)
        assert places.holders == (0, 1)

    asyncio.run(test())
