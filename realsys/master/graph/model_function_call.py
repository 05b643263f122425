"""Runs one model function call of the graph: takes a batch, sends requests, puts new keys into the
buffer.

The weight movements of its hooks are numbered together with it, so that nothing comes between them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from realsys.api.data import SequenceMeta
from realsys.api.dataflow import MFCDef
from realsys.api.model import ModelInterfaceType, ModelShardID, ProcessTopology
from realsys.data.packing import balanced_partition, contiguous
from realsys.data.transfer.transfer_plan import plan_redistribution
from realsys.master.graph.buffer import AsyncIOSequenceBuffer
from realsys.master.graph.model_workers import ModelWorkers
from realsys.master.graph.storage_tracker import StorageTracker
from realsys.master.graph.weight_hooks import WeightHooks, WeightMovement
from realsys.runtime.first_error import first_error
from realsys.runtime.progress import tick
from realsys.transport.worker_requests import CallDone, Moved, RunCall

CALL_TIMEOUT_S = 4 * 3600.0


@dataclass(frozen=True)
class CallReport:
    """Result of a call in one step: statistics of its first data-parallel head, times per worker.

    With dynamic sampling a step may run a call several times: this is the last, ``earlier`` the others.
    """

    name: str
    queued: float
    replies: dict[int, CallDone]
    stats: dict[str, float]
    ids: tuple[str, ...]
    moves: dict[str, dict[int, Moved]] = field(default_factory=dict)  # of its hooks
    earlier: tuple[CallReport, ...] = ()

    @property
    def runs(self) -> tuple[CallReport, ...]:
        """All runs of the call in the step, in order."""
        return (*self.earlier, self)

    @property
    def compute_s(self) -> float:
        """Seconds inside the interface, on the slowest worker of each run."""
        return sum(max(r.compute_s for r in run.replies.values()) for run in self.runs)

    @property
    def moving_s(self) -> float:
        """Seconds of its weight movements, each on the slowest worker."""
        moves = [move.values() for run in self.runs for move in run.moves.values()]
        return sum(max(m.ended - m.started for m in move) for move in moves)

    @property
    def tokens(self) -> int:
        """Tokens that the call read or generated, over all data-parallel ranks."""
        return sum(r.tokens for run in self.runs for r in run.replies.values() if r.is_head)


@dataclass(eq=False, repr=False)
class ModelFunctionCall:
    """One node of the graph, connected to the workers that hold its model."""

    call: MFCDef
    _: KW_ONLY
    topo: ProcessTopology
    placement: dict[int, int]  # parallelism rank → model worker
    buffer: AsyncIOSequenceBuffer
    storage: StorageTracker
    workers: ModelWorkers
    hooks: WeightHooks
    on_change: Callable[[str, tuple[str, ...]], None]

    def __post_init__(self) -> None:
        self._heads = [self.placement[rank] for rank in self.topo.data_parallel_heads()]

    async def run(
        self, step: int, *, issued: asyncio.Event | None = None, n_seqs: int | None = None
    ) -> CallReport:
        """Waits for a batch, has it computed, and puts the new keys into the buffer.

        Args:
            issued: set when all requests are numbered: later requests run after them.
            n_seqs: datapoints of the batch; None: the call's own number.
        """
        batch = await self.buffer.get_batch_for_rpc(
            self.call.name, timeout_s=CALL_TIMEOUT_S, n_seqs=n_seqs
        )
        queued = time.time()
        inputs = self._inputs(batch)
        # No await until the last of these has its number.
        before = self._numbered(self.hooks.before(self.call, step=step))
        bodies = self.workers.number(self._requests(inputs, step))
        after = self._numbered(self.hooks.after(self.call, step=step))
        if issued is not None:
            issued.set()
        self.on_change(self.call.name, tuple(self.workers.records[w].worker for w in bodies))
        try:
            async with first_error(), asyncio.TaskGroup() as group:
                moving = {
                    what: group.create_task(self._exchange(requests, what, step))
                    for what, requests in (*before, *after)
                }
                running = group.create_task(self._exchange(bodies, self.call.name, step))
        finally:
            self.on_change(self.call.name, ())
        tick()
        replies: dict[int, CallDone] = running.result()
        # Not before: a worker that is still to fetch a tensor can't give it to others.
        for worker, meta in inputs.items():
            self.storage.add(meta, worker)
        await self._take_outputs(replies)
        stats = dict(replies[self._heads[0]].stats)
        moves = {what: task.result() for what, task in moving.items()}
        return CallReport(self.call.name, queued, replies, stats, batch.ids, moves)

    async def _exchange(self, bodies: Mapping[int, Any], what: str, step: int) -> dict[int, Any]:
        return await self.workers.exchange(
            bodies, timeout_s=CALL_TIMEOUT_S, what=f"{what} step {step}"
        )

    def _numbered(self, movements: list[WeightMovement]) -> list[tuple[str, dict[int, Any]]]:
        return [(m.what, self.workers.number(m.requests)) for m in movements]

    def _inputs(self, batch: SequenceMeta) -> dict[int, SequenceMeta]:
        """Returns worker → its part of the batch; workers of one data-parallel slot have the same."""
        parts = split_over_ranks(self.call, batch, self.topo.data)
        metas = [batch.take(part) for part in parts]
        return {
            worker: metas[self.topo.coordinate(rank)[1]] for rank, worker in self.placement.items()
        }

    def _requests(
        self, inputs: Mapping[int, SequenceMeta], step: int
    ) -> dict[int, Callable[..., RunCall]]:
        sources = plan_redistribution(
            consumers={worker: meta.ids for worker, meta in inputs.items()},
            keys=self.call.input_keys,
            owners=self.storage.owners,
            num_bytes=self.storage.num_bytes,
            host_of=self._host_of,
        )
        return {
            worker: partial(
                RunCall,
                call=self.call.name,
                step=step,
                meta=meta,
                sources=sources.get(worker, ()),
            )
            for worker, meta in inputs.items()
        }

    def _host_of(self, worker: int) -> str:
        return self.workers.records[worker].host

    async def _take_outputs(self, replies: dict[int, CallDone]) -> None:
        """Puts new keys into the buffer. All ranks of a data-parallel slot store the same: each is an
        owner."""
        for data, head in enumerate(self._heads):
            meta = replies[head].meta
            if meta is None:
                continue
            for rank in self.topo.slot(data):
                worker = self.placement[rank]
                if replies[worker].kept:
                    self.storage.add(meta, worker)
            await self.buffer.amend_batch(meta)


def placement_of(
    call: MFCDef, shards: tuple[tuple[ModelShardID, int], ...]
) -> tuple[ProcessTopology, dict[int, int]]:
    """Returns the topology of a call's model and, for each parallelism rank, its model worker."""
    mine = [(shard, worker) for shard, worker in shards if shard.model_name == call.model_name]
    return mine[0][0].topo, {shard.parallelism_rank: worker for shard, worker in mine}


# ---- Splits a call's batch over data-parallel ranks (pure).
#
# Generation and training get equal counts; everything except generation, whose lengths are not known yet,
# is balanced by tokens. A training batch is distributed minibatch by minibatch: for any number of ranks,
# all of them together see the same minibatches.
#
# Generation gets contiguous runs of the batch, so its results lie in runs on the ranks: where runs are
# balanced anyway, everything is split into runs, and data stays on the rank that made it.


_BALANCED = 1.01  # the heaviest part to the mean


def split_over_ranks(call: MFCDef, meta: SequenceMeta, num_ranks: int) -> list[list[int]]:
    """Returns the positions in ``meta`` for each data-parallel rank, in order."""
    if num_ranks == 1:
        return [list(range(meta.batch_size))]
    if call.interface_type is ModelInterfaceType.GENERATE:
        return contiguous(meta.batch_size, num_ranks)
    tokens = meta.tokens_per_id()
    if call.interface_type is not ModelInterfaceType.TRAIN_STEP:
        return _balanced(tokens, num_ranks)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for minibatch in contiguous(meta.batch_size, call.n_minibatches):
        parts = _balanced([tokens[i] for i in minibatch], num_ranks, equal_counts=True)
        for rank, part in zip(ranks, parts, strict=True):
            rank += [minibatch[i] for i in part]
    return ranks


def _balanced(
    tokens: Sequence[int], num_parts: int, *, equal_counts: bool = False
) -> list[list[int]]:
    runs = contiguous(len(tokens), num_parts)
    heaviest = max(sum(tokens[i] for i in run) for run in runs)
    if heaviest * num_parts <= _BALANCED * sum(tokens):
        return runs
    return balanced_partition(tokens, num_parts, equal_counts=equal_counts)
