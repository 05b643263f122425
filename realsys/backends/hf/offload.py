"""Moves weights and moments to CPU memory while another model computes on the GPU."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from realsys.api.errors import InternalError

_LARGEST_BLOCK, _SMALLEST_BLOCK = 1 << 30, 1 << 20


class HostMemory:
    """Contents of tensors whose device memory was freed.

    The tensors and all their views remain the same objects; only their storage is shrunk to zero and
    grown again. They must not be accessed in between.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, list[Tensor]]] = []
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []  # and their sizes
        self._blocks: list[Tensor] = []
        self._free = 0  # free bytes at the end of the last block

    @property
    def num_bytes(self) -> int:
        """Size of the stored contents."""
        return sum(piece.numel() for _, pieces in self._kept for piece in pieces)

    @property
    def block_bytes(self) -> list[int]:
        """Sizes of the allocated host memory blocks."""
        return [block.numel() for block in self._blocks]

    def store(self, tensors: Iterable[Tensor]) -> None:
        """Copies the storages of ``tensors`` (plain ones, any views) to the host and frees them."""
        found: dict[tuple[torch.device, int], Tensor] = {}
        for x in tensors:
            if x.untyped_storage().nbytes():
                found.setdefault((x.device, x.untyped_storage().data_ptr()), x)
        rest = sum(x.untyped_storage().nbytes() for x in found.values())
        for x in found.values():
            storage = x.untyped_storage()
            pieces, at = [], 0
            for piece in self._pieces(storage.nbytes(), rest, pin=x.is_cuda):
                piece.copy_(_bytes_of(storage)[at : at + piece.numel()], non_blocking=True)
                pieces.append(piece)
                at += piece.numel()
            rest -= at
            self._kept.append((storage, pieces))
        if any(x.is_cuda for x in found.values()):
            torch.cuda.synchronize()  # copies must be complete before their sources are freed
        for storage, _ in self._kept:
            storage.resize_(0)

    def discard(self, tensors: Iterable[Tensor]) -> None:
        """Frees the storages of ``tensors`` without storing their contents."""
        for x in tensors:
            storage = x.untyped_storage()
            if storage.nbytes():
                self._emptied.append((storage, storage.nbytes()))
                storage.resize_(0)

    def restore(self) -> None:
        """Restores all contents bit for bit; discarded ones become zeros."""
        for storage, size in self._emptied:
            storage.resize_(size)
            _bytes_of(storage).zero_()
        self._emptied.clear()
        for storage, pieces in self._kept:
            storage.resize_(sum(piece.numel() for piece in pieces))
            wholes = torch.split(_bytes_of(storage), [piece.numel() for piece in pieces])
            for piece, whole in zip(pieces, wholes, strict=True):
                whole.copy_(piece, non_blocking=True)
        if any(storage.device.type == "cuda" for storage, _ in self._kept):
            torch.cuda.synchronize()  # pinned memory may be reused from here on
        self._kept.clear()
        self._blocks.clear()
        self._free = 0

    def _pieces(self, num_bytes: int, rest: int, *, pin: bool) -> Iterator[Tensor]:
        """Yields host memory for ``num_bytes``, of ``rest`` bytes still to come including these."""
        while num_bytes:
            if not self._free:
                self._blocks.append(_block(rest, pin=pin))
                self._free = self._blocks[-1].numel()
            size = min(num_bytes, self._free)
            first = self._blocks[-1].numel() - self._free
            yield self._blocks[-1][first : first + size]
            self._free -= size
            num_bytes, rest = num_bytes - size, rest - size


class Offloadable(abc.ABC):
    """Offloads an engine's own memory to the CPU and back. On the CPU nothing moves."""

    device: torch.device
    _offloaded: HostMemory | None = None

    @abc.abstractmethod
    def own_memory(self) -> list[Tensor]:
        """Lists all tensors that this engine keeps between two calls."""
        return []

    def transient_memory(self) -> list[Tensor]:
        """Memory kept between calls whose content matters only during a call: gradients."""
        return []

    @abc.abstractmethod
    def drop_copies(self) -> None:
        """Frees buffers that can be recomputed, such as gathered whole weights."""

    def offload(self) -> None:
        """Moves all own memory to the CPU. Nothing is computed until ``onload``."""
        if self._offloaded is not None:
            return
        self.drop_copies()
        self._offloaded = HostMemory()
        if self.device.type == "cuda":
            self._offloaded.store(x for x in self.own_memory() if x.is_cuda)
            self._offloaded.discard(x for x in self.transient_memory() if x.is_cuda)
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Moves back what ``offload`` moved. Does nothing if nothing was offloaded."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def require_onloaded(self, what: str) -> None:
        """Raises InternalError if the weights are offloaded."""
        if self._offloaded is not None:
            raise InternalError(f"{what} on an offloaded model", where=type(self).__name__)


def _block(rest: int, *, pin: bool) -> Tensor:
    """Allocates a block of at most ``rest`` bytes, pinned if asked.

    torch rounds pinned allocations up to powers of two, up to twice the requested size. So blocks
    are powers of two that fit, except the last one.
    """
    size = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, 1 << (rest.bit_length() - 1)))
    return torch.empty(size, dtype=torch.uint8, pin_memory=pin)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
