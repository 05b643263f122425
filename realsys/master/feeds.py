"""Where a step's datapoints come from: the data set on model workers, or rollout workers (rollouts.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from realsys.api.data import SequenceMeta
from realsys.data_plane.packing import contiguous
from realsys.master.data_schedule import DataSchedule
from realsys.master.model_workers import ModelWorkers
from realsys.transport.requests import Fetch, Fetched

FETCH_TIMEOUT_S = 600.0

Held = tuple[SequenceMeta, int]  # datapoints, and the model worker that has their tensors


class Feed(Protocol):
    """Gives each step its datapoints."""

    async def load(self, step: int) -> Sequence[Held]:
        """The datapoints of step ``step`` (from 1), in the order in which they are trained on."""

    async def trained(self, step: int) -> None:
        """Step ``step`` is done: its datapoints will not be asked for again."""


class DataSetFeed:
    """Lets the workers that hold the data set load each step's records."""

    def __init__(
        self, schedule: DataSchedule, *, workers: ModelWorkers, data_workers: Sequence[int]
    ) -> None:
        self._schedule, self._workers = schedule, workers
        self._data_workers = list(data_workers)

    async def load(self, step: int) -> list[Held]:
        """As in the protocol."""
        points = self._schedule.batch(step - 1)
        requests = {}
        for worker, part in zip(
            self._data_workers, contiguous(len(points), len(self._data_workers)), strict=True
        ):
            mine = [points[i] for i in part]
            requests[worker] = partial(
                Fetch,
                indices=tuple(p.index for p in mine),
                ids=tuple(p.id for p in mine),
            )
        replies: dict[int, Fetched] = await self._workers.call(
            requests, timeout_s=FETCH_TIMEOUT_S, what=f"fetch step {step}"
        )
        # In the data set's order, so that a batch does not depend on who answered first.
        return [(replies[worker].meta, worker) for worker in self._data_workers]

    async def trained(self, step: int) -> None:
        """The schedule needs to know nothing."""
