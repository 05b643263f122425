"""A curriculum's records at the master's desk: given again as the same ones, whoever has them and dies."""

import asyncio
from collections import Counter

import golden
import msgspec
import pytest
from test_rollout_dispatcher import Cleared, delivery, run, take

from realsys.api.errors import RolloutError
from realsys.api.worker_configs import CurriculumControl
from realsys.master.graph.curriculum import Curriculum
from realsys.master.graph.data_schedule import DataSchedule
from realsys.master.graph.master_state import MasterState
from realsys.master.rollouts.rollout_dispatcher import RolloutDispatcher, base_id
from realsys.master.rollouts.routes import Routes
from realsys.rollout.staleness.ledger import StalenessLedger
from realsys.transport import rollout_messages as rm

SIZES = {"a": 4, "b": 6}
BATCH, STEPS = 4, 12
RATES = {"a": 1.0, "b": 0.5}  # so that b comes ten times as often
SCHEDULE = DataSchedule(dataset_size=10, batch_size=BATCH, seed=1, shuffle=True)


def curriculum(lag):
    control = CurriculumControl(weights={}, floor=0.1, steps=2)
    return Curriculum(SIZES, control=control, batch_size=BATCH, lag=lag, seed=1, shuffle=True)


ask = rm.AskPlaces(worker="w", dataset_size=10, source_items=SIZES)


async def make_desk(*, max_staleness, policy="wait", saved=None):
    desk, order = RolloutDispatcher(), curriculum(max_staleness)
    ledger = StalenessLedger(
        batch_size=BATCH, max_staleness=max_staleness, policy=policy, total_steps=STEPS
    )
    if saved is not None:
        ledger.restore(saved.rollouts.ledger)
        desk.restore(saved.rollouts)
        order.restore(saved.curriculum)
    asking = asyncio.create_task(desk.handle(ask))
    assert await desk.dataset_size(timeout_s=60) == 10
    assert desk.source_items == SIZES
    routes = Routes(holders=(0,), endpoints=["a"])
    await desk.open(ledger, SCHEDULE, routes=routes, clear=Cleared(), curriculum=order)
    await asking
    return desk, order


def answered(ticket, order, *, rates=RATES, **more):
    source = order.source_of(ticket.id)
    made = delivery(ticket, **more)
    return msgspec.structs.replace(made, stats={f"reward/{source}/correct": rates[source]})


async def train(desk, step):
    held = await desk.load(step)
    await desk.trained(step)
    return [base_id(meta.ids[0]) for meta, _ in held]


def in_turns(lag):
    """Ids of each step where the model workers sample."""
    order, found = curriculum(lag), []
    for step in range(1, STEPS + 1):
        found.append([id for _, id in order.indexed_ids(step)])
        for id in found[-1]:
            order.answered(id, RATES[order.source_of(id)])
        order.trained(step)
    return found


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_however_far_ahead_prompts_are_granted_the_records_are_those_of_a_run_in_turns(
    max_staleness,
):
    async def story():
        desk, order = await make_desk(max_staleness=max_staleness)
        for step, expected in enumerate(in_turns(max_staleness), 1):
            for ticket in reversed(await take(desk, room=99)):
                await desk.handle(answered(ticket, order))
            assert await train(desk, step) == expected

    run(story())
    assert Counter(curriculum(0).source_of(i) for ids in in_turns(0)[3:] for i in ids) == {
        "a": 3,
        "b": 33,
    }


def test_a_prompt_keeps_its_record_over_lost_workers_and_a_resume():
    async def story():
        desk, order = await make_desk(max_staleness=2)
        first = await take(desk, room=6)
        await desk.lost("w")
        again = await take(desk, room=6)
        assert [(t.id, t.tries) for t in again] == [(t.id, 1) for t in first]
        for ticket in again[:4]:
            await desk.handle(answered(ticket, order))
        assert await train(desk, 1) == [t.id for t in first[:4]]
        later = await take(desk, room=3)
        await desk.handle(answered(later[1], order))
        state = MasterState(rollouts=desk.snapshot(), curriculum=order.snapshot())
        saved = msgspec.json.decode(msgspec.json.encode(state), type=MasterState)
        other, its_order = await make_desk(max_staleness=2, saved=saved)
        found = await take(other, room=99)
        assert [t.id for t in found[:4]] == [first[4].id, first[5].id, later[0].id, later[2].id]
        for ticket in found:
            await other.handle(answered(ticket, its_order))
        trained = [id for step in (2, 3) for id in await train(other, step)]
        order_in_turns = [id for ids in in_turns(2) for id in ids]
        assert [t.id for t in first[:4]] + trained == order_in_turns[:12]
        assert other.snapshot().drawn.keys() == {12, 13, 14, 15}, "only of those not yet trained"

    run(story())


def test_answers_that_are_filtered_count_and_another_record_takes_their_place():
    async def story():
        desk, order = await make_desk(max_staleness=0)
        rates, filtered = {"a": 1.0, "b": 0.5}, []
        for step in range(1, 5):
            while tickets := await take(desk, room=99):
                for ticket in tickets:
                    made = answered(ticket, order, rates=rates)
                    if order.source_of(ticket.id) == "a":  # all right: nothing is learned
                        gone = rm.GiveUp(worker="w", id=ticket.id, tries=0, why="all right",
                                         filtered=True, stats=made.stats)  # fmt: skip
                        await desk.handle(gone)
                        filtered.append((step, ticket.id))
                    else:
                        await desk.handle(made)
            assert {order.source_of(id) for id in await train(desk, step)} == {"b"}
        assert order.success(5) == {"a": 1.0, "b": 0.5}
        by_step = Counter(step for step, _ in filtered)
        assert by_step[1] == 4, "as often as the others until it is known"
        assert sum(by_step[step] for step in (2, 3, 4)) <= 2
        assert desk.snapshot().drawn == {}

    run(story())


def test_answers_that_do_not_say_whether_they_are_correct_end_the_run():
    async def story():
        desk, _ = await make_desk(max_staleness=0)
        for ticket in await take(desk):
            await desk.handle(delivery(ticket))
        with golden.raises(RolloutError):
            await train(desk, 1)

    run(story())


def test_workers_with_other_sources_are_refused():
    async def story():
        desk, _ = await make_desk(max_staleness=0)
        other = msgspec.structs.replace(ask, worker="v", source_items={"a": 5, "b": 5})
        with golden.raises(RolloutError):
            await desk.handle(other)

    run(story())
