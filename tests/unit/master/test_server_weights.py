"""Folders of weights for generation servers: which stay, and which go."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from realsys.api.errors import WaitTimeout
from realsys.api.model import ModelName
from realsys.master.graph.model_workers import ModelWorkers
from realsys.master.rollouts.manager_client import GserverManagerClient
from realsys.master.rollouts.server_weights import KEPT, ServerWeights
from realsys.transport.generation_messages import WeightSource
from realsys.transport.rollout_messages import ManagerView


class WritingWorkers:
    """A model worker that writes a model where it is told to."""

    async def call(self, requests: Mapping[int, Any], *, timeout_s: float, what: str) -> Any:
        (make,) = requests.values()
        folder = Path(make.keywords["folder"])
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")


class SlowServers:
    """The manager of servers, of which some read a version for long.

    Attributes:
        taking: server → the version that it reads.
        is_away: it does not answer.
    """

    def __init__(self) -> None:
        self.taking: dict[int, int] = {}
        self.sources: list[WeightSource] = []
        self.is_away = False
        self.num_asked = 0

    async def bring(self, source: WeightSource) -> None:
        self.sources.append(source)

    async def call(self, body: Any, *, timeout_s: float, what: str) -> ManagerView:
        self.num_asked += 1
        if self.is_away:
            raise WaitTimeout("no answer", where="a test", fix="wait")
        return ManagerView(versions={}, sick={}, running={}, waiting=0, taking=self.taking)


def weights(folder: Path, servers: SlowServers, **more: Any) -> ServerWeights:
    return ServerWeights(
        ModelName("actor"),
        trained_by="actor_train",
        holders=[0],
        workers=cast(ModelWorkers, WritingWorkers()),
        manager=cast(GserverManagerClient, servers),
        folder=folder,
        **more,
    )


def versions_in(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in folder.iterdir())


def test_a_folder_stays_as_long_as_a_server_reads_it(tmp_path: Path) -> None:
    """With steps of less than a third of a load it was removed midway, which ended the server's engine."""

    async def main() -> None:
        servers = SlowServers()
        made = weights(tmp_path, servers)
        for version in range(1, KEPT + 1):
            await made.publish(version)
        assert servers.num_asked == 0, "nothing is old yet"
        servers.taking = {0: 1, 1: 3}
        for version in range(KEPT + 1, 9):
            await made.publish(version)
            source = servers.sources[-1]
            assert Path(source.path).is_dir()
            assert source.num_bytes == len(b"weights")
        assert versions_in(tmp_path) == [1, 3, 6, 7, 8]
        servers.taking = {0: 8}
        await made.publish(9)
        assert versions_in(tmp_path) == [7, 8, 9]
        servers.is_away = True
        await made.publish(10)
        assert versions_in(tmp_path) == [7, 8, 9, 10], "nobody knows who reads what"
        servers.is_away, servers.taking = False, {}
        await made.publish(11)
        assert versions_in(tmp_path) == [9, 10, 11]

    asyncio.run(main())


@pytest.mark.parametrize(("max_staleness", "num_kept"), [(0, KEPT), (1, KEPT), (8, 10)])
def test_as_many_stay_as_the_trainers_may_be_ahead(
    max_staleness: int, num_kept: int, tmp_path: Path
) -> None:
    async def main() -> None:
        made = weights(tmp_path, SlowServers(), max_staleness=max_staleness)
        for version in range(1, 15):
            await made.publish(version)
        assert versions_in(tmp_path) == list(range(15 - num_kept, 15))

    asyncio.run(main())
