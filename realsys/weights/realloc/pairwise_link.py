"""Link that uses shared memory with peers on this host and torch with all others, probing each pair."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

from torch import Tensor

from realsys.api.errors import ClusterError
from realsys.weights.realloc.links import Link, Receive, Send
from realsys.weights.realloc.shared_memory_link import SharedMemoryLink, Store
from realsys.weights.realloc.torch_link import TorchLink

T = TypeVar("T")


def open_link(worker: int, *, device: str, store: Store | None, timeout_s: float) -> Link:
    """Opens the link of a model worker. The workers' torch process group must exist before the link
    is used.

    Args:
        device: device of the weights; shared memory is used for ``cpu`` only.
        store: ``torch.distributed.Store`` shared by the workers of this attempt; None: torch alone.
    """
    torch_link = TorchLink(timeout_s=timeout_s, device=device)
    if device != "cpu" or store is None:
        return torch_link
    return PairwiseLink(SharedMemoryLink(worker, store, timeout_s=timeout_s), torch_link)


class PairwiseLink:
    """Uses shared memory for each pair that supports it, else ``other`` (None: not available)."""

    def __init__(self, shared: SharedMemoryLink, other: Link | None) -> None:
        self._shared, self._other = shared, other

    def connect(self, sends_to: Collection[int], receives_from: Collection[int]) -> None:
        self._shared.connect(sends_to, receives_from)
        own = self._shared.worker
        far_out = [peer for peer in sends_to if not self._shared.carries(own, peer)]
        far_in = [peer for peer in receives_from if not self._shared.carries(peer, own)]
        if self._other is not None:
            self._other.connect(far_out, far_in)
        elif far := sorted({*far_out, *far_in}):
            raise ClusterError(
                f"no shared memory with model_worker/{far[0]}: {self._shared.refusals[far[0]]}",
                where="weight reallocation",
                fix="join the workers in a process group, or move the weights through a folder",
            )

    def bucket_bytes(self, sender: int, receiver: int, fan_out: int) -> int:
        return self._of(sender, receiver).bucket_bytes(sender, receiver, fan_out)

    def alone_bytes(self, sender: int, receiver: int) -> int | None:
        return self._of(sender, receiver).alone_bytes(sender, receiver)

    def accepts(self, x: Tensor) -> bool:
        return (self._other or self._shared).accepts(x)

    def out_buffer(self, peer: int, num_bytes: int) -> Tensor:
        return self._of(self._shared.worker, peer).out_buffer(peer, num_bytes)

    def post(self, sends: Mapping[int, Send], receives: Mapping[int, Receive]) -> None:
        near_out, far_out = self._parted(sends, out=True)
        near_in, far_in = self._parted(receives, out=False)
        self._shared.post(near_out, near_in)
        if self._other is not None:
            self._other.post(far_out, far_in)

    def arrivals(self, receives: Mapping[int, Receive]) -> Iterator[tuple[int, Tensor]]:
        near, far = self._parted(receives, out=False)
        yield from self._shared.arrivals(near)
        if self._other is not None:
            yield from self._other.arrivals(far)

    def drain(self) -> None:
        if self._other is not None:
            self._other.drain()

    def _of(self, sender: int, receiver: int) -> Link:
        if self._other is None or self._shared.carries(sender, receiver):
            return self._shared
        return self._other

    def _parted(self, messages: Mapping[int, T], *, out: bool) -> tuple[dict[int, T], dict[int, T]]:
        """Splits messages into (those through shared memory, the others)."""
        near: dict[int, T] = {}
        far: dict[int, T] = {}
        own = self._shared.worker
        for peer, message in messages.items():
            pair = (own, peer) if out else (peer, own)
            (near if self._shared.carries(*pair) else far)[peer] = message
        return near, far
