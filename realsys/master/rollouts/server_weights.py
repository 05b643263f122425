"""Publishes new weights for the generation servers: stored by the trainers, announced to the manager."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from realsys.api.errors import RealsysError
from realsys.api.model import ModelName
from realsys.api.worker_configs import MakerRoute
from realsys.master.graph.model_workers import ModelWorkers
from realsys.master.rollouts.manager_client import GserverManagerClient
from realsys.transport.generation_messages import WeightPart, WeightSource
from realsys.transport.rollout_messages import AskManager, ManagerView
from realsys.transport.worker_requests import Published, PublishWeights, SaveModel

logger = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 1800.0
KEPT = 3  # newest versions, whose folders stay in any case
VIEW_S = 10.0


class ServerWeights:
    """Publishes versions of one model.

    Args:
        trained_by: the call that makes a new version.
        holders: model workers with a part of the model.
        every: servers get every n-th version.
        makers: rollout groups whose servers fetch weights only from some of the holders.
        folder: shared folder for the weights; None: from process to process.
        max_staleness: versions by which the trainers may be ahead of servers that read.
    """

    def __init__(
        self,
        model: ModelName,
        *,
        trained_by: str,
        holders: Sequence[int],
        workers: ModelWorkers,
        manager: GserverManagerClient,
        every: int = 1,
        makers: Sequence[MakerRoute] = (),
        folder: Path | None,
        max_staleness: int = 0,
    ) -> None:
        self._num_kept = max(KEPT, max_staleness + 2)
        self._model, self._trained_by = model, trained_by
        self._holders, self._workers = list(holders), workers
        self._manager, self._folder, self._every = manager, folder, every
        sets = dict.fromkeys(tuple(sorted(maker.sources)) for maker in makers)
        self._groups = tuple(sets)
        self._group_of = {
            server: self._groups.index(tuple(sorted(maker.sources)))
            for maker in makers
            for server in maker.servers
        }
        self.seconds = 0.0  # that training stood still for it, the last time

    async def after_call(self, call: str, step: int) -> None:
        """Publishes the weights if step ``step`` made a version that the servers get."""
        if call == self._trained_by and step % self._every == 0:
            await self.publish(step)

    async def publish(self, version: int) -> None:
        """Stores a copy of the weights for the servers and announces it. Does not wait for servers."""
        make = self._to_folder if self._folder is not None else self._at_trainers
        await self._manager.bring(await make(version))

    async def _at_trainers(self, version: int) -> WeightSource:
        request = partial(
            PublishWeights,
            call=self._trained_by,
            step=version,
            model=str(self._model),
            version=version,
            groups=self._groups,
        )
        replies: dict[int, Published] = await self._workers.call(
            dict.fromkeys(self._holders, request),
            timeout_s=PUBLISH_TIMEOUT_S,
            what=f"publish {self._model} version {version}",
        )
        self.seconds = max(reply.ended - reply.started for reply in replies.values())
        parts = [self._parts(replies, group) for group in range(max(1, len(self._groups)))]
        num_bytes = sum(reply.num_bytes for reply in replies.values())
        if not self._group_of:
            return WeightSource(version=version, parts=parts[0], num_bytes=num_bytes)
        routes = {server: parts[group] for server, group in self._group_of.items()}
        return WeightSource(version=version, routes=routes, num_bytes=num_bytes)

    def _parts(self, replies: Mapping[int, Published], group: int) -> tuple[WeightPart, ...]:
        return tuple(
            WeightPart(endpoint=self._workers.records[worker].data, name=reply.names[group])
            for worker, reply in replies.items()
            if reply.names[group]
        )

    async def _to_folder(self, version: int) -> WeightSource:
        assert self._folder is not None
        folder = self._folder / _folder_name(version)
        request = partial(SaveModel, model=str(self._model), folder=str(folder))
        started = asyncio.get_running_loop().time()
        await self._workers.call(
            dict.fromkeys(self._holders, request),
            timeout_s=PUBLISH_TIMEOUT_S,
            what=f"write {self._model} version {version}",
        )
        self.seconds = asyncio.get_running_loop().time() - started
        await self._forget_old()
        num_bytes = await asyncio.to_thread(_size_of, folder)
        return WeightSource(version=version, path=str(folder), num_bytes=num_bytes)

    async def _forget_old(self) -> None:
        """Removes folders of old versions that no server is reading; none while nobody knows."""
        old = await asyncio.to_thread(self._old_folders)
        if not old:
            return
        try:
            view: ManagerView = await self._manager.call(
                AskManager(), timeout_s=VIEW_S, what="which weights servers read"
            )
        except RealsysError as error:
            logger.warning("old weights kept num=%d error=%s", len(old), error.what)
            return
        read = {_folder_name(version) for version in view.taking.values()}
        for folder in old:
            if folder.name not in read:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _old_folders(self) -> list[Path]:
        assert self._folder is not None
        return sorted(self._folder.glob("version-*"))[: -self._num_kept]


def _folder_name(version: int) -> str:
    return f"version-{version:06d}"


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
