"""``AsyncIOSequenceBuffer``: the buffer's core with waiting. Used only by the master's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from realsys.api.data import SequenceMeta
from realsys.api.dataflow import DataflowGraph
from realsys.api.errors import WaitTimeout
from realsys.master.graph.buffer_core import SequenceBufferCore


class AsyncIOSequenceBuffer:
    """Datapoints (metadata only), handed to calls oldest first, each once to each call."""

    def __init__(self, graph: DataflowGraph) -> None:
        self._core = SequenceBufferCore(
            input_keys={n.name: n.input_keys for n in graph.nodes},
            n_seqs={n.name: n.n_seqs for n in graph.nodes},
        )
        self._changed = asyncio.Condition()
        self._num_loads = 0

    def __len__(self) -> int:
        return len(self._core)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Notes that datapoints are on their way, while the block runs. It must have a limit of its own."""
        self._num_loads += 1
        try:
            yield
        finally:
            self._num_loads -= 1

    async def put_batch(self, meta: SequenceMeta) -> None:
        """Adds new datapoints from the data set."""
        async with self._changed:
            self._core.put(meta)
            self._changed.notify_all()

    async def amend_batch(self, meta: SequenceMeta) -> None:
        """Adds new keys made by a call."""
        async with self._changed:
            self._core.amend(meta)
            self._changed.notify_all()

    async def get_batch_for_rpc(
        self, call: str, *, timeout_s: float, n_seqs: int | None = None
    ) -> SequenceMeta:
        """Waits until ``call`` has a complete batch, and takes it.

        Args:
            timeout_s: longest time in which the buffer stays as it is and no datapoints are on their way.
            n_seqs: datapoints of the batch; None: the call's own number.
        Raises:
            WaitTimeout: says how many datapoints each call has.
        """
        async with self._changed:
            while (batch := self._core.take(call, n_seqs)) is None:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._changed.wait()
                except TimeoutError:
                    if self._num_loads:
                        continue  # what loads them has a limit
                    raise WaitTimeout(
                        f"{call} waited {timeout_s:g} s for a batch; ready: {self._core.describe()}",
                        where="sequence buffer",
                        fix="see which call of the step did not finish: realsys status",
                    ) from None
            return batch

    def pop_used(self, ids: Sequence[str]) -> list[str]:
        """Drops the datapoints that every call has had; returns them."""
        return self._core.pop_used(ids)

    def drop(self, ids: Sequence[str]) -> None:
        """Drops datapoints, whichever calls have had them; while no call waits."""
        self._core.drop(ids)

    def snapshot(self) -> list[tuple[SequenceMeta, tuple[str, ...]]]:
        """Returns its contents, see ``SequenceBufferCore.snapshot``."""
        return self._core.snapshot()

    def restore(self, parts: Sequence[tuple[SequenceMeta, Sequence[str]]]) -> None:
        """Restores what ``snapshot`` returned; before any call waits."""
        for meta, had in parts:
            self._core.restore(meta, had)
