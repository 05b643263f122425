"""A pool of host buffers. Reusing pages avoids that the kernel zeroes fresh ones.

Touching a fresh page costs more than copying into it. Buffers are not returned explicitly: a buffer becomes
free when its last tensor is freed, in any thread.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque

import numpy as np
import torch

MIN_BYTES = 64 << 10  # smaller buffers are not worth keeping


class BufferPool:
    """Free buffers by size. Thread-safe.

    Args:
        pinned: allocate pinned memory, which a GPU reads and writes directly; torch pools it itself.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        # A finalizer may run in the middle of ``allocate``: deques need no lock.
        self._spare: dict[int, deque[np.ndarray]] = defaultdict(deque)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Returns uninitialised host memory as uint8 ``[num_bytes]``."""
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
        """Size of the free buffers."""
        return sum(num_bytes * len(spare) for num_bytes, spare in list(self._spare.items()))

    def clear(self) -> None:
        """Frees the spare buffers."""
        for spare in list(self._spare.values()):
            spare.clear()
