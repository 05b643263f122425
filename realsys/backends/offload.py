"""Weights and moments parked in CPU memory while another model computes on the GPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


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


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
