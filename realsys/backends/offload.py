"""Weights and moments parked in CPU memory while another model computes on the GPU."""

from __future__ import annotations

import abc
from collections.abc import Iterable

import torch
from torch import Tensor

from realsys.api.errors import InternalError


class HostMemory:
    """Contents of tensors whose own memory was given back.

    The tensors stay the objects they are, and so do all views of them: it is their storage that
    shrinks to nothing and grows again. They must not be touched in between.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def num_bytes(self) -> int:
        """Size of what is kept here."""
        return sum(copy.numel() for _, copy in self._kept)

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copies the storages of ``tensors`` (plain ones, any views) here and frees them."""
        found: dict[tuple[torch.device, int], Tensor] = {}
        for x in tensors:
            if x.untyped_storage().nbytes():
                found.setdefault((x.device, x.untyped_storage().data_ptr()), x)
        for x in found.values():
            storage = x.untyped_storage()
            here = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=x.is_cuda)
            here.copy_(_bytes_of(storage), non_blocking=True)
            self._kept.append((storage, here))
        if any(x.is_cuda for x in found.values()):
            torch.cuda.synchronize()  # the copies must be whole before their sources go
        for storage, _ in self._kept:
            storage.resize_(0)

    def give_back(self) -> None:
        """Puts everything back where it was, bit for bit."""
        for storage, here in self._kept:
            storage.resize_(here.numel())
            _bytes_of(storage).copy_(here, non_blocking=True)
        if any(storage.device.type == "cuda" for storage, _ in self._kept):
            torch.cuda.synchronize()  # pinned memory may be used again from here on
        self._kept.clear()


class Parkable(abc.ABC):
    """An engine's ``offload`` and ``onload``: it says what memory is its own. On CPU nothing moves."""

    device: torch.device
    _parked: HostMemory | None = None

    @abc.abstractmethod
    def own_memory(self) -> list[Tensor]:
        """All tensors that this engine keeps between two calls."""

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


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
