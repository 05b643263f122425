"""Runs one model function call of the graph: batch in, requests out, new keys back to the buffer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from realsys.api.data import SequenceMeta
from realsys.api.dataflow import MFCDef
from realsys.api.model import ModelShardID, ProcessTopology
from realsys.data_plane.transfer_plan import plan_transfers
from realsys.master.buffer import AsyncIOSequenceBuffer
from realsys.master.dispatch import split_over_ranks
from realsys.master.model_workers import ModelWorkers
from realsys.master.storage_tracker import StorageTracker
from realsys.transport.requests import CallDone, RunCall

CALL_TIMEOUT_S = 4 * 3600.0


@dataclass(frozen=True)
class CallReport:
    """What a call did in one step: statistics of its first data-parallel head, times per worker."""

    name: str
    queued: float
    replies: dict[int, CallDone]
    stats: dict[str, float]
    ids: tuple[str, ...]

    @property
    def compute_s(self) -> float:
        """Seconds inside the interface, on the slowest worker."""
        return max(reply.compute_s for reply in self.replies.values())

    @property
    def tokens(self) -> int:
        """Tokens that the call read or made, over all data-parallel ranks."""
        return sum(reply.tokens for reply in self.replies.values())


class ModelFunctionCall:
    """One node of the graph, wired to the workers that hold its model."""

    def __init__(
        self,
        call: MFCDef,
        *,
        topo: ProcessTopology,
        placement: dict[int, int],
        buffer: AsyncIOSequenceBuffer,
        storage: StorageTracker,
        workers: ModelWorkers,
        on_change: Callable[[str, tuple[str, ...]], None],
    ) -> None:
        self.call, self.topo = call, topo
        self._worker_of = placement  # parallelism rank → model worker
        self._buffer, self._storage, self._workers = buffer, storage, workers
        self._on_change = on_change

    async def run(self, step: int) -> CallReport:
        """Waits for a batch, has it computed, and gives the new keys to the buffer."""
        batch = await self._buffer.get_batch_for_rpc(self.call.name, timeout_s=CALL_TIMEOUT_S)
        queued = time.time()
        parts = split_over_ranks(self.call, batch, self.topo.data)
        metas = [batch.take(part) for part in parts]
        requests: dict[int, Callable[..., RunCall]] = {}
        inputs: dict[int, SequenceMeta] = {}
        for rank, worker in self._worker_of.items():
            meta = metas[self.topo.coordinate(rank)[1]]
            requests[worker], inputs[worker] = self._request(meta, worker, step), meta
        names = tuple(self._workers.records[w].worker for w in requests)
        self._on_change(self.call.name, names)
        try:
            replies: dict[int, CallDone] = await self._workers.call(
                requests, timeout_s=CALL_TIMEOUT_S, what=f"{self.call.name} step {step}"
            )
        finally:
            self._on_change(self.call.name, ())
        # Not before: a worker that is still to fetch a tensor can't give it to others.
        for worker, meta in inputs.items():
            self._storage.add(meta, worker)
        await self._take_outputs(replies)
        head = self._worker_of[self.topo.data_parallel_heads()[0]]
        return CallReport(self.call.name, queued, replies, dict(replies[head].stats), batch.ids)

    def _request(self, meta: SequenceMeta, worker: int, step: int) -> Callable[..., RunCall]:
        sources = plan_transfers(
            consumer=worker,
            keys=self.call.input_keys,
            ids=meta.ids,
            owners=self._storage.owners,
            num_bytes=self._storage.num_bytes,
        )
        return partial(RunCall, call=self.call.name, step=step, meta=meta, sources=sources)

    async def _take_outputs(self, replies: dict[int, CallDone]) -> None:
        for rank in self.topo.data_parallel_heads():
            worker = self._worker_of[rank]
            meta = replies[worker].meta
            if meta is not None:
                self._storage.add(meta, worker)
                await self._buffer.amend_batch(meta)


def placement_of(
    call: MFCDef, shards: tuple[tuple[ModelShardID, int], ...]
) -> tuple[ProcessTopology, dict[int, int]]:
    """Topology of a call's model and, for each parallelism rank, the model worker that holds it."""
    mine = [(shard, worker) for shard, worker in shards if shard.model_name == call.model_name]
    return mine[0][0].topo, {shard.parallelism_rank: worker for shard, worker in mine}
