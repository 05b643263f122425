"""What a real engine behind our front owes the worker around it, however slow its child is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from real_trials import make_policy

from realsys.serving import fronted
from realsys.serving.api import (
    Finish,
    GenerateRequest,
    PauseMode,
    Sampling,
    WeightSource,
)
from realsys.serving.engines import Answer, Fetched
from realsys.serving.fronted import FrontedEngine


def _nobody(source: WeightSource) -> Fetched:
    raise AssertionError("nothing is fetched for a folder")


class SlowChild(FrontedEngine):
    """Reads weights until it is told that they are there."""

    kind = "slow"

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path=model_path, backend_args={}, fetch=_nobody, version=0)
        self.loaded, self.resumed = asyncio.Event(), 0

    async def _load(
        self, path: str, version: int, *, keep_caches: bool, timeout_s: float
    ) -> None:
        await self.loaded.wait()

    async def _pause(self, mode: PauseMode) -> None: ...

    async def _resume(self) -> None:
        self.resumed += 1

    async def _nothing(self, *args: Any, **more: Any) -> Any: ...

    _answers = _abort = _name_version = flush = _healthy = _gets_on = _nothing  # type: ignore[assignment]


def test_a_child_that_reads_weights_for_long_does_not_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the supervisor would take it for hung while its requests wait."""
    policy, ticks = str(make_policy(tmp_path / "policy")), []
    monkeypatch.setattr(fronted, "_TICK_S", 0.01)
    monkeypatch.setattr(fronted, "tick", lambda: ticks.append(None))

    async def main() -> None:
        async with asyncio.timeout(20):
            engine = SlowChild(policy)
            updating = asyncio.create_task(
                engine.update_weights(WeightSource(version=1, path=policy))
            )
            while len(ticks) < 5:
                await asyncio.sleep(0.01)
            engine.loaded.set()
            assert (await updating).version == 1
            assert engine.resumed == 1
            after = len(ticks)
            await asyncio.sleep(0.1)
            assert len(ticks) == after, "only while it reads"

    asyncio.run(main())


class Echo(SlowChild):
    """Answers with as many tokens as it is asked for."""

    async def _answers(self, request: GenerateRequest, *, stream: bool) -> AsyncIterator[Answer]:  # type: ignore[override]
        count = request.sampling.max_new_tokens
        yield Answer(rid=request.rid, output_ids=[1] * count, finish=Finish.LENGTH)


@pytest.mark.parametrize(
    ("length", "expected"), [(10, 50), (230, 26), (255, 1), (256, 0), (300, 0)]
)
def test_an_answer_ends_where_the_models_positions_do(
    tmp_path: Path, length: int, expected: int
) -> None:
    """One conversation that outgrew them was refused five times, and ended the run."""

    async def main() -> Answer:
        engine = Echo(str(make_policy(tmp_path / "policy")))  # of 256 positions
        sampling = Sampling(max_new_tokens=50, min_new_tokens=40)
        request = GenerateRequest(rid="r", input_ids=(4,) * length, sampling=sampling)
        (answer,) = [answer async for answer in engine.generate(request, stream=False)]
        return answer

    answer = asyncio.run(main())
    assert (len(answer.output_ids), answer.finish) == (expected, Finish.LENGTH)
