"""Buffers that are used again once nobody has them any more: the system need not clear them anew.

A page that is touched for the first time costs more than copying into it. Whoever takes a buffer just drops
it; it comes back when the last tensor over it is gone, whatever thread that happens in.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque

import numpy as np
import torch

MIN_BYTES = 64 << 10  # smaller ones are not worth keeping


class BufferPool:
    """Buffers by their size. Any thread may take from it.

    Args:
        pinned: buffers that a GPU reads and writes directly; torch keeps those itself.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        # A finalizer may run in the middle of ``allocate``: deques need no lock.
        self._spare: dict[int, deque[np.ndarray]] = defaultdict(deque)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """uint8 ``[num_bytes]`` in host memory; what is in it is anything."""
        if self._pinned:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        if num_bytes < MIN_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        spare = self._spare[num_bytes]
        try:
            own = spare.pop()
        except IndexError:
            own = np.empty(num_bytes, np.uint8)
        lent = own[:]  # the tensor keeps this object alive, and its views keep the tensor's memory
        weakref.finalize(lent, spare.append, own).atexit = False
        return torch.from_numpy(lent)

    @property
    def spare_bytes(self) -> int:
        """Held for later."""
        return sum(num_bytes * len(spare) for num_bytes, spare in list(self._spare.items()))

    def clear(self) -> None:
        """Gives what is spare back to the system."""
        for spare in list(self._spare.values()):
            spare.clear()
