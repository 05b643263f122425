"""The master's line to the manager: which versions it tells, to whom, and again when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import golden
import msgspec
import pytest
from virtual_time import run_virtually

from realsys.api.errors import RolloutError, WorkerLost
from realsys.master.rollouts import manager_client
from realsys.master.rollouts.manager_client import GserverManagerClient
from realsys.transport.generation_messages import WeightSource
from realsys.transport.rollout_messages import ManagerView, ServersAt

DEADLINE_S = 60.0


@dataclass
class Manager:
    """The other end of the line: a process that has registered."""

    pid: int
    heard: list[int] = field(default_factory=list)
    slow: set[int] = field(default_factory=set)  # versions that its servers never get
    loses: set[int] = field(default_factory=set)  # versions at which it is not reached, once

    async def call(self, body: Any, *, timeout_s: float, what: str) -> ServersAt:
        version = msgspec.msgpack.decode(body.source, type=WeightSource).version
        self.heard.append(version)
        if version in self.loses:
            self.loses.remove(version)
            raise WorkerLost("gone", where="manager", fix="none")
        if version in self.slow:
            await asyncio.Event().wait()
        return ServersAt(versions={0: version}, sick={}, seconds=0.0, paused_s=0.0, num_bytes=0)

    def fail(self, reason: str) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> tuple[GserverManagerClient, list[Manager]]:
    """With the managers that register one after another; the last is the one that lives."""
    managers = [Manager(pid=1)]
    monkeypatch.setattr(manager_client, "RETRY_S", 0.02)
    made = GserverManagerClient(
        lambda s: None, sender="m", trial="t", attempt=1, token="", keypairs=None
    )  # type: ignore[arg-type, return-value]

    async def connect() -> Manager:
        made._record = SimpleNamespace(pid=managers[-1].pid)  # type: ignore[assignment]
        made._client = managers[-1]  # type: ignore[assignment]
        return managers[-1]

    monkeypatch.setattr(made, "_connect", connect)
    return made, managers


def while_running(link: GserverManagerClient, test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), link:
            running = asyncio.create_task(link.run())
            try:
                await test()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_a_version_that_takes_long_holds_up_no_newer_one(link) -> None:
    line, (manager,) = link
    manager.slow = {1}

    async def test() -> None:
        await line.bring(WeightSource(version=1))
        await until(lambda: manager.heard == [1])
        await line.bring(WeightSource(version=2))
        await until(lambda: line.newest_at_servers is not None)
        assert line.newest_at_servers.versions == {0: 2}

    while_running(line, test)
    assert manager.heard == [1, 2]


def test_what_the_manager_did_not_answer_is_told_again(link) -> None:
    line, (manager,) = link
    manager.loses = {1}

    async def test() -> None:
        await line.bring(WeightSource(version=1))
        await until(lambda: line.newest_at_servers is not None)

    while_running(line, test)
    assert manager.heard == [1, 1]


def test_a_new_manager_hears_of_the_newest_alone(link) -> None:
    line, managers = link

    async def test() -> None:
        for version in (1, 2):
            await line.bring(WeightSource(version=version))
            await until(lambda version=version: managers[0].heard[-1:] == [version])
        managers.append(Manager(pid=2))
        line.fail("it was killed")
        await until(lambda: bool(managers[1].heard))
        await asyncio.sleep(0.1)

    while_running(line, test)
    assert managers[1].heard == [2]


@pytest.mark.parametrize(("are_there", "limit_s"), [(True, 1800.0), (False, 300.0)])
def test_servers_that_were_there_may_be_away_as_long_as_the_store(
    are_there: bool, limit_s: float
) -> None:
    made = GserverManagerClient(
        lambda s: None,
        sender="m",
        wait_limit_s=1800.0,
        trial="t",
        attempt=1,
        token="",
        keypairs=None,  # type: ignore[arg-type, return-value]
    )
    views = [ManagerView(versions={0: 1}, sick={}, running={}, waiting=0)] if are_there else []
    sick = ManagerView(versions={0: 1}, sick={0: "no answer"}, running={}, waiting=0)

    async def call(body: Any, **_: Any) -> ManagerView:
        return views.pop() if views else sick

    made.call = call  # type: ignore[method-assign]

    async def story() -> float:
        async with made:
            with golden.raises(RolloutError):
                await made.watch()
        return asyncio.get_running_loop().time()

    assert limit_s < run_virtually(story()) < limit_s + 60
