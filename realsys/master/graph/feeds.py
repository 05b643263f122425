"""Sources of a step's datapoints: the data set on model workers, or rollout workers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from realsys.api.data import SequenceMeta
from realsys.api.errors import DataError
from realsys.data.packing import contiguous
from realsys.master.graph.data_schedule import DataSchedule
from realsys.master.graph.model_workers import ModelWorkers
from realsys.observability.jsonl import read_jsonl
from realsys.transport.worker_requests import Fetch, Fetched

FETCH_TIMEOUT_S = 600.0

Held = tuple[SequenceMeta, int]  # datapoints, and the model worker that has their tensors


class Feed(Protocol):
    """Provides each step's datapoints."""

    async def load(self, step: int) -> Sequence[Held]:
        """Returns the datapoints of step ``step`` (from 1), in training order."""

    async def trained(self, step: int) -> None:
        """Notes that step ``step`` is done: its datapoints will not be requested again."""


class DataSetFeed:
    """Makes the workers that hold the data set load each step's records."""

    def __init__(
        self, schedule: DataSchedule, *, workers: ModelWorkers, data_workers: Sequence[int]
    ) -> None:
        self._schedule, self._workers = schedule, workers
        self._data_workers = list(data_workers)

    async def load(self, step: int) -> list[Held]:
        """Implements ``Feed.load``."""
        points = [(point.index, point.id) for point in self._schedule.batch(step - 1)]
        return await fetch(points, step, workers=self._workers, data_workers=self._data_workers)

    async def trained(self, step: int) -> None:
        """Does nothing: the schedule depends only on the step."""


class ReplayFeed:
    """Makes the workers load what an earlier run trained on, step by step (sources/replayed_rollouts.py).

    Args:
        steps: the ids of each step, from the earlier run's ledger.
    """

    def __init__(
        self, steps: Sequence[Sequence[str]], *, workers: ModelWorkers, data_workers: Sequence[int]
    ) -> None:
        self._steps, self._workers = steps, workers
        self._data_workers = list(data_workers)

    async def load(self, step: int) -> list[Held]:
        """Implements ``Feed.load``."""
        points = [(0, name) for name in self._steps[step - 1]]
        return await fetch(points, step, workers=self._workers, data_workers=self._data_workers)

    async def trained(self, step: int) -> None:
        """Does nothing: the ledger is already written."""


def recorded_steps(ledger: Path) -> list[list[str]]:
    """Returns the ids that each step of an earlier run trained on, from step 1.

    Raises:
        DataError: the ledger is not there, or misses a step.
    """
    rows = read_jsonl(ledger)
    steps = {int(row["step"]): list(row.get("samples") or row["ids"]) for row in rows}
    if sorted(steps) != list(range(1, len(steps) + 1)) or not steps:
        raise DataError(
            f"it tells of steps {sorted(steps)[:5]} …, not of all from 1",
            where=str(ledger),
            fix="replay a run whose ledger is whole",
        )
    return [steps[step] for step in sorted(steps)]


async def fetch(
    points: Sequence[tuple[int, str]],
    step: int,
    *,
    workers: ModelWorkers,
    data_workers: Sequence[int],
) -> list[Held]:
    """Loads (index, id) in runs, on the workers that hold the data set."""
    requests = {}
    parts = contiguous(len(points), len(data_workers))
    for worker, part in zip(data_workers, parts, strict=True):
        mine = [points[i] for i in part]
        requests[worker] = partial(
            Fetch, indices=tuple(i for i, _ in mine), ids=tuple(name for _, name in mine)
        )
    replies: dict[int, Fetched] = await workers.call(
        requests, timeout_s=FETCH_TIMEOUT_S, what=f"fetch step {step}"
    )
    # In the given order, so that a batch does not depend on who answered first.
    return [(replies[worker].meta, worker) for worker in data_workers]
