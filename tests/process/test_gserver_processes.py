"""The manager in a process of its own: CURVE on one side, HTTPS with pinned certificates on the other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gserver_manager_alone as alone
import msgspec
import pytest
from serving_double import DoubleEngine, ServerDouble, double_answer

from realsys.api.errors import RemoteError, WorkerLost
from realsys.generation.http.http_client import HttpGenerationClient
from realsys.generation.http.secret import bearer_key
from realsys.name_resolve.open import open_store
from realsys.observability.jsonl import read_jsonl
from realsys.transport import rollout_messages as rm
from realsys.transport.channel import RequestClient, client_context
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.generation_messages import GenerateRequest, Sampling, WeightSource
from realsys.trial.records import WorkerRecord, loads

pytestmark = pytest.mark.process

PROMPT = (5, 6, 7)
SAMPLING = Sampling(max_new_tokens=8, sampling_seed=3)


class World:
    """A manager's process, two servers in this one, and a client of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keypairs = TrialKeypairs.create(alone.curve_keys(folder))
        self.key = bearer_key(self.keypairs)
        self.store = open_store(alone.store_url(folder))
        self.context = client_context()
        self.servers: dict[int, ServerDouble] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.client: RequestClient | None = None
        self.started = 0

    # ---- processes ----------------------------------------------------------------------------

    async def start_server(self, index: int) -> DoubleEngine:
        """A new process under this index, with weights of version 0; what was there is gone."""
        if (former := self.servers.pop(index, None)) is not None:
            await former.stop()
        server = self.servers[index] = ServerDouble(index=index, key=self.key)
        await server.engine.start()
        await server._listener.start()
        self.started += 1
        name = f"generation_server/{index}"
        value = alone.record_of(name, control=server.url, pid=self.started)
        self.store.add(alone.KEYS.worker("generation_server", index), value, replace=True)
        return server.engine

    async def start_manager(self) -> None:
        key = alone.KEYS.worker("gserver_manager", 0)
        self.store.delete(key, missing_ok=True)
        script = Path(alone.__file__)
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(self.folder), str(os.getpid())]
        )
        found = await asyncio.to_thread(self.store.wait, [key], timeout_s=100)
        record = loads(WorkerRecord, found[key], where=key)
        self.client = RequestClient(
            record.control,
            peer_name="gserver_manager/0",
            sender="rollout_worker/0",
            trial=alone.TRIAL,
            attempt=alone.ATTEMPT,
            token=alone.TOKEN,
            keypairs=self.keypairs,
            reply_type=rm.FromManager,
            context=self.context,
        ).open()

    async def kill_manager(self) -> None:
        assert self.process is not None
        assert self.client is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)
        self.client.fail("killed")
        await self.client.close()

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
        for server in self.servers.values():
            await server.stop()
        self.context.term()
        self.store.close()

    # ---- calls --------------------------------------------------------------------------------

    async def call(self, body: Any) -> Any:
        assert self.client is not None
        return await self.client.call(body, timeout_s=100, what=type(body).__name__)

    async def ask(self, rid: str, **fields: Any) -> rm.UseServer:
        worker = {"worker": "rollout_worker/0", "group": "g", "num_tokens": 11, "min_version": 0}
        reply: rm.UseServer = await self.call(rm.AskServer(rid=rid, **{**worker, **fields}))
        return reply

    async def view(self) -> rm.ManagerView:
        reply: rm.ManagerView = await self.call(rm.AskManager())
        return reply

    async def new_weights(self, version: int) -> rm.ServersAt:
        source = msgspec.msgpack.encode(WeightSource(version=version, path="/weights"))
        reply: rm.ServersAt = await self.call(rm.NewWeights(source=source))
        return reply

    async def generate(self, use: rm.UseServer, rid: str) -> tuple[int, ...]:
        """What a rollout worker does with the address that it was given."""
        client = HttpGenerationClient(use.url, self.key, name=f"generation_server/{use.server}")
        try:
            request = GenerateRequest(rid=rid, input_ids=PROMPT, sampling=SAMPLING)
            return (await client.generate(request, timeout_s=60)).output_ids
        finally:
            await client.close()

    def events(self) -> list[tuple[str, int | None]]:
        return [(r["event"], r.get("server")) for r in read_jsonl(alone.record_file(self.folder))]


@asynccontextmanager
async def world_in(folder: Path) -> AsyncIterator[World]:
    world = World(folder)
    try:
        for index in (0, 1):
            await world.start_server(index)
        await world.start_manager()
        await until_all_are_well(world)
        yield world
    finally:
        await world.close()


async def until_all_are_well(world: World) -> None:
    async with asyncio.timeout(120):
        while (view := await world.view()).sick or len(view.versions) < 2:
            await asyncio.sleep(0.05)


@pytest.fixture
def run(tmp_path):
    """Runs a test's coroutine in a world of its own."""

    def runs(test: Callable[[World], Awaitable[None]]) -> None:
        async def all_of_it() -> None:
            async with world_in(tmp_path) as world:
                await test(world)

        asyncio.run(all_of_it())

    return runs


def test_a_request_gets_a_server_and_an_answer_and_the_run_ends(run):
    async def test(world: World) -> None:
        use = await world.ask("a")
        assert (use.server, use.version) == (0, 0)
        answer = await world.generate(use, "a")
        assert answer == tuple(double_answer(PROMPT, SAMPLING).output_ids)
        assert (await world.view()).running == {0: 1, 1: 0}
        await world.call(rm.DoneWith(rid="a", server=0, num_new_tokens=8))
        assert (await world.view()).running == {0: 0, 1: 0}
        assert await world.call(rm.Leave()) == rm.Accepted()
        assert world.process is not None
        assert await asyncio.to_thread(world.process.wait, 60) == 0

    run(test)


def test_a_killed_server_is_left_out_and_comes_back_with_the_newest_weights(run):
    async def test(world: World) -> None:
        assert (await world.new_weights(1)).versions == {0: 1, 1: 1}
        use = await world.ask("a", server=0)
        await world.servers[0].stop()
        with pytest.raises(WorkerLost, match="generation_server/0"):
            await world.generate(use, "a")
        broken = rm.DoneWith(rid="a", server=0, broken=True, why="connection cut")
        await world.call(broken)
        while 0 not in (view := await world.view()).sick:
            await asyncio.sleep(0.02)
        assert "generation_server/0" in view.sick[0]
        assert (await world.ask("a", server=0)).server == 1
        engine = await world.start_server(0)
        use = await world.ask("b", group="h", server=0, min_version=1)
        await until_all_are_well(world)
        assert [source.version for source in engine.sources] == [1]
        use = await world.ask("b", group="h", server=0, min_version=1)
        assert (use.server, use.version) == (0, 1)
        assert await world.generate(use, "b")
        assert world.events()[-1] == ("server_up", 0)

    run(test)


def test_waiting_for_new_weights_holds_up_nobody(run):
    async def test(world: World) -> None:
        for server in world.servers.values():
            server.engine.update_s = 0.5
        newer = [asyncio.create_task(world.ask(f"n{i}", min_version=1)) for i in range(20)]
        old = await asyncio.gather(*(world.ask(f"o{i}") for i in range(20)))
        assert {use.server for use in old} == {0}  # one group
        assert (await world.view()).waiting == 20
        update = asyncio.create_task(world.new_weights(1))
        await asyncio.sleep(0.1)
        assert (await world.ask("during")).server == 0
        assert (await update).versions == {0: 1, 1: 1}
        assert {use.version for use in await asyncio.gather(*newer)} == {1}

    run(test)


def test_weights_that_one_server_can_not_get(run):
    async def test(world: World) -> None:
        world.servers[1].engine.refuse_weights = RemoteError("no bucket 3", where="t", fix="none")
        reply = await world.new_weights(1)
        assert reply.versions == {0: 1, 1: 0}
        assert "version 1 failed" in reply.sick[1]
        assert "no bucket 3" in reply.sick[1]
        world.servers[1].engine.refuse_weights = None
        await until_all_are_well(world)
        assert (await world.view()).versions == {0: 1, 1: 1}

    run(test)


def test_a_killed_manager_costs_nothing(run):
    async def test(world: World) -> None:
        await world.new_weights(1)
        use = await world.ask("a")
        waiting = asyncio.create_task(world.ask("b", min_version=9))
        await asyncio.sleep(0.1)
        await world.kill_manager()
        with pytest.raises(WorkerLost, match="killed"):
            await waiting
        assert await world.generate(use, "a")  # goes on without a manager
        await world.start_manager()
        await until_all_are_well(world)
        await world.call(rm.DoneWith(rid="a", server=use.server))
        view = await world.view()
        assert (view.versions, view.running, view.waiting) == ({0: 1, 1: 1}, {0: 0, 1: 0}, 0)
        assert (await world.ask("b", min_version=1)).version == 1
        assert [e for e, _ in world.events()].count("manager_up") == 2

    run(test)
