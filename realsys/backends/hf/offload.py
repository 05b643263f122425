"""Weights and moments parked in CPU memory while another model computes on the GPU."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from realsys.api.errors import InternalError

_LARGEST_BLOCK, _SMALLEST_BLOCK = 1 << 30, 1 << 20


class HostMemory:
    """Contents of tensors whose own memory was given back.

    The tensors stay the objects they are, and so do all views of them: it is their storage that
    shrinks to nothing and grows again. They must not be touched in between.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, list[Tensor]]] = []
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []  # and their sizes
        self._blocks: list[Tensor] = []
        self._free = 0  # bytes at the end of the last block

    @property
    def num_bytes(self) -> int:
        """Size of what is kept here."""
        return sum(piece.numel() for _, pieces in self._kept for piece in pieces)

    @property
    def block_bytes(self) -> list[int]:
        """Sizes of the memory that it lies in."""
        return [block.numel() for block in self._blocks]

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copies the storages of ``tensors`` (plain ones, any views) here and frees them."""
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
            torch.cuda.synchronize()  # the copies must be whole before their sources go
        for storage, _ in self._kept:
            storage.resize_(0)

    def empty(self, tensors: Iterable[Tensor]) -> None:
        """Frees the storages of ``tensors``; what was in them is not kept."""
        for x in tensors:
            storage = x.untyped_storage()
            if storage.nbytes():
                self._emptied.append((storage, storage.nbytes()))
                storage.resize_(0)

    def give_back(self) -> None:
        """Puts everything back where it was, bit for bit; zeros into what was emptied."""
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
            torch.cuda.synchronize()  # pinned memory may be used again from here on
        self._kept.clear()
        self._blocks.clear()
        self._free = 0

    def _pieces(self, num_bytes: int, rest: int, *, pin: bool) -> Iterator[Tensor]:
        """Memory for ``num_bytes``, of ``rest`` that are still to come with these."""
        while num_bytes:
            if not self._free:
                self._blocks.append(_block(rest, pin=pin))
                self._free = self._blocks[-1].numel()
            size = min(num_bytes, self._free)
            first = self._blocks[-1].numel() - self._free
            yield self._blocks[-1][first : first + size]
            self._free -= size
            num_bytes, rest = num_bytes - size, rest - size


class Parkable(abc.ABC):
    """An engine's ``offload`` and ``onload``: it says what memory is its own. On CPU nothing moves."""

    device: torch.device
    _parked: HostMemory | None = None

    @abc.abstractmethod
    def own_memory(self) -> list[Tensor]:
        """All tensors that this engine keeps between two calls."""

    def passing_memory(self) -> list[Tensor]:
        """Memory that it keeps between two calls, while what is in it counts during one only: gradients."""
        return []

    @abc.abstractmethod
    def drop_copies(self) -> None:
        """Frees what can be made again: whole weights that were gathered."""

    def offload(self) -> None:
        """Moves everything to CPU memory. Nothing may be computed until ``onload``."""
        if self._parked is not None:
            return
        self.drop_copies()
        self._parked = HostMemory()
        if self.device.type == "cuda":
            self._parked.take(x for x in self.own_memory() if x.is_cuda)
            self._parked.empty(x for x in self.passing_memory() if x.is_cuda)
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Takes back what ``offload`` moved. Does nothing when nothing was."""
        if self._parked is not None:
            self._parked.give_back()
            self._parked = None

    def must_be_here(self, what: str) -> None:
        """Refuses to touch weights that are parked."""
        if self._parked is not None:
            raise InternalError(f"{what} on an offloaded model", where=type(self).__name__)


def _block(rest: int, *, pin: bool) -> Tensor:
    """torch's pinned memory comes in powers of two, rounded up: up to twice what is asked for. So it is
    asked for in powers of two that fit, but for the last one."""
    size = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, 1 << (rest.bit_length() - 1)))
    return torch.empty(size, dtype=torch.uint8, pin_memory=pin)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
