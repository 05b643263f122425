"""The master's desk for rollout workers: prompts out, answers in, batches to the steps."""

import asyncio
import time

import golden
import pytest
from virtual_time import run_virtually

from realsys.api.data import SequenceMeta
from realsys.api.errors import InternalError, RolloutError, WaitTimeout
from realsys.master.graph.data_schedule import DataSchedule
from realsys.master.rollouts import rollout_dispatcher
from realsys.master.rollouts.recent_episodes import RecentEpisodes
from realsys.master.rollouts.rollout_dispatcher import RolloutDispatcher, base_ids
from realsys.master.rollouts.routes import Routes
from realsys.rollout.staleness.ledger import StalenessLedger
from realsys.transport import rollout_messages as rm

SIZE, BATCH, STEPS = 10, 2, 4
SCHEDULE = DataSchedule(dataset_size=SIZE, batch_size=BATCH, seed=1, shuffle=True)
ORDER = [point.id for step in range(STEPS) for point in SCHEDULE.batch(step)]


class Cleared(list):
    async def __call__(self, worker, ids):
        self.append((worker, tuple(ids)))


async def make_desk(
    *,
    max_staleness=1,
    policy="wait",
    saved=None,
    clock=time.monotonic,
    say=print,
    silence_s=14400.0,
    recent=None,
    **limits,
):
    desk = RolloutDispatcher(recent, clock=clock, say=say, silence_s=silence_s)
    cleared = Cleared()
    ledger = StalenessLedger(
        batch_size=BATCH, max_staleness=max_staleness, policy=policy, total_steps=STEPS
    )
    if saved is not None:
        ledger.restore(saved.ledger)
        desk.restore(saved)
    asking = asyncio.create_task(desk.handle(rm.AskPlaces(worker="w", dataset_size=SIZE)))
    assert await desk.dataset_size(timeout_s=60) == SIZE
    routes = Routes(holders=(0, 3), endpoints=["a", "b", "c", "d"], **limits)
    await desk.open(ledger, SCHEDULE, routes=routes, clear=cleared)
    assert (await asking).holders == (0, 3)
    return desk, cleared


async def take(desk, worker="w", room=9, wait_s=0.05):
    work = await desk.handle(rm.TakeWork(worker=worker, room=room, wait_s=wait_s))
    return list(work.tickets)


def delivery(ticket, *, version=None, holder=0, worker="w"):
    name = rm.sample_id(ticket.id, ticket.tries)
    version = ticket.min_version if version is None else version
    return rm.Deliver(
        worker=worker,
        id=ticket.id,
        tries=ticket.tries,
        holder=holder,
        meta=SequenceMeta(
            ids=(name,), seqlens={"x": ((1,),)}, dtypes={"x": "int64"}, trailing_shapes={"x": ()}
        ),
        oldest=version,
        newest=version,
        stats={"reward": 1.0},
    )


async def train(desk, step):
    held = await desk.load(step)
    await desk.trained(step)
    return [meta.ids[0] for meta, _ in held]


def run(story):
    return asyncio.run(asyncio.wait_for(story, 100))


def test_steps_get_their_prompts_in_the_order_of_the_data():
    async def story():
        desk, cleared = await make_desk()
        tickets = await take(desk)
        assert [t.id for t in tickets] == ORDER[:4], "a staleness of 1: two steps"
        assert [t.min_version for t in tickets] == [0, 0, 0, 0]
        for ticket in reversed(tickets):
            assert (await desk.handle(delivery(ticket))).kept
        assert await train(desk, 1) == ORDER[:2]
        later = await take(desk)
        assert [(t.id, t.min_version) for t in later] == [(ORDER[4], 1), (ORDER[5], 1)]
        assert await train(desk, 2) == ORDER[2:4]
        assert cleared == []
        row = desk.metrics()
        assert row["rollout/reward"] == 1.0
        assert row["rollout/trained"] == 4

    run(story())


def test_what_a_lost_worker_was_at_is_given_out_again_and_its_late_delivery_refused():
    async def story():
        desk, cleared = await make_desk(max_staleness=0)
        first, second = await take(desk)
        await desk.lost("w")
        again = await take(desk, worker="other")
        assert [(t.id, t.tries) for t in again] == [(first.id, 1), (second.id, 1)]
        late = await desk.handle(delivery(first))
        assert not late.kept
        assert "superseded" in late.why
        for ticket in again:
            assert (await desk.handle(delivery(ticket, worker="other", holder=3))).kept
        assert base_ids(await train(desk, 1)) == [first.id, second.id]
        # What came late is forgotten where it was put; what never came, where it was to go.
        assert cleared == [(0, (first.id,)), (3, (second.id,))]

    run(story())


def test_a_filtered_prompt_is_replaced_and_so_is_one_that_is_never_played():
    async def story():
        desk, _ = await make_desk(max_staleness=0)
        first, second = await take(desk)
        await desk.handle(
            rm.GiveUp(worker="w", id=first.id, tries=0, why="all right", filtered=True)
        )
        (third,) = await take(desk)
        for ticket in (second, third):
            await desk.handle(delivery(ticket))
        assert await train(desk, 1) == [second.id, third.id]
        failing, beside = await take(desk)
        for tries, closed in ((0, False), (1, True)):
            give_up = rm.GiveUp(worker="w", id=failing.id, tries=tries, why="no such tool")
            assert (await desk.handle(give_up)).closed is closed
            (again,) = await take(desk)
        assert (again.id == failing.id, again.failures) == (False, 0)
        for ticket in (beside, again):
            await desk.handle(delivery(ticket))
        assert failing.id not in await train(desk, 2)
        assert desk.metrics()["rollout/set_aside"] == 1
        assert desk.snapshot().set_aside == (failing.id,)
        assert not desk._unplayed
        resumed, _ = await make_desk(max_staleness=0, saved=desk.snapshot())
        assert resumed.metrics()["rollout/set_aside"] == 1

    run(story())


def test_answers_that_can_not_be_sent_end_the_run():
    async def story():
        desk, _ = await make_desk(max_staleness=0)
        for tries in range(rollout_dispatcher.MAX_UNDELIVERED):
            failing = next(t for t in await take(desk) if t.tries == tries)
            assert failing.failures == 0, "its answers were good: the next are the same"
            give_up = rm.GiveUp(
                worker="w", id=failing.id, tries=tries, why="put timed out", undelivered=True
            )
            await desk.handle(give_up)
        with golden.raises(RolloutError):
            await desk.load(1)

    run(story())


def stuck(ids, failures=3, fault=rm.TryFault.AWAY):
    return tuple(
        rm.EpisodeTry(id=i, ago_s=0.0, failures=failures, fault=fault, why="refused") for i in ids
    )


def test_while_nothing_succeeds_nothing_is_set_aside_and_few_prompts_are_given_out():
    """Connections that were refused at once for 25 ms ended a run, which had gone through 40 tickets."""

    async def story():
        now, said = [1000.0], []
        desk, _ = await make_desk(max_staleness=3, clock=lambda: now[0], say=said.append)
        tickets = await take(desk, room=6)
        told = rm.TakeWork(worker="w", room=0, wait_s=0, episodes=stuck(t.id for t in tickets))
        assert (await desk.handle(told)).nothing_succeeds
        for tries in range(3):
            for ticket in tickets:
                give_up = rm.GiveUp(worker="w", id=ticket.id, tries=tries, why="refused")
                assert not (await desk.handle(give_up)).closed
            again = []
            for _ in tickets:
                now[0] += rollout_dispatcher.PROBE_S
                again += await take(desk, wait_s=0)
                assert not await take(desk, wait_s=0), "one, and the next a while later"
            assert [t.id for t in again] == [t.id for t in tickets]
            tickets = again
        now[0] += 60
        waiting = asyncio.create_task(desk.load(1))
        await asyncio.sleep(0.01)
        golden.check(said[-1])
        assert "refused" in said[-1]
        waiting.cancel()
        good = tuple(rm.EpisodeTry(id=t.id, ago_s=1.0) for t in tickets)
        told = rm.TakeWork(worker="w", room=9, wait_s=0, episodes=good)
        work = await desk.handle(told)
        assert not work.nothing_succeeds
        assert len(work.tickets) == 2, "all that are left"

    run(story())


async def asked(desk, worker):
    """Lets the desk know another worker."""
    await desk.handle(rm.AskPlaces(worker=worker, dataset_size=SIZE))


def good(*ids, ago_s=0.0):
    return tuple(rm.EpisodeTry(id=i, ago_s=ago_s) for i in ids)


def test_one_bad_node_gives_its_prompts_back_and_the_others_play_on():
    async def story():
        now = [1000.0]
        desk, _ = await make_desk(max_staleness=3, clock=lambda: now[0])
        await asked(desk, "v")
        first = await take(desk, room=3)
        now[0] += 60
        told = rm.TakeWork(worker="w", room=0, wait_s=0, episodes=stuck(t.id for t in first))
        assert not (await desk.handle(told)).nothing_succeeds, "another can play what it gives up"
        told = rm.TakeWork(worker="v", room=1, wait_s=0, episodes=good("x"))
        now[0] += 1
        work = await desk.handle(told)
        assert not work.nothing_succeeds
        assert len(work.tickets) == 1
        told = rm.TakeWork(worker="w", room=9, wait_s=0)
        work = await desk.handle(told)
        assert not work.nothing_succeeds, "its tries count: it gives its prompts back"
        probes = list(work.tickets)
        for tries in range(4):
            for ticket in first if tries == 0 else probes:
                give_up = rm.GiveUp(worker="w", id=ticket.id, tries=ticket.tries, why="refused")
                assert not (await desk.handle(give_up)).closed
            probes = await take(desk, wait_s=0)
            assert not probes or tries, "the next when the time of its last one is over"
            assert len(probes) <= 1
            now[0] += rollout_dispatcher.PROBE_S
        given = await take(desk, worker="v", wait_s=0)
        assert given, "prompts for a worker that is well do not wait for the time of another"
        now[0] += 1
        assert len(await take(desk, wait_s=0)) + len(given) > 1

    run(story())


def test_one_bad_node_that_has_every_prompt_ends_no_run_before_another_was_tried():
    """Before anything has succeeded: it ended 25 to 35 s after the first prompts."""

    async def story():
        now = [1000.0]
        desk, _ = await make_desk(max_staleness=3, clock=lambda: now[0])
        await asked(desk, "v")
        every = await take(desk, room=99)
        assert not await take(desk, worker="v", wait_s=0)
        loaded = asyncio.create_task(desk.load(1))
        await asyncio.sleep(0)
        now[0] += 30
        tries = stuck((t.id for t in every), failures=4, fault=rm.TryFault.FAILED)
        told = rm.TakeWork(worker="w", room=0, wait_s=0, episodes=tries)
        assert not (await desk.handle(told)).nothing_succeeds, "it is to give them back"
        await asyncio.sleep(0)
        assert not loaded.done()
        for ticket in every:
            give_up = rm.GiveUp(worker="w", id=ticket.id, tries=ticket.tries, why="refused")
            assert not (await desk.handle(give_up)).closed
        assert "rollout/set_aside" not in desk.metrics()
        played = await take(desk, worker="v", wait_s=0)
        assert len(played) == 1
        now[0] += 5
        told = rm.TakeWork(worker="v", room=9, wait_s=0, episodes=good(played[0].id))
        played += (await desk.handle(told)).tickets
        assert len(played) == len(every)
        for ticket in played:
            await desk.handle(delivery(ticket, worker="v"))
        assert len(await loaded) == BATCH

    run(story())


def test_two_workers_that_both_fail_end_a_run_before_anything_has_succeeded():
    async def story():
        now = [1000.0]
        desk, _ = await make_desk(max_staleness=3, clock=lambda: now[0])
        await asked(desk, "v")
        every = {"w": await take(desk, room=4), "v": await take(desk, worker="v", room=99)}
        loaded = asyncio.create_task(desk.load(1))
        await asyncio.sleep(0)
        for worker, tickets in every.items():
            now[0] += 30
            tries = stuck((t.id for t in tickets), failures=4, fault=rm.TryFault.FAILED)
            told = rm.TakeWork(worker=worker, room=0, wait_s=0, episodes=tries)
            await desk.handle(told)
        with pytest.raises(RolloutError, match="no episode has succeeded"):
            await loaded

    run(story())


def test_each_worker_has_its_own_time_for_a_prompt_while_nothing_succeeds():
    async def story():
        now = [1000.0]
        desk, _ = await make_desk(max_staleness=3, clock=lambda: now[0])
        for worker in ("v", "u"):
            await asked(desk, worker)
        told = rm.TakeWork(worker="v", room=0, wait_s=0, episodes=good("x", ago_s=1.0))
        await desk.handle(told)
        assert len(await take(desk, worker="w", room=1, wait_s=0)) == 1, "still well"
        tries = stuck("abc")
        await desk.handle(rm.TakeWork(worker="w", room=0, wait_s=0, episodes=tries))
        assert len(await take(desk, worker="u", room=9, wait_s=0)) == 1
        assert len(await take(desk, worker="w", room=9, wait_s=0)) == 1
        now[0] += 1
        told = rm.TakeWork(worker="v", room=1, wait_s=0, episodes=good("y"))
        assert len((await desk.handle(told)).tickets) == 1
        now[0] += rollout_dispatcher.PROBE_S - 1
        assert len(await take(desk, worker="v", room=1, wait_s=0)) == 1
        assert len(await take(desk, worker="w", room=9, wait_s=0)) == 1

    run(story())


def test_what_is_given_up_in_an_outage_changes_the_seeds_and_counts_for_nothing_else():
    async def story():
        now = [1000.0]
        desk, _ = await make_desk(max_staleness=0, clock=lambda: now[0])
        first, _ = await take(desk)
        told = rm.TakeWork(worker="w", room=0, wait_s=0, episodes=stuck("abc"))
        await desk.handle(told)
        for tries in range(3):
            give_up = rm.GiveUp(worker="w", id=first.id, tries=tries, why="refused")
            assert not (await desk.handle(give_up)).closed
            now[0] += rollout_dispatcher.PROBE_S
            (again,) = await take(desk, wait_s=0)
            assert (again.id, again.failures) == (first.id, tries + 1)
        now[0] += 1
        told = rm.TakeWork(worker="w", room=0, wait_s=0, episodes=good("d"))
        await desk.handle(told)
        assert not desk.snapshot().unplayed
        give_up = rm.GiveUp(worker="w", id=first.id, tries=3, why="no such tool")
        assert not (await desk.handle(give_up)).closed, "once, without an outage"
        resumed, _ = await make_desk(max_staleness=0, saved=desk.snapshot())
        assert [t.failures for t in await take(resumed)] == [4, 0]
        (again,) = await take(desk)
        give_up = rm.GiveUp(worker="w", id=first.id, tries=again.tries, why="no such tool")
        assert (await desk.handle(give_up)).closed
        assert not desk.snapshot().in_outages

    run(story())


def test_a_long_train_step_without_prompts_is_no_outage():
    async def story():
        clock = asyncio.get_running_loop().time
        desk, _ = await make_desk(max_staleness=0, clock=clock)
        first, second = await take(desk)
        await desk.handle(delivery(first))
        told = rm.TakeWork(worker="w", room=0, wait_s=0, episodes=stuck([second.id], failures=1))
        await desk.handle(told)
        await desk.handle(delivery(second))
        held = await desk.load(1)
        await asyncio.sleep(3600.0)  # it trains
        await desk.handle(told)  # and hears of a failure
        await desk.trained(1)
        assert len(held) == BATCH
        loading = asyncio.create_task(desk.load(2))
        await asyncio.sleep(1200.0)
        for ticket in await take(desk):
            await desk.handle(delivery(ticket))
        assert len(await loading) == BATCH
        await desk.trained(2)
        await desk.handle(told)
        began_s = clock()
        with golden.raises(RolloutError):
            await desk.load(3)
        assert clock() - began_s == pytest.approx(1800.0, rel=0.02)

    run_virtually(story())


def test_how_many_are_played_at_a_time_is_the_most_that_were_out():
    async def story():
        recent = RecentEpisodes()
        desk, _ = await make_desk(recent=recent)
        tickets = await take(desk, room=3)
        assert recent.at_once == len(tickets) == 3
        await desk.handle(delivery(tickets[0]))
        await take(desk, room=1)
        assert recent.at_once == 3

    run(story())


def test_the_newest_episodes_are_judged_once_a_second():
    class Counted(RecentEpisodes):
        judged = 0

        def fault(self, **more):
            self.judged += 1
            return super().fault(**more)

    async def story():
        now, recent = [1000.0], Counted()
        desk, _ = await make_desk(clock=lambda: now[0], recent=recent)
        for _ in range(50):
            told = rm.TakeWork(worker="w", room=0, wait_s=0, episodes=good("a"))
            await desk.handle(told)
            now[0] += 0.1
        assert 4 <= recent.judged <= 6

    run(story())


def test_the_replies_say_what_is_closed_and_how_many_steps_were_trained():
    async def story():
        desk, _ = await make_desk(max_staleness=1)
        first, second, third, *_ = await take(desk)
        gave_up = {"worker": "w", "id": third.id, "why": "no reward", "unscored": True}
        for ticket in (first, second):
            assert await desk.handle(delivery(ticket)) == rm.Verdict(kept=True, version=0)
        assert await train(desk, 1) == [first.id, second.id]
        assert (await desk.handle(delivery(first))).version == 1  # refused: it is trained
        once = await desk.handle(rm.GiveUp(**gave_up, tries=0))
        assert once == rm.GaveUp(closed=False, version=1)
        again = next(t for t in await take(desk) if t.id == third.id)
        twice = await desk.handle(rm.GiveUp(**gave_up, tries=again.tries))
        assert twice == rm.GaveUp(closed=True, version=1)
        late = await desk.handle(rm.GiveUp(**gave_up, tries=again.tries))
        assert late == rm.GaveUp(closed=False, version=1)

    run(story())


def test_a_give_up_of_who_does_not_have_it_any_more_counts_for_nothing():
    async def story():
        desk, _ = await make_desk(max_staleness=0)
        first, _ = await take(desk)
        await desk.lost("w")
        for _ in range(9):
            await desk.handle(rm.GiveUp(worker="w", id=first.id, tries=0, why="late"))
        for ticket in await take(desk, worker="other"):
            await desk.handle(delivery(ticket, worker="other"))
        assert len(await train(desk, 1)) == BATCH

    run(story())


def test_a_checkpoint_keeps_what_was_delivered_and_gives_out_the_rest_again():
    async def story():
        desk, _ = await make_desk()
        tickets = await take(desk)
        for ticket in (tickets[0], tickets[1], tickets[3]):
            await desk.handle(delivery(ticket))
        await train(desk, 1)
        saved = desk.snapshot()
        assert [d.meta.ids[0] for d in saved.delivered] == [tickets[3].id]
        resumed, _ = await make_desk(saved=saved)
        again = await take(resumed)
        assert [(t.id, t.tries) for t in again] == [
            (tickets[2].id, 1),
            (ORDER[4], 0),
            (ORDER[5], 0),
        ]
        await resumed.handle(delivery(again[0]))
        assert base_ids(await train(resumed, 2)) == ORDER[2:4]

    run(story())


def test_a_full_buffer_holds_back_makers_until_a_step_has_trained():
    async def story():
        desk, _ = await make_desk(max_staleness=3, buffer_limit=2)
        assert len(await take(desk)) == 4, "two for each of two trainers"
        assert await take(desk) == []

    run(story())


def test_a_batch_may_take_as_long_as_deliveries_arrive():
    """Four hours after a step began to wait the run ended, though half of its answers had come."""
    hour_s = 3600.0

    async def story():
        clock = asyncio.get_running_loop().time
        desk, _ = await make_desk(silence_s=4 * hour_s, clock=clock)
        first, second, *_ = await take(desk)
        loading = asyncio.create_task(desk.load(1))
        await asyncio.sleep(3.5 * hour_s)
        assert (await desk.handle(delivery(first))).kept
        await asyncio.sleep(3.5 * hour_s)
        assert (await desk.handle(delivery(second))).kept
        assert base_ids([meta.ids[0] for meta, _ in await loading]) == [first.id, second.id]
        await desk.trained(1)
        began_s = clock()
        loading = asyncio.create_task(desk.load(2))
        await asyncio.sleep(hour_s)
        assert not (await desk.handle(delivery(first))).kept, "of use to nobody"
        with golden.raises(WaitTimeout):
            await loading
        assert clock() - began_s == pytest.approx(4 * hour_s, rel=0.02)

    run_virtually(story())


def test_waits_end_with_a_reason(monkeypatch):
    monkeypatch.setattr(rollout_dispatcher, "SAY_EVERY_S", 0.02)
    monkeypatch.setattr(rollout_dispatcher, "LOOK_S", 0.02)
    ticks = []
    monkeypatch.setattr(rollout_dispatcher, "tick", lambda: ticks.append(1))

    async def story():
        desk, _ = await make_desk(silence_s=0.05)
        await take(desk)
        with golden.raises(WaitTimeout):
            await desk.load(1)
        assert ticks, "a master that waits for rollouts was taken for one that stands still"
        with golden.raises(RolloutError):
            await desk.handle(rm.AskPlaces(worker="v", dataset_size=11))
        nobody = RolloutDispatcher()
        with golden.raises(WaitTimeout):
            await nobody.dataset_size(timeout_s=0.01)
        with pytest.raises(InternalError):
            nobody.snapshot()

    run(story())


def test_when_it_is_over_everybody_hears_it():
    async def story():
        desk, _ = await make_desk()
        await take(desk)
        waiting = asyncio.create_task(desk.handle(rm.TakeWork(worker="w", room=1, wait_s=60)))
        await asyncio.sleep(0.01)
        await desk.close()
        assert (await waiting).over

    run(story())


def test_what_a_dead_worker_was_at_goes_to_one_that_lives():
    """The dead one's own question still waited at the desk, the longest of all, and took it."""

    async def story():
        desk, _ = await make_desk(max_staleness=0)
        gave = await take(desk, worker="dead")
        waits = rm.TakeWork(worker="dead", room=9, wait_s=60)
        asking = asyncio.create_task(desk.handle(waits))
        await asyncio.sleep(0.01)
        living = asyncio.create_task(desk.handle(rm.TakeWork(worker="alive", room=9, wait_s=60)))
        await asyncio.sleep(0.01)
        await desk.lost("dead")
        assert [(t.id, t.tries) for t in (await living).tickets] == [(t.id, 1) for t in gave]
        assert not (await asking).tickets
        await desk.handle(rm.AskPlaces(worker="dead", dataset_size=SIZE))
        await desk.lost("alive")
        assert [t.tries for t in await take(desk, worker="dead")] == [2, 2], "it has begun anew"

    run(story())


def test_a_delivery_that_comes_twice_is_kept_and_its_tensors_too():
    """The double bears the id of what was kept: to forget it took the tensors away from a later step."""

    async def story():
        desk, cleared = await make_desk()
        tickets = await take(desk)
        for ticket in (*tickets, tickets[2]):
            assert (await desk.handle(delivery(ticket))).kept
        await train(desk, 1)
        assert cleared == []
        assert base_ids(await train(desk, 2)) == ORDER[2:4]
        # The same from another place is not ours, and neither is what was trained on meanwhile.
        assert not (await desk.handle(delivery(tickets[2], holder=3))).kept
        for ticket in await take(desk):
            await desk.handle(delivery(ticket))
        await train(desk, 3)
        assert cleared == [(3, (tickets[2].id,))]

    run(story())


def test_tensors_of_tries_that_ended_without_a_delivery_are_forgotten():
    """They may have been put before the worker died, or when it said that putting them failed."""

    async def story():
        desk, cleared = await make_desk(max_staleness=0)
        first, second = await take(desk)
        await desk.handle(rm.GiveUp(worker="w", id=first.id, tries=0, why="put timed out"))
        await desk.lost("w")
        for ticket in await take(desk, worker="other"):
            assert ticket.tries == 1
            await desk.handle(delivery(ticket, worker="other"))
        await train(desk, 1)
        assert sorted(cleared) == [(0, (first.id,)), (3, (second.id,))]

    run(story())


def test_prompts_that_fail_at_once_end_no_run_in_25_ms():
    """Before any episode was played, so that no try was told: the desk knows it by what was given up."""

    async def story():
        now = [1000.0]
        desk, _ = await make_desk(max_staleness=3, clock=lambda: now[0])
        num_tickets = 0
        for _ in range(40):
            now[0] += 8
            for ticket in await take(desk, room=8, wait_s=0):
                num_tickets += 1
                give_up = rm.GiveUp(worker="w", id=ticket.id, tries=ticket.tries, why="refused")
                await desk.handle(give_up)
        assert desk._failed is None
        assert 20 < num_tickets < 40
        assert "rollout/set_aside" not in desk.metrics()

    run(story())
