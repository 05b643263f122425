"""Shared memory for whole weights, filled by one process and read in place by others on its host.

Unlike shared_memory.py, where a slot has one reader, any number of processes use the same bytes. An
arena is an anonymous file whose descriptor is passed to each reader (``SCM_RIGHTS``): it has no name and
disappears with the last process that has it open. A reader has a flag in the first page, which is cleared
when its last tensor is freed; the writer reuses the arena once all flags are clear and its own tensors
are freed.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from realsys.data.transfer.shared_memory import (
    FREE,
    IN_USE,
    PAGE,
    address_of_map,
    is_dead_reader,
    is_sealed,
    new_shared_file,
)

_ALIGNED = 64


def arena_bytes(sizes: Sequence[int]) -> int:
    """Returns the arena size needed for tensors of these sizes (bytes)."""
    return sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)


class Arena:
    """A shared-memory file, filled from its beginning. Owns ``fd``."""

    def __init__(self, num_bytes: int) -> None:
        self.size = PAGE + num_bytes
        self.fd, self._map = new_shared_file("realsys-weights", self.size)
        self._address = address_of_map(self._map)
        self._readers: dict[int, tuple[int, int]] = {}  # flag → PID, start
        self._reset()

    def _reset(self) -> None:
        self._end, self._num_allocated = PAGE, 0
        self._freed: deque[None] = deque()  # no lock: a finalizer may run in any thread

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocates the next bytes as an uninitialised uint8 tensor ``[num_bytes]``."""
        start, end = self._end, self._end + num_bytes
        assert end <= self.size, "more than the arena's size"
        self._end = start + -(-num_bytes // _ALIGNED) * _ALIGNED
        array = np.frombuffer(self._map, np.uint8, num_bytes, start)
        self._num_allocated += 1
        weakref.finalize(array, self._freed.append, None).atexit = False
        return torch.from_numpy(array)

    def offset_of(self, x: torch.Tensor) -> int | None:
        """Returns the offset of a tensor's bytes in this arena; None if they are elsewhere."""
        start = x.data_ptr() - self._address
        inside = start >= PAGE and start + x.numel() * x.element_size() <= self.size
        return start if inside else None

    def add_reader(self, reader: tuple[int, int]) -> int:
        """Adds a reader, given as PID and start (clock ticks after boot); returns its flag."""
        flag = next(i for i in range(PAGE) if i not in self._readers)
        self._readers[flag] = reader
        self._map[flag] = IN_USE
        return flag

    def remove_reader(self, flag: int) -> None:
        """Removes a reader that never received the arena."""
        self._map[flag] = FREE

    @property
    def is_free(self) -> bool:
        """True if no process has a tensor in it."""
        for flag, reader in list(self._readers.items()):
            if self._map[flag] == FREE or is_dead_reader(*reader):
                self._map[flag] = FREE
                del self._readers[flag]
        return not self._readers and len(self._freed) == self._num_allocated

    def close(self) -> None:
        """Closes the descriptor; readers and tensors keep their mappings."""
        os.close(self.fd)


class ArenaPool:
    """Arenas of one process, kept for reuse because fresh pages cost more than a copy. Thread-safe."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []
        self._lock = threading.Lock()

    def arena(self, num_bytes: int) -> Arena:
        """Returns an arena with room for ``num_bytes``; frees unused arenas of other sizes.

        Raises:
            OSError: the system has no memory to share.
        """
        with self._lock:
            fits = None
            for arena in [a for a in self._arenas if a.is_free]:
                if arena.size == PAGE + num_bytes and fits is None:
                    fits = arena
                else:
                    self._arenas.remove(arena)
                    arena.close()
            if fits is None:
                fits = Arena(num_bytes)
                self._arenas.append(fits)
            fits._reset()
            return fits

    def add_reader(
        self, tensors: Sequence[torch.Tensor], reader: tuple[int, int]
    ) -> tuple[list[tuple[Arena, int]], list[tuple[int, int]]] | None:
        """Adds a reader to the arenas that hold ``tensors``, which the caller keeps alive meanwhile.

        Returns:
            The arenas with the reader's flags, and the arena's index and offset of each tensor. None if a
            tensor is in no arena of this pool.
        """
        with self._lock:
            places: list[tuple[Arena, int]] = []
            for x in tensors:
                for arena in self._arenas:
                    if (offset := arena.offset_of(x)) is not None:
                        places.append((arena, offset))
                        break
                else:
                    return None
            used = list({id(arena): arena for arena, _ in places}.values())
            lent = [(arena, arena.add_reader(reader)) for arena in used]
            return lent, [(used.index(arena), offset) for arena, offset in places]

    def close(self) -> None:
        """Closes all arenas."""
        with self._lock:
            for arena in self._arenas:
                arena.close()
            self._arenas.clear()


class MappedArena:
    """Another process's arena, mapped for reading: take its ``tensor``s, then call ``release`` once."""

    def __init__(self, fd: int, *, size: int, flag: int) -> None:
        found = os.fstat(fd)
        if found.st_size != size or not is_sealed(fd) or not 0 <= flag < PAGE:
            raise OSError(f"a file of {found.st_size} bytes is not an arena of {size}")
        self._map, self._flag = mmap.mmap(fd, size), flag
        self._num_mapped, self._freed = 0, deque[None]()
        self._released = False

    def tensor(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Maps bytes of it as an uint8 tensor. Raises ValueError if they are outside."""
        if offset < PAGE or num_bytes < 1:
            raise ValueError(f"{num_bytes} bytes at {offset}")
        array = np.frombuffer(self._map, np.uint8, num_bytes, offset)
        self._num_mapped += 1
        weakref.finalize(array, self._on_tensor_freed).atexit = False
        return torch.from_numpy(array)

    def release(self) -> None:
        """Ends the taking of tensors: the flag is cleared when the last of them is freed."""
        self._released = True
        if len(self._freed) == self._num_mapped:
            self._map[self._flag] = FREE

    def _on_tensor_freed(self) -> None:
        self._freed.append(None)
        if self._released and len(self._freed) == self._num_mapped:
            self._map[self._flag] = FREE
