"""Link by torch's batched point-to-point operations: gloo between CPUs, NCCL between GPUs, across
hosts too.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from realsys.api.errors import ClusterError, InternalError, WorkerLost
from realsys.weights.realloc.buckets import bucket_share
from realsys.weights.realloc.links import Receive, Send, peer_timeout

BUCKET_BYTES = 64 << 20  # a worker has at most twice this in flight in each direction
ALONE_BYTES = 1 << 20


class TorchLink:
    """Point-to-point over a process group whose ranks are the workers' indices.

    NCCL needs all ranks of a group in its first call, so the group must have been used before.

    Args:
        device: device of the tensors.
        group: None is the group of all workers.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        device: str = "cpu",
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._timeout_s, self._group, self._bucket_bytes = timeout_s, group, bucket_bytes
        self._device = torch.device(device)
        self._out: dict[int, _Pair] = {}
        self._in: dict[int, _Pair] = {}

    def connect(self, sends_to: Collection[int], receives_from: Collection[int]) -> None:
        """Checks that the process group exists; torch opens connections at first use."""
        if (sends_to or receives_from) and not dist.is_initialized():
            raise ClusterError(
                "the workers of two copies of a model have no common process group",
                where="weight reallocation",
                fix="make the process groups first, or move the weights through a folder",
            )

    def bucket_bytes(self, sender: int, receiver: int, fan_out: int) -> int:
        return bucket_share(self._bucket_bytes, fan_out)

    def alone_bytes(self, sender: int, receiver: int) -> int | None:
        return ALONE_BYTES

    def accepts(self, x: Tensor) -> bool:
        # A tensor on another device (shards that cpu_offload keeps on the CPU) would use another backend
        # of the group than the peer expects, and the message would never arrive.
        return x.device.type == self._device.type

    def out_buffer(self, peer: int, num_bytes: int) -> Tensor:
        pair = self._out.setdefault(peer, _Pair(self._device))
        self._leave_at_most(1, peer, pair)
        return pair.buffer(num_bytes)

    def post(self, sends: Mapping[int, Send], receives: Mapping[int, Receive]) -> None:
        ops, pairs = [], []
        for peer, receive in receives.items():
            pair = self._in.setdefault(peer, _Pair(self._device))
            own = receive.into if receive.into is not None else pair.buffer(receive.num_bytes)
            ops.append(dist.P2POp(dist.irecv, own, peer, self._group))
            pairs.append((pair, own))
        for peer, send in sends.items():
            pair = self._out.setdefault(peer, _Pair(self._device))
            self._leave_at_most(1, peer, pair)
            ops.append(dist.P2POp(dist.isend, send.buffer, peer, self._group))
            pairs.append((pair, send.buffer))
        if not ops:
            return
        if strangers := {op.tensor.device.type for op in ops} - {self._device.type}:
            raise InternalError(
                f"a message lies on {min(strangers)}, messages here are on {self._device.type}",
                where="weight reallocation",
                fix="report this as a bug: the message would never have arrived",
            )
        works = dist.batch_isend_irecv(ops)
        if len(works) != len(ops):  # a single one if the backend coalesces them
            works = [works[0]] * len(ops)
        for (pair, buffer), work in zip(pairs, works, strict=True):
            pair.posted(work, buffer)

    def arrivals(self, receives: Mapping[int, Receive]) -> Iterator[tuple[int, Tensor]]:
        for peer in receives:
            work, message = self._in[peer].under_way.pop(0)
            self._wait(peer, work, "send weights")
            yield peer, message

    def drain(self) -> None:
        for peer, pair in self._out.items():
            self._leave_at_most(0, peer, pair)
        if self._device.type == "cuda":  # until here only the stream waits, not this process
            self._await_stream()

    def _leave_at_most(self, count: int, peer: int, pair: _Pair) -> None:
        """Waits for the oldest sends, so that at most two are in flight: there are two buffers."""
        while len(pair.under_way) > count:
            self._wait(peer, pair.under_way.pop(0)[0], "take in weights")

    def _wait(self, peer: int, work: Any, what: str) -> None:
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            if "imed out" in str(error):
                raise peer_timeout(peer, what, self._timeout_s) from error
            raise WorkerLost(
                f"the connection with model_worker/{peer} broke: {error}",
                where="weight reallocation",
                fix=f"see the log of model_worker/{peer}",
            ) from error

    def _await_stream(self) -> None:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        deadline_s = time.monotonic() + self._timeout_s
        while not event.query():
            if time.monotonic() > deadline_s:
                peers = sorted({*self._out, *self._in})
                raise peer_timeout(
                    peers[0], f"(or one of {peers}) exchange weights", self._timeout_s
                )
            time.sleep(100e-6)


class _Pair:
    """One direction of a pair: two alternating buffers, and the messages in flight."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._turn = 0
        self.under_way: list[tuple[Any, Tensor]] = []

    def buffer(self, num_bytes: int) -> Tensor:
        """Returns a buffer uint8 ``[num_bytes]`` other than the previous one."""
        self._turn = 1 - self._turn
        if self._buffers[self._turn].numel() < num_bytes:
            self._buffers[self._turn] = torch.empty(
                num_bytes, dtype=torch.uint8, device=self._device
            )
        return self._buffers[self._turn][:num_bytes]

    def posted(self, work: Any, buffer: Tensor) -> None:
        self.under_way.append((work, buffer))
