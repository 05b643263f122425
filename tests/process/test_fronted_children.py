"""SGLang and vLLM as children, when all their places are taken: stand-ins that speak their paths.

The real ones are in tests/by_hand/engines. Here a child holds every answer until the test lets go.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import torch
from aiohttp import web
from full_client import FullClient
from passing_time import pass_time
from real_trials import make_policy
from safetensors.torch import load_file
from serving_double import ServerDouble

from realsys.api.errors import WaitTimeout, WorkerLost
from realsys.api.worker_configs import GenerationServer
from realsys.generation.http import http_session
from realsys.generation.http.served_engine import FetchedWeights
from realsys.generation.served_engines import fronted, sglang, vllm
from realsys.generation.served_engines.child import ChildServer
from realsys.generation.served_engines.fronted import FrontedEngine
from realsys.generation.served_engines.sglang import SGLangEngine
from realsys.generation.served_engines.vllm import VLLMEngine
from realsys.generation.server import http_control
from realsys.generation.server.http_control import Control
from realsys.transport.generation_messages import (
    GenerateRequest,
    PauseMode,
    Sampling,
    WeightPart,
    WeightSource,
)
from realsys.weights.sync.receiver import read_folder

S = 240.0
CONNECTIONS = 4
ANSWERS = 9


class StandIn:
    """A child whose answers never end.

    ``works``: whether it makes tokens; ``mute``: paths that hang; ``deadly``: paths at which it is gone;
    ``read``: what it found in folders of weights.
    """

    def __init__(self) -> None:
        self.works, self.steps, self.asked = True, 0, 0
        self.mute: set[str] = set()
        self.deadly: set[str] = set()
        self.read: list[dict[str, torch.Tensor]] = []
        self.heard: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.heard.append(request.path)
        if request.path in self.deadly:
            assert request.transport is not None
            request.transport.close()
        if request.path in ("/collective_rpc", "/update_weights_from_disk"):
            body = await request.json()
            folder = body.get("model_path") or body["kwargs"]["weights_path"]
            self.read.append(load_file(Path(folder) / "model.safetensors"))
        if request.path.endswith("/generate"):
            self.asked += 1
        elif request.path == "/metrics":
            self.steps += self.works
            return web.Response(text=f'vllm:generation_tokens_total{{engine="0"}} {self.steps}\n')
        elif request.path not in self.mute and (self.works or request.path != "/health_generate"):
            return web.Response(text="true")
        await asyncio.sleep(S)
        return web.Response()


@asynccontextmanager
async def fronted_by(kind: str, folder: Path) -> AsyncIterator[tuple[FrontedEngine, StandIn]]:
    """The engine over a stand-in, started."""
    policy = str(make_policy(folder / "policy"))
    common: dict[str, Any] = {
        "config": GenerationServer(model_path=policy),
        "name": "generation_server/0",
        "log": folder / "child.log",
        "guard": _as_it_is,
        "fetch": _one_more,
    }
    engine: FrontedEngine
    engine = VLLMEngine(**common) if kind == "vllm" else SGLangEngine(**common, scratch=folder)
    engine._child = cast(ChildServer, SimpleNamespace(start=_nothing, close=_nothing, check=dict))
    child, app = StandIn(), web.Application()
    app.router.add_route("*", "/{path:.*}", child.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    if engine._http._unix_socket:
        site: web.BaseSite = web.UnixSite(runner, engine._http._unix_socket)
    else:
        site = web.TCPSite(runner, "127.0.0.1", cast(int, urlsplit(engine._http.url).port))
    await site.start()
    try:
        await engine.start()
        yield engine, child
    finally:
        await engine.close()
        await runner.cleanup()


def _as_it_is(argv: Sequence[str]) -> list[str]:
    return list(argv)


def _one_more(source: WeightSource) -> FetchedWeights:
    """As trainers that add 1 to each number of the model in the folder that their part names."""
    weights = {name: x + 1 for name, x in read_folder(source.parts[0].name).items()}
    return FetchedWeights(weights, sum(x.nbytes for x in weights.values()))


async def _nothing(*args: Any, **more: Any) -> None: ...


@asynccontextmanager
async def full(engine: FrontedEngine, child: StandIn) -> AsyncIterator[None]:
    """While more answers are on their way than a connection pool has connections."""

    async def ask(i: int) -> None:
        request = GenerateRequest(rid=f"r{i}", input_ids=(1, 2), sampling=Sampling())
        async for _ in engine.generate(request, stream=False):
            pass

    asking = [asyncio.create_task(ask(i)) for i in range(ANSWERS)]
    try:
        async with asyncio.timeout(S):
            while child.asked < CONNECTIONS:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # the rest comes now, or waits for the pool
        yield
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_session, "MAX_CONNECTIONS", CONNECTIONS)
    for module in (fronted, vllm, sglang):
        monkeypatch.setattr(module, "CONTROL_S", S)
    monkeypatch.setattr(fronted, "_POLL_S", 0.05, raising=False)
    monkeypatch.setattr(http_control, "_HEALTH_S", S)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_control_calls_do_not_wait_behind_answers(kind: str, tmp_path: Path) -> None:
    """The pause before new weights waited for a free connection, and the server was left out."""

    async def main() -> None:
        async with fronted_by(kind, tmp_path) as (engine, child), full(engine, child):
            await engine.pause(PauseMode.IN_PLACE)
            await engine.resume()
            policy = str(tmp_path / "policy")
            assert (await engine.update_weights(WeightSource(version=3, path=policy))).version == 3
            await engine.abort("r0")
            async with asyncio.timeout(S):  # answers wait for places at the child, not for us
                while child.asked < ANSWERS:
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_clients_control_calls_do_not_wait_behind_their_answers() -> None:
    async def main() -> None:
        async with ServerDouble() as server:
            server.engine.hang = True
            client: FullClient = server.client()
            requests = [GenerateRequest(rid=f"r{i}", input_ids=(1,)) for i in range(ANSWERS)]
            asking = [asyncio.create_task(client.generate(r, timeout_s=S)) for r in requests]
            async with asyncio.timeout(S):
                while len(server.engine.running) < CONNECTIONS:
                    await asyncio.sleep(0.01)
            assert (await client.info(timeout_s=S)).engine
            await client.abort(every=True)
            await asyncio.gather(*asking)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_child_with_all_places_taken_is_well_while_it_works(kind: str, tmp_path: Path) -> None:
    """A probe waits behind everybody, and answers are told whole: it counted as sick, then as hung."""

    async def main() -> None:
        async with fronted_by(kind, tmp_path) as (engine, child), full(engine, child):
            health = Control(engine)._health_generate
            request = cast(web.Request, None)
            assert (await health(request)).status == 200
            before = engine.counters.progress
            async with asyncio.timeout(S):
                while engine.counters.progress == before:  # what the stall judge looks at
                    await asyncio.sleep(0.01)
            child.works = False
            await asyncio.sleep(0.3)
            asking = asyncio.create_task(health(request))
            await asyncio.sleep(0.1)
            pass_time(S)
            assert (await asking).status == 503

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_pause_without_an_answer_is_taken_back(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child may have heard it, and would stand still for ever."""
    for module in (fronted, vllm, sglang):
        monkeypatch.setattr(module, "CONTROL_S", 2.0)

    async def main() -> None:
        async with fronted_by(kind, tmp_path) as (engine, child):
            pause, resume = (
                ("/pause", "/resume")
                if kind == "vllm"
                else ("/pause_generation", "/continue_generation")
            )
            child.mute = {pause}
            source = WeightSource(version=3, path=str(tmp_path / "policy"))
            for call in (engine.update_weights(source), engine.pause(PauseMode.IN_PLACE)):
                child.heard.clear()
                with pytest.raises(WaitTimeout):
                    await call
                assert child.heard == [pause, resume]
            assert not (await engine.info()).paused

    asyncio.run(main())


STEPS = {
    "vllm": [
        "/pause",
        "/reset_prefix_cache",  # running requests give their caches back
        "/collective_rpc",
        "/update_weight_version",
        "/reset_prefix_cache",
        "/resume",
    ],
    "sglang": ["/pause_generation", "/update_weights_from_disk", "/continue_generation"],
}


def _from_trainers(folder: Path) -> WeightSource:
    part = WeightPart(endpoint="tcp://trainer", name=str(folder / "policy"))
    return WeightSource(version=3, parts=(part,))


@pytest.mark.parametrize("kind", STEPS)
def test_weights_of_trainers_are_read_from_our_memory(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with fronted_by(kind, tmp_path) as (engine, child):
            child.heard.clear()
            taken = await engine.update_weights(_from_trainers(tmp_path))
            assert child.heard == STEPS[kind]
            assert (taken.version, (await engine.info()).weight_version) == (3, 3)
            (found,), former = child.read, read_folder(str(tmp_path / "policy"))
            assert found.keys() == former.keys()
            assert all(torch.equal(found[name], x + 1) for name, x in former.items())

    asyncio.run(main())


@pytest.mark.parametrize("kind", STEPS)
def test_a_child_that_is_gone_in_the_middle_of_new_weights(kind: str, tmp_path: Path) -> None:
    """It may be there again, with nobody knows which: it is not resumed, and its worker ends."""

    async def main() -> None:
        async with fronted_by(kind, tmp_path) as (engine, child):
            loads = next(path for path in STEPS[kind] if "rpc" in path or "disk" in path)
            child.deadly = {loads}
            child.heard.clear()
            with pytest.raises(WorkerLost, match="lost"):
                await engine.update_weights(_from_trainers(tmp_path))
            assert child.heard[-1] == loads
            with pytest.raises(WorkerLost, match="version 3"):
                await engine.ended()

    asyncio.run(main())
