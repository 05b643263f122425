"""Uploads tensors to model workers from a thread of its own, since their client blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from realsys.data.rollout_dump import DumpWriter
from realsys.data.sequence_sample import SequenceSample
from realsys.data.transfer.tensor_client import TensorClient

PUT_S = 300.0  # the model worker replies while computing, but the network may be busy


class TensorUploader:
    """Sends samples to model workers, one after the other. Its owner closes it.

    Args:
        make_client: endpoints of all model workers → client.
        dump: also writes each sample to a file, before it is sent, so that everything trained on is on
            disk even if this process dies.
    """

    def __init__(
        self,
        make_client: Callable[[tuple[str, ...]], TensorClient],
        dump: DumpWriter | None = None,
    ) -> None:
        self._make_client, self._dump = make_client, dump
        self._client: TensorClient | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensors")

    def connect(
        self, endpoints: tuple[str, ...]
    ) -> Callable[[int, SequenceSample], asyncio.Future[None]]:
        """Returns an awaitable ``put(worker, sample)``, which raises as ``TensorClient.put``."""
        client = self._client = self._make_client(endpoints)
        loop = asyncio.get_running_loop()

        def put(worker: int, sample: SequenceSample) -> asyncio.Future[None]:
            return loop.run_in_executor(self._thread, self._put, client, worker, sample)

        return put

    def _put(self, client: TensorClient, worker: int, sample: SequenceSample) -> None:
        if self._dump is not None:
            self._dump.append(sample)
        client.put(worker, sample, timeout_s=PUT_S)

    def close(self) -> None:
        """Waits for the sample being sent, and drops queued ones."""
        self._thread.shutdown(cancel_futures=True)
        if self._client is not None:
            self._client.close()
        if self._dump is not None:
            self._dump.close()
