"""Time-outs that grow with bytes, and with what is done for the first time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realsys.generation.manager import updates
from realsys.generation.server.build import fetch_with
from realsys.master.rollouts import server_weights
from realsys.model_worker.model_worker import BETWEEN_STEPS_S, FIRST_REQUEST_S, ModelWorkerLoop
from realsys.runtime.transfer_time import transfer_time_s
from realsys.transport import worker_requests as rq
from realsys.transport.generation_messages import WeightPart, WeightSource

GB = 10**9


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(0, 120.0), (GB, 120.0), (15 * GB, 300.0), (141 * GB, 2820.0)]
)
def test_many_bytes_have_more_time(num_bytes, seconds):
    assert transfer_time_s(num_bytes, at_least_s=120.0) == seconds


def test_a_server_has_time_for_the_bytes_of_its_weights():
    """The manager waits so long for it, and it for the trainers."""
    given: list[float] = []

    async def update(source: WeightSource, *, timeout_s: float) -> Any:
        given.append(timeout_s)
        return SimpleNamespace(version=source.version)

    fleet = SimpleNamespace(like={}, is_current=lambda _: False)
    member = SimpleNamespace(
        index=0,
        name="generation_server/0",
        num_updates=0,
        client=SimpleNamespace(update_weights=update),
    )
    one = updates.Updates(fleet, timeout_s=120.0)  # type: ignore[arg-type]
    for num_bytes in (0, 30 * GB):
        source = WeightSource(version=1, num_bytes=num_bytes)
        assert asyncio.run(one._update(member, source)) == ""  # type: ignore[arg-type]
    assert given == [120.0, 600.0]

    def fetch(source: WeightSource, *, timeout_s: float) -> Any:
        given.append(timeout_s)
        return {}

    receiver: Any = SimpleNamespace(num_bytes=0, fetch=fetch)
    for num_bytes in (0, 60 * GB):
        fetch_with(receiver)(WeightSource(version=1, num_bytes=num_bytes))
    assert given[2:] == [600.0, 1200.0]


def test_a_servers_own_source_says_how_many_bytes_it_gets(tmp_path: Path):
    part = WeightPart(endpoint="tcp://a", name="v1")
    source = WeightSource(version=1, routes={3: (part,)}, num_bytes=7)
    assert source.of_server(3).num_bytes == 7
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_bytes(b"{}")
    assert server_weights._size_of(tmp_path) == 7


def test_what_is_done_for_the_first_time_may_take_longer():
    """NCCL connects a group when it is first used, which may be in a late step."""
    loop: Any = SimpleNamespace(_first_done={})

    def may_take(request: Any) -> float:
        return ModelWorkerLoop._stall_limit_s(loop, request)

    def move(target: str, step: int) -> rq.Reallocate:
        return rq.Reallocate(order=1, call="a", step=step, source="actor@0", target=target)

    moves = [move("actor@1", 5), move("actor@1", 6), move("actor@2", 9), move("actor@2", 10)]
    # In its first step nothing is usual, and the judge waits long anyway.
    assert [may_take(one) for one in moves] == [0.0, 0.0, FIRST_REQUEST_S, 0.0]
    assert may_take(rq.Fetch(order=4, indices=(0,), ids=("a",))) == 0.0
    assert may_take(rq.SaveModel(order=3, model="actor@0", folder="/f")) == BETWEEN_STEPS_S
