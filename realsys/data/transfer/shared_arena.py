"""Memory for whole weights that a process fills and others of its host then read where it is.

Beside shared_memory.py, where a slot has one taker: here any number of processes use the same bytes. An
arena is an anonymous file whose descriptor is handed to each reader (``SCM_RIGHTS``): it has no name, and
is gone with the last process that has it. A reader has a flag in its first page, which falls when its last
tensor is gone; the filler uses the arena again once all flags are down and its own tensors are gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np
import torch

from realsys.runtime.linux import (
    F_ADD_SEALS,
    F_GET_SEALS,
    F_SEAL_GROW,
    F_SEAL_SHRINK,
    MFD_ALLOW_SEALING,
    MFD_CLOEXEC,
    memfd_create,
)
from realsys.runtime.process_identity import is_known_dead, this_process

_PAGE = 4096
_ALIGNED = 64
_FREE, _IN_USE = 0, 1
_SEALS = F_SEAL_SHRINK | F_SEAL_GROW


def arena_bytes(sizes: Sequence[int]) -> int:
    """What ``take`` needs for tensors of these sizes (bytes)."""
    return sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)


class Arena:
    """One piece of shared memory, filled from its beginning. ``fd`` is its own."""

    def __init__(self, num_bytes: int) -> None:
        self.size = _PAGE + num_bytes
        self.fd = memfd_create("realsys-weights", MFD_CLOEXEC | MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.fd, 0o600)
            os.ftruncate(self.fd, self.size)
            fcntl.fcntl(self.fd, F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.fd, self.size)
        except BaseException:
            os.close(self.fd)
            raise
        self._address = int(np.frombuffer(self._map, np.uint8, 1).ctypes.data)
        self._takers: dict[int, tuple[int, int]] = {}  # flag → PID, start
        self._begin()

    def _begin(self) -> None:
        self._end, self._num_given = _PAGE, 0
        self._gone: deque[None] = deque()  # a finalizer may run anywhere: no lock

    def take(self, num_bytes: int) -> torch.Tensor:
        """The next bytes, uint8 ``[num_bytes]``; what is in them is anything."""
        start, end = self._end, self._end + num_bytes
        assert end <= self.size, "more than was asked for"
        self._end = start + -(-num_bytes // _ALIGNED) * _ALIGNED
        array = np.frombuffer(self._map, np.uint8, num_bytes, start)
        self._num_given += 1
        weakref.finalize(array, self._gone.append, None).atexit = False
        return torch.from_numpy(array)

    def offset_of(self, x: torch.Tensor) -> int | None:
        """Where the bytes of a tensor lie in this arena; None if they do not."""
        start = x.data_ptr() - self._address
        inside = start >= _PAGE and start + x.numel() * x.element_size() <= self.size
        return start if inside else None

    def lend(self, taker: tuple[int, int]) -> int:
        """A flag for who reads it from now on: PID and start (clock ticks after boot)."""
        flag = next(i for i in range(_PAGE) if i not in self._takers)
        self._takers[flag] = taker
        self._map[flag] = _IN_USE
        return flag

    def take_back(self, flag: int) -> None:
        """The reader never came to have it."""
        self._map[flag] = _FREE

    @property
    def is_free(self) -> bool:
        """Whether nobody has a tensor over it."""
        for flag, taker in list(self._takers.items()):
            if self._map[flag] == _FREE or _is_dead(*taker):
                self._map[flag] = _FREE
                del self._takers[flag]
        return not self._takers and len(self._gone) == self._num_given

    def close(self) -> None:
        """Readers and tensors keep what they have."""
        os.close(self.fd)


class ArenaPool:
    """The arenas of one process: kept once written, as fresh pages cost more than a copy. Any thread."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []
        self._lock = threading.Lock()

    def arena(self, num_bytes: int) -> Arena:
        """An arena with room for ``num_bytes``. Free ones of other sizes are let go.

        Raises:
            OSError: the system gives no memory to share.
        """
        with self._lock:
            fits = None
            for arena in [a for a in self._arenas if a.is_free]:
                if arena.size == _PAGE + num_bytes and fits is None:
                    fits = arena
                else:
                    self._arenas.remove(arena)
                    arena.close()
            if fits is None:
                fits = Arena(num_bytes)
                self._arenas.append(fits)
            fits._begin()
            return fits

    def lend(
        self, tensors: Sequence[torch.Tensor], taker: tuple[int, int]
    ) -> tuple[list[tuple[Arena, int]], list[tuple[int, int]]] | None:
        """Lends the arenas that ``tensors`` lie in, which the caller has meanwhile.

        Returns:
            Each with the taker's flag; for each tensor which of them, and where in it. None if one lies in
            none of ours.
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
            lent = [(arena, arena.lend(taker)) for arena in used]
            return lent, [(used.index(arena), offset) for arena, offset in places]

    def close(self) -> None:
        """Lets go of all."""
        with self._lock:
            for arena in self._arenas:
                arena.close()
            self._arenas.clear()


class LentArena:
    """Somebody else's arena, to be read: ``tensors`` of it, then ``settle`` once."""

    def __init__(self, fd: int, *, size: int, flag: int) -> None:
        found = os.fstat(fd)
        if found.st_size != size or not _is_sealed(fd) or not 0 <= flag < _PAGE:
            raise OSError(f"a file of {found.st_size} bytes is no arena of {size}")
        self._map, self._flag = mmap.mmap(fd, size), flag
        self._num_taken, self._gone = 0, deque[None]()
        self._settled = False

    def tensor(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes of it, uint8. Raises ValueError when they are outside."""
        if offset < _PAGE or num_bytes < 1:
            raise ValueError(f"{num_bytes} bytes at {offset}")
        array = np.frombuffer(self._map, np.uint8, num_bytes, offset)
        self._num_taken += 1
        weakref.finalize(array, self._left).atexit = False
        return torch.from_numpy(array)

    def settle(self) -> None:
        """All tensors were taken: the flag falls with the last of them."""
        self._settled = True
        if len(self._gone) == self._num_taken:
            self._map[self._flag] = _FREE

    def _left(self) -> None:
        self._gone.append(None)
        if self._settled and len(self._gone) == self._num_taken:
            self._map[self._flag] = _FREE


def _is_sealed(fd: int) -> bool:
    with suppress(OSError):
        return fcntl.fcntl(fd, F_GET_SEALS) & _SEALS == _SEALS
    return False


def _is_dead(pid: int, start_ticks: int) -> bool:
    here = this_process()
    return is_known_dead(msgspec.structs.replace(here, pid=pid, start_ticks=start_ticks))
