"""What the master has ready while it may not show it: kept, in order, published when it may."""

import asyncio
import time
from dataclasses import dataclass, field

import golden
import pytest

from realsys.api.errors import LeaseLost, StaleAttempt, StoreUnavailable, WaitTimeout
from realsys.master.checkpoint.outbox import Outbox


@dataclass
class Site:
    """A store that is there or not, and a lease that is held or not."""

    held: bool = True
    away: bool = False
    over: bool = False
    shown: list[str] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    asked: int = 0

    def may_publish(self) -> bool:
        if self.over:
            raise LeaseLost("the lease has expired", where="master", fix="exit")
        return self.held

    def outbox(self, patience_s: float = 10.0) -> Outbox:
        return Outbox(self.may_publish, patience_s)

    def put(self, outbox: Outbox, what: str, *, replaces: bool = False) -> None:
        async def publish() -> None:
            self.asked += 1
            if self.away:
                raise StoreUnavailable("etcd did not answer", where="etcd", fix="start it")
            self.shown.append(what)

        withdraw = (lambda: self.withdrawn.append(what)) if replaces else None
        outbox.put(what, publish, withdraw=withdraw)


def test_what_may_be_shown_is_shown_at_once_and_in_order():
    site = Site()

    async def run():
        outbox = site.outbox()
        for step in range(3):
            site.put(outbox, f"step {step}")
            assert await outbox.flush()

    asyncio.run(run())
    assert site.shown == ["step 0", "step 1", "step 2"]


@pytest.mark.parametrize("trouble", ["lease", "store"])
def test_steps_go_on_while_nothing_may_be_shown_and_all_is_shown_in_order_after(trouble):
    site = Site(held=trouble != "lease", away=trouble == "store")

    async def run():
        outbox = site.outbox()
        for step in range(400):  # half an hour of steps of 5 s, none of which waits
            site.put(outbox, f"step {step}")
            assert not await outbox.flush()
        assert site.shown == []
        assert site.asked == (0 if trouble == "lease" else 400), "asked in doubt"
        site.held, site.away = True, False
        assert await outbox.flush()

    asyncio.run(run())
    assert site.shown == [f"step {step}" for step in range(400)]


def test_of_checkpoints_that_wait_the_newest_is_published_after_its_rows():
    site = Site(held=False)

    async def run():
        outbox = site.outbox()
        for step in (1, 2, 3):
            site.put(outbox, f"step {step}")
            site.put(outbox, f"checkpoint {step}", replaces=True)
            site.put(outbox, f"model {step}")
        site.held = True
        await outbox.drain()

    asyncio.run(run())
    assert site.withdrawn == ["checkpoint 1", "checkpoint 2"]
    assert site.shown == [
        "step 1", "model 1", "step 2", "model 2", "step 3", "checkpoint 3", "model 3",
    ]  # fmt: skip


def test_a_checkpoint_that_is_being_published_is_not_withdrawn():
    site, order = Site(), []

    async def run():
        outbox, going = site.outbox(), asyncio.Event()

        async def slowly() -> None:
            going.set()
            await asyncio.sleep(0.05)
            order.append("first")

        outbox.put("first", slowly, withdraw=lambda: order.append("first withdrawn"))
        first = asyncio.create_task(outbox.flush())
        await going.wait()
        site.put(outbox, "second", replaces=True)
        assert await first

    asyncio.run(run())
    assert (order, site.shown, site.withdrawn) == (["first"], ["second"], [])


def test_a_lease_that_is_over_publishes_nothing():
    site = Site(held=False)

    async def run():
        outbox = site.outbox()
        site.put(outbox, "step 1")
        assert not await outbox.flush()
        site.over = True
        with pytest.raises(LeaseLost):
            await outbox.flush()
        with pytest.raises(LeaseLost):
            await outbox.drain()

    asyncio.run(run())
    assert site.shown == []


def test_who_must_publish_waits_for_the_store_and_no_longer_than_it_may():
    site = Site(away=True)

    async def run():
        outbox = site.outbox(patience_s=0.0)
        site.put(outbox, "the end")
        with golden.raises(WaitTimeout):
            await outbox.drain()
        site.away = False
        await outbox.drain()

    asyncio.run(run())
    assert site.shown == ["the end"]


def test_what_waits_is_shown_in_the_middle_of_a_long_step_and_a_refusal_is_told():
    site = Site(held=False)

    async def until(condition) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    async def run():
        outbox = site.outbox()
        task = asyncio.create_task(outbox.run())
        site.put(outbox, "step 1")
        assert not await outbox.flush()
        site.held = True
        await until(lambda: site.shown == ["step 1"])

        async def refuse() -> None:
            raise StaleAttempt("attempt 2 has taken over", where="trial", fix="exit")

        outbox.put("step 2", refuse)
        await until(task.done)
        with golden.raises(StaleAttempt):
            await outbox.flush()

    asyncio.run(run())
