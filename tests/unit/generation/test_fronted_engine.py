"""What a real engine behind our front owes the worker around it, however slow its child is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import golden
import pytest
import torch
from real_trials import make_policy
from safetensors.torch import load_file

from experiments.asynchronous import Async
from realsys.api.errors import ConfigError, RealsysError, WaitTimeout, WorkerLost
from realsys.api.worker_configs import GenerationServer
from realsys.generation.http.served_engine import EngineAnswer, Fetch, FetchedWeights
from realsys.generation.served_engines import fronted
from realsys.generation.served_engines.child import ChildServer
from realsys.generation.served_engines.fronted import FrontedEngine
from realsys.generation.served_engines.memory_folder import TensorExtent
from realsys.runtime.transfer_time import SLOWEST_BYTES_PER_S
from realsys.transport.generation_messages import (
    Finish,
    GenerateRequest,
    PauseMode,
    Sampling,
    WeightPart,
    WeightSource,
    WeightsTaken,
)
from realsys.weights.sync.receiver import read_folder


def _nobody(source: WeightSource) -> FetchedWeights:
    raise AssertionError("nothing is fetched for a folder")


class SlowChild(FrontedEngine):
    """Reads weights until it is told that they are there."""

    kind = "slow"

    def __init__(self, model_path: str) -> None:
        super().__init__(GenerationServer(model_path=model_path), _nobody)
        self._child = cast(ChildServer, SimpleNamespace(check=dict))  # it runs
        self.loaded, self.resumed = asyncio.Event(), 0

    async def _load(self, path: str, version: int, *, keep_caches: bool, timeout_s: float) -> None:
        await self.loaded.wait()

    async def _pause(self, mode: PauseMode) -> None: ...

    async def _resume(self) -> None:
        self.resumed += 1

    async def _nothing(self, *args: Any, **more: Any) -> Any: ...

    _answers = _abort = _name_version = flush = _healthy = _made_progress = _nothing  # type: ignore[assignment]


def test_a_child_that_reads_weights_for_long_does_not_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the supervisor would take it for hung while its requests wait."""
    policy, ticks = str(make_policy(tmp_path / "policy")), []
    monkeypatch.setattr(fronted, "_TICK_S", 0.01)
    monkeypatch.setattr(fronted, "tick", lambda: ticks.append(None))

    async def main() -> None:
        async with asyncio.timeout(60):
            engine = SlowChild(policy)
            updating = asyncio.create_task(
                engine.update_weights(WeightSource(version=1, path=policy))
            )
            while len(ticks) < 5:
                await asyncio.sleep(0.01)
            assert (await engine.info()).updating, "for whoever waits for its tokens"
            engine.loaded.set()
            assert (await updating).version == 1
            assert not (await engine.info()).updating
            assert engine.resumed == 1
            after = len(ticks)
            await asyncio.sleep(0.1)
            assert len(ticks) == after, "only while it reads"

    asyncio.run(main())


class Echo(SlowChild):
    """Answers with as many tokens as it is asked for."""

    async def _answers(
        self, request: GenerateRequest, *, stream: bool, barred: Collection[int]
    ) -> AsyncIterator[EngineAnswer]:  # type: ignore[override]
        count = request.sampling.max_new_tokens
        yield EngineAnswer(rid=request.rid, output_ids=[1] * count, finish=Finish.LENGTH)


@pytest.mark.parametrize(
    ("length", "expected"), [(10, 50), (230, 26), (255, 1), (256, 0), (300, 0)]
)
def test_an_answer_ends_where_the_models_positions_do(
    tmp_path: Path, length: int, expected: int
) -> None:
    """One conversation that outgrew them was refused five times, and ended the run."""

    async def main() -> EngineAnswer:
        engine = Echo(str(make_policy(tmp_path / "policy")))  # of 256 positions
        sampling = Sampling(max_new_tokens=50, min_new_tokens=40)
        request = GenerateRequest(rid="r", input_ids=(4,) * length, sampling=sampling)
        (answer,) = [answer async for answer in engine.generate(request, stream=False)]
        return answer

    answer = asyncio.run(main())
    assert (len(answer.output_ids), answer.finish) == (expected, Finish.LENGTH)
    assert answer.context_length == (0 if expected else 256)


@pytest.mark.parametrize(
    ("settings", "narrow"),
    [
        ({}, False),
        ({"temperature": 0.0, "top_p": 0.5, "min_new_tokens": 2}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_new_tokens": 2}, True),
    ],
)
def test_kept_sets_of_narrowed_sampling_are_refused_by_engines_that_do_not_tell_them(
    tmp_path: Path, settings: dict[str, Any], narrow: bool
) -> None:
    """Others' are the whole vocabulary, over which such an engine's log-probs are."""

    async def main() -> EngineAnswer:
        engine = Echo(str(make_policy(tmp_path / "policy")))
        sampling = Sampling(max_new_tokens=5, return_kept=True, **settings)
        request = GenerateRequest(rid="r", input_ids=(4,), sampling=sampling)
        (answer,) = [answer async for answer in engine.generate(request, stream=False)]
        return answer

    if narrow:
        with golden.raises(ConfigError):
            asyncio.run(main())
    else:
        assert asyncio.run(main()).kept == [b""] * 5


class Taker(SlowChild):
    """Takes weights and says what it heard, in order; raises once for each word in ``fails``."""

    def __init__(self, model_path: str, fetch: Fetch) -> None:
        super().__init__(model_path)
        self._fetch = fetch
        self.heard: list[str] = []
        self.fails: list[str] = []
        self.folder, self.deadline_s = "", 0.0

    def say(self, what: str) -> None:
        self.heard.append(what)
        if what in self.fails:
            self.fails.remove(what)
            raise WaitTimeout(f"no answer to {what}", where="a test", fix="wait")

    async def _load(self, path: str, version: int, *, keep_caches: bool, timeout_s: float) -> None:
        self.folder, self.deadline_s = path, timeout_s
        (file,) = Path(path).iterdir()
        assert file.is_symlink() == (self._place is TensorExtent.MEMORY)
        self.taken = load_file(file)
        self.say("load")

    async def _pause(self, mode: PauseMode) -> None:
        self.say("pause")

    async def _resume(self) -> None:
        self.say("resume")


def taker(tmp_path: Path, **changed: torch.Tensor) -> Taker:
    """One whose trainers give the policy's weights, each 1 more; and what is ``changed``."""
    policy = str(make_policy(tmp_path / "policy"))
    new = {name: x + 1 for name, x in read_folder(policy).items()} | changed

    def fetch(source: WeightSource) -> FetchedWeights:
        engine.say("fetch")
        return FetchedWeights(new, 77)

    engine = Taker(policy, fetch)
    return engine


FROM_TRAINERS = WeightSource(version=5, parts=(WeightPart(endpoint="tcp://trainer", name="w"),))


@pytest.mark.parametrize("place", TensorExtent)
def test_it_stands_still_only_while_it_takes_weights_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: TensorExtent
) -> None:
    """A folder was gathered, written and read: 30 s and more of a step, all paused."""
    engine = taker(tmp_path)
    monkeypatch.setattr(fronted, "readable_by", lambda _, asked: asked is place)
    engine._find_place()

    async def main() -> WeightsTaken:
        return await engine.update_weights(FROM_TRAINERS)

    done = asyncio.run(main())
    assert engine.heard == ["fetch", "pause", "load", "resume"]
    assert (done.version, done.num_bytes) == (5, 77)
    assert 0 < done.paused_s < done.seconds
    policy = read_folder(str(tmp_path / "policy"))
    assert engine.taken.keys() == policy.keys()
    assert all(torch.equal(engine.taken[name], x + 1) for name, x in policy.items())
    assert not Path(engine.folder).exists()


@pytest.mark.parametrize("why", ["fetch", "unknown weight"])
def test_weights_that_do_not_come_or_fit_disturb_nobody(tmp_path: Path, why: str) -> None:
    engine = taker(tmp_path, **({"head": torch.ones(1)} if why == "unknown weight" else {}))
    engine.fails = [why]

    async def main() -> None:
        with golden.raises(RealsysError):
            await engine.update_weights(FROM_TRAINERS)
        assert (await engine.info()).weight_version == 0

    asyncio.run(main())
    assert engine.heard == ["fetch"]


def test_an_engine_with_half_of_the_weights_makes_no_token_and_is_started_again(
    tmp_path: Path,
) -> None:
    """Its answers would carry the number of a version that it does not have."""
    engine = taker(tmp_path)
    engine.fails = ["load"]

    async def main() -> None:
        with pytest.raises(WaitTimeout):
            await engine.update_weights(FROM_TRAINERS)
        assert engine.heard == ["fetch", "pause", "load"], "it is not resumed"
        assert not Path(engine.folder).exists()
        request = GenerateRequest(rid="r", input_ids=(4,), sampling=Sampling())
        calls = [engine.ended(), engine.info(), engine.resume()]
        for call in (*calls, anext(engine.generate(request, stream=False))):
            with golden.raises(WorkerLost):
                await call

    asyncio.run(main())


@pytest.mark.parametrize("times", [1, 2])
def test_an_engine_that_can_not_be_resumed_is_not_left_paused(tmp_path: Path, times: int) -> None:
    engine = taker(tmp_path)
    engine.fails = ["resume"] * times

    async def main() -> None:
        if times == 1:
            assert (await engine.update_weights(FROM_TRAINERS)).version == 5
            assert (await engine.info()).weight_version == 5
            return
        with pytest.raises(WaitTimeout):
            await engine.update_weights(FROM_TRAINERS)
        with golden.raises(WorkerLost):
            await engine.ended()

    asyncio.run(main())
    assert engine.heard == ["fetch", "pause", "load", "resume", "resume"]


def test_a_pause_without_an_answer_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    engine = taker(tmp_path)
    engine.fails = ["pause"]

    async def main() -> None:
        with pytest.raises(WaitTimeout):
            await engine.update_weights(FROM_TRAINERS)
        assert engine.heard == ["fetch", "pause", "resume"]
        assert (await engine.info()).weight_version == 0
        assert (await engine.update_weights(FROM_TRAINERS)).version == 5

    asyncio.run(main())


def test_a_paused_engine_takes_weights_and_stays_paused(tmp_path: Path) -> None:
    engine = taker(tmp_path)

    async def main() -> None:
        await engine.pause(PauseMode.IN_PLACE)
        await engine.update_weights(FROM_TRAINERS)
        info = await engine.info()
        assert info.paused
        assert not info.updating

    asyncio.run(main())
    assert engine.heard == ["pause", "fetch", "load"]


def test_large_weights_get_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = taker(tmp_path)
    monkeypatch.setattr(fronted, "TAKE_S", 1e-9)
    asyncio.run(engine.update_weights(FROM_TRAINERS))
    size = sum(x.nbytes for x in engine.taken.values())
    assert engine.deadline_s == pytest.approx(size / SLOWEST_BYTES_PER_S)


def test_an_engine_that_can_not_read_our_memory_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = taker(tmp_path)
    for readable, words in (
        ((TensorExtent.DISK,), "weights from trainers are put on the disk of this node"),
        ((), "use schedule.weights_through=disk"),
    ):
        monkeypatch.setattr(fronted, "readable_by", lambda _, place, can=readable: place in can)
        engine._find_place()
        assert words in caplog.text
    with golden.raises(ConfigError):
        asyncio.run(engine.update_weights(FROM_TRAINERS))
    assert engine.heard == []


@pytest.mark.parametrize("through", ["stream", "disk"])
@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_a_plan_lets_each_engine_have_weights_either_way(backend: str, through: str) -> None:
    """A folder was the only way, and had to be asked for."""
    options = Async(server_backend=backend, weights_through=through)
    assert list(options.problems(batch_size=1, num_prompts=None)) == []
    assert Async(server_backend=backend).weights_through == "stream"
