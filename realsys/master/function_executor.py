"""Walks the dataflow graph once a step: loads data, lets every call run as soon as its keys exist.

Calls that do not depend on each other run at the same time because nothing here orders them.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial

from realsys.api.data import SequenceMeta
from realsys.api.dataflow import DataflowGraph
from realsys.data_plane.packing import contiguous
from realsys.master.buffer import AsyncIOSequenceBuffer
from realsys.master.data_schedule import DataSchedule
from realsys.master.model_function_call import CallReport, ModelFunctionCall
from realsys.master.model_workers import ModelWorkers, first_error
from realsys.master.storage_tracker import StorageTracker
from realsys.transport.requests import ClearData, Fetch, Fetched

FETCH_TIMEOUT_S = 600.0
CLEAR_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class StepReport:
    """One walk over the graph."""

    step: int  # from 1
    started: float
    ended: float
    calls: dict[str, CallReport]
    ids: tuple[str, ...]  # datapoints that every call has had

    @property
    def wall_s(self) -> float:
        """Seconds from the first request to the last reply."""
        return self.ended - self.started


class FunctionExecutor:
    """Runs the graph. Its calls share one buffer."""

    def __init__(
        self,
        graph: DataflowGraph,
        *,
        calls: list[ModelFunctionCall],
        buffer: AsyncIOSequenceBuffer,
        storage: StorageTracker,
        workers: ModelWorkers,
        schedule: DataSchedule,
        data_workers: list[int],
    ) -> None:
        self.graph, self._calls, self._buffer = graph, calls, buffer
        self._storage, self._workers = storage, workers
        self._schedule, self._data_workers = schedule, data_workers

    async def run_step(self, step: int) -> StepReport:
        """Every call once, on the datapoints of step ``step`` (from 1)."""
        started = time.time()
        async with first_error(), asyncio.TaskGroup() as group:
            loading = group.create_task(self.load_data(step), name="load_data")
            running = {
                c.call.name: group.create_task(c.run(step), name=c.call.name) for c in self._calls
            }
        ended = time.time()
        reports = {name: task.result() for name, task in running.items()}
        used = self._buffer.pop_used(loading.result())
        await self._forget(used)
        return StepReport(step, started, ended, reports, tuple(used))

    async def load_data(self, step: int) -> tuple[str, ...]:
        """Lets the workers that hold the data set load this step's records; returns their ids."""
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
        for worker, reply in replies.items():
            self._storage.add(reply.meta, worker)
        # One put, in the data set's order, so that a batch does not depend on who answered first.
        whole = SequenceMeta.gather([replies[worker].meta for worker in self._data_workers])
        await self._buffer.put_batch(whole)
        return whole.ids

    async def _forget(self, ids: list[str]) -> None:
        holders = sorted(self._storage.forget(ids))
        await self._workers.tell(
            holders, ClearData(ids=tuple(ids)), timeout_s=CLEAR_TIMEOUT_S, what="clear data"
        )
