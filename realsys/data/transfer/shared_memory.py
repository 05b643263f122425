"""Memory that two processes of one host both have mapped, for tensors that one gives to the other.

The giver (``SegmentPool``) writes rows into a slot of a segment and tells where they lie; the taker
(``SegmentMaps``) maps the segment once and uses the rows where they are. The slot is the taker's
until the last tensor over it is gone: then its flag in the segment's first page falls, and the giver may
use the place again. No message is needed for that. A taker that was killed leaves its flags up: when room
is short, the giver looks which takers are dead.

A segment is an anonymous file (memfd_create(2)): it has no name, so nothing stays behind however the
processes end. The taker opens it through /proc of the giver, which the kernel grants to processes of
the same user only; it can't shrink (sealed), so that no giver can make a taker's reads fail.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
import weakref
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch

from realsys.data.transfer.free_ranges import FreeRanges
from realsys.data.transfer.transfer_messages import SharedSlot
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
from realsys.transport.codec import ProtocolError

logger = logging.getLogger(__name__)

MIN_SHARED_BYTES = 16 << 10  # below that one encrypted frame is as quick
SEGMENT_BYTES = 256 << 20  # pages come into being when they are first written
KEEP_BYTES = 1 << 30  # memory that is kept, written once, for the next rows
_PAGE = 4096
_FREE, _IN_USE = 0, 1
_SEALS = F_SEAL_SHRINK | F_SEAL_GROW


def host_name() -> str:
    """The same for two processes that may be able to share memory; empty where nothing is shared."""
    here = this_process()
    if not here.boot_id:
        return ""
    return f"{here.boot_id} {here.pid_namespace} {os.geteuid()}"


class SegmentPool:
    """The segments of one server; used by its thread only."""

    def __init__(self, *, segment_bytes: int = SEGMENT_BYTES, keep_bytes: int = KEEP_BYTES) -> None:
        self._segment_bytes, self._keep_bytes = segment_bytes, keep_bytes
        self._segments: dict[int, _Segment] = {}
        self._next_number = 1

    @property
    def numbers(self) -> tuple[int, ...]:
        """The segments that there are."""
        return tuple(self._segments)

    def take(
        self, num_bytes: int, taker: tuple[int, int] = (0, 0)
    ) -> tuple[SharedSlot, torch.Tensor]:
        """A slot, and its bytes (uint8 ``[num_bytes]``) to be written before the slot is told.

        Args:
            taker: PID and start (clock ticks after boot) of who gets it; 0: it is not known.
        Raises:
            OSError: the system gives no memory.
        """
        for with_dead in (False, True):
            for segment in self._segments.values():
                segment.collect(with_dead=with_dead)
            for segment in self._segments.values():
                if (slot := segment.take(num_bytes, taker)) is not None:
                    return slot, segment.bytes_of(slot)
        self._let_go()
        size = _PAGE + max(self._segment_bytes, _whole_pages(num_bytes))
        segment = _Segment(self._next_number, size)
        self._segments[segment.number] = segment
        self._next_number += 1
        slot = segment.take(num_bytes, taker)
        assert slot is not None
        return slot, segment.bytes_of(slot)

    def give_back(self, segment: int, index: int) -> None:
        """Frees a slot that nobody uses. Unknown ones are ignored."""
        if segment in self._segments:
            self._segments[segment].release(index)

    def pin(self, number: int) -> None:
        """Has CUDA copy to and from a segment directly, once; without effect where it can't."""
        self._segments[number].pin()

    def close(self) -> None:
        """Lets go of all memory; takers keep what they have mapped."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _let_go(self) -> None:
        """Of unused segments beyond what is to be kept, the oldest first."""
        kept = sum(segment.written for segment in self._segments.values())
        for number, segment in list(self._segments.items()):
            if kept > self._keep_bytes and segment.is_unused:
                kept -= segment.written
                segment.close()
                del self._segments[number]


class _Segment:
    """A page of flags, one byte a slot, and behind it the slots."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.written = 0  # bytes that have ever been taken: what it costs
        self._fd = memfd_create(f"realsys-{number}", MFD_CLOEXEC | MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, F_ADD_SEALS, _SEALS)
            self._inode = os.fstat(self._fd).st_ino
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        self._ranges = FreeRanges(size - _PAGE)
        self._taken: dict[int, tuple[int, int]] = {}  # index → start, bytes
        self._takers: dict[int, tuple[int, int]] = {}  # index → PID, start
        self._pinned: bool | None = None

    @property
    def is_unused(self) -> bool:
        return not self._taken

    def collect(self, *, with_dead: bool = False) -> None:
        """Finds the slots whose flag has fallen, or whose taker is dead."""
        if with_dead:
            dead = {taker for taker in set(self._takers.values()) if _is_dead(*taker)}
            for index in [i for i in self._taken if self._takers[i] in dead]:
                self.release(index)
        flags = self._map[:_PAGE]
        for index in [i for i in self._taken if flags[i] == _FREE]:
            self._ranges.give_back(*self._taken.pop(index))
            del self._takers[index]

    def take(self, num_bytes: int, taker: tuple[int, int]) -> SharedSlot | None:
        length = _whole_pages(num_bytes)
        if len(self._taken) == _PAGE or (start := self._ranges.take(length)) is None:
            return None
        index = next(i for i in range(_PAGE) if i not in self._taken)
        self._taken[index], self._takers[index] = (start, length), taker
        self._map[index] = _IN_USE
        self.written = max(self.written, start + length)
        return SharedSlot(
            segment=self.number,
            pid=os.getpid(),
            fd=self._fd,
            inode=self._inode,
            size=self.size,
            index=index,
            offset=_PAGE + start,
            num_bytes=num_bytes,
        )

    def bytes_of(self, slot: SharedSlot) -> torch.Tensor:
        return torch.from_numpy(_array(self._map, slot))

    def release(self, index: int) -> None:
        if index in self._taken:
            self._map[index] = _FREE

    def pin(self) -> None:
        if self._pinned is None:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._pinned = int(runtime.cudaHostRegister(self._address, self.size, 0)) == 0

    @property
    def _address(self) -> int:
        return int(np.frombuffer(self._map, dtype=np.uint8, count=1).ctypes.data)

    def close(self) -> None:
        if self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self._address)
        os.close(self._fd)  # the map ends with the last tensor over it


class SegmentMaps:
    """Segments of other processes, mapped once each; used by the client's thread only."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int, int], mmap.mmap] = {}  # worker, segment, inode

    def rows(self, worker: int, slot: SharedSlot) -> torch.Tensor:
        """The bytes of a slot (uint8 ``[num_bytes]``), which is free again when they are gone.

        Raises:
            OSError: the segment can't be opened from here.
            ProtocolError: the slot is none of the segment's, or the file is no segment.
        """
        _check(slot)
        key = (worker, slot.segment, slot.inode)
        if key not in self._maps:
            self._maps[key] = _open(slot)
        memory = self._maps[key]
        if len(memory) != slot.size or memory[slot.index] != _IN_USE:
            raise _refusal(slot, "it is not given to anybody")
        array = _array(memory, slot)
        weakref.finalize(array, memory.__setitem__, slot.index, _FREE).atexit = False
        return torch.from_numpy(array)

    def keep_only(self, worker: int, segments: tuple[int, ...]) -> None:
        """Forgets segments of ``worker`` that are not among these."""
        for key in [k for k in self._maps if k[0] == worker and k[1] not in segments]:
            del self._maps[key]

    def close(self) -> None:
        """Forgets all; rows in use stay."""
        self._maps.clear()


def _is_dead(pid: int, start_ticks: int) -> bool:
    """Whether a taker has ended for certain. It named our host: its PID is one of this namespace."""
    here = this_process()
    return is_known_dead(msgspec.structs.replace(here, pid=pid, start_ticks=start_ticks))


def _open(slot: SharedSlot) -> mmap.mmap:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    fd = os.open(f"/proc/{slot.pid}/fd/{slot.fd}", flags)
    try:
        found = os.fstat(fd)
        same = (found.st_ino, found.st_size) == (slot.inode, slot.size)
        if not (stat.S_ISREG(found.st_mode) and same and _is_sealed(fd)):
            raise _refusal(slot, "the file there is another one")
        return mmap.mmap(fd, slot.size)
    finally:
        os.close(fd)


def _is_sealed(fd: int) -> bool:
    with suppress(OSError):  # a file on a disk has no seals
        return fcntl.fcntl(fd, F_GET_SEALS) & _SEALS == _SEALS
    return False


def _check(slot: SharedSlot) -> None:
    inside = slot.offset >= _PAGE and slot.offset + slot.num_bytes <= slot.size
    if not (
        inside and slot.num_bytes > 0 and 0 <= slot.index < _PAGE and min(slot.pid, slot.fd) >= 0
    ):
        raise _refusal(slot, "its numbers don't fit together")


def _refusal(slot: SharedSlot, why: str) -> ProtocolError:
    return ProtocolError(
        f"{slot.num_bytes} bytes at {slot.offset} of segment {slot.segment} ({slot.size} bytes): {why}",
        where=f"receiving tensors through /proc/{slot.pid}/fd/{slot.fd}",
        fix="both workers must run the same version of realsys; else report this as a bug",
    )


def _array(memory: mmap.mmap, slot: SharedSlot) -> np.ndarray:
    return np.frombuffer(memory, dtype=np.uint8, count=slot.num_bytes, offset=slot.offset)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
