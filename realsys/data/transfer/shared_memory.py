"""Shared memory of two processes on one host, for tensors passed from one to the other.

The writer (``SegmentPool``) puts rows into a slot of a segment and sends their location; the reader
(``SegmentMaps``) maps the segment once and uses the rows in place. The slot belongs to the reader until
its last tensor is freed, which clears its flag in the segment's first page, without a message; then the
writer reuses the slot. A killed reader leaves its flags set: when space runs out, the writer looks for
dead readers.

A segment is an anonymous file (memfd_create(2)): it has no name, so nothing stays behind however the
processes end. The reader opens it through the writer's /proc, which the kernel allows only to processes
of the same user; it is sealed against shrinking, so that no writer can make a reader's access fail.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
import weakref
from bisect import insort
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch

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
from realsys.transport.codec import ProtocolError, mismatch_error

logger = logging.getLogger(__name__)

MIN_SHARED_BYTES = 16 << 10  # below it, one encrypted frame is as fast
SEGMENT_BYTES = 256 << 20  # pages are allocated when first written
KEEP_BYTES = 1 << 30  # written memory that is kept for reuse
PAGE = 4096  # the first one of a file holds the flags of its readers
FREE, IN_USE = 0, 1
_SEALS = F_SEAL_SHRINK | F_SEAL_GROW


def host_name() -> str:
    """Returns an identifier shared by processes that can share memory; empty if sharing is impossible."""
    here = this_process()
    if not here.boot_id:
        return ""
    return f"{here.boot_id} {here.pid_namespace} {os.geteuid()}"


def new_shared_file(name: str, size: int) -> tuple[int, mmap.mmap]:
    """Makes an anonymous file, sealed against shrinking; returns its descriptor and mapping."""
    fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, F_ADD_SEALS, _SEALS)
        return fd, mmap.mmap(fd, size)
    except BaseException:
        os.close(fd)
        raise


def is_sealed(fd: int) -> bool:
    """Returns whether the file can't be shrunk."""
    with suppress(OSError):  # a file on disk has no seals
        return fcntl.fcntl(fd, F_GET_SEALS) & _SEALS == _SEALS
    return False


def address_of_map(memory: mmap.mmap) -> int:
    """Returns where a file is mapped."""
    return int(np.frombuffer(memory, np.uint8, 1).ctypes.data)


def is_dead_reader(pid: int, start_ticks: int) -> bool:
    """Returns whether a process of this host has certainly ended."""
    here = this_process()
    return is_known_dead(msgspec.structs.replace(here, pid=pid, start_ticks=start_ticks))


class SegmentPool:
    """Segments of one server; used by its thread only."""

    def __init__(self, *, segment_bytes: int = SEGMENT_BYTES, keep_bytes: int = KEEP_BYTES) -> None:
        self._segment_bytes, self._keep_bytes = segment_bytes, keep_bytes
        self._segments: dict[int, _Segment] = {}
        self._next_number = 1

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the existing segments."""
        return tuple(self._segments)

    def allocate(
        self, num_bytes: int, reader: tuple[int, int] = (0, 0)
    ) -> tuple[SharedSlot, torch.Tensor]:
        """Allocates a slot; returns it and its bytes (uint8 ``[num_bytes]``), to be written before
        sending it.

        Args:
            reader: PID and start (clock ticks after boot) of the reader; 0 if unknown.
        Raises:
            OSError: the system has no memory to share.
        """
        for with_dead in (False, True):
            for segment in self._segments.values():
                segment.collect(with_dead=with_dead)
            for segment in self._segments.values():
                if (slot := segment.allocate(num_bytes, reader)) is not None:
                    return slot, segment.bytes_of(slot)
        self._trim()
        size = PAGE + max(self._segment_bytes, _whole_pages(num_bytes))
        segment = _Segment(self._next_number, size)
        self._segments[segment.number] = segment
        self._next_number += 1
        slot = segment.allocate(num_bytes, reader)
        assert slot is not None
        return slot, segment.bytes_of(slot)

    def free(self, segment: int, index: int) -> None:
        """Frees a slot that is not in use. Unknown slots are ignored."""
        if segment in self._segments:
            self._segments[segment].release(index)

    def pin(self, number: int) -> None:
        """Pins a segment once, so that CUDA copies to and from it directly; no effect if pinning fails."""
        self._segments[number].pin()

    def close(self) -> None:
        """Frees all memory; readers keep what they have mapped."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _trim(self) -> None:
        """Closes unused segments, oldest first, until at most ``keep_bytes`` are kept."""
        kept = sum(segment.written for segment in self._segments.values())
        for number, segment in list(self._segments.items()):
            if kept > self._keep_bytes and segment.is_unused:
                kept -= segment.written
                segment.close()
                del self._segments[number]


class _Segment:
    """A page of flags, one byte per slot, followed by the slots."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.written = 0  # extent ever allocated, which is the memory that it costs
        self._fd, self._map = new_shared_file(f"realsys-{number}", size)
        self._inode = os.fstat(self._fd).st_ino
        self._ranges = FreeRanges(size - PAGE)
        self._allocated: dict[int, tuple[int, int]] = {}  # index → start, bytes
        self._readers: dict[int, tuple[int, int]] = {}  # index → PID, start
        self._pinned: bool | None = None

    @property
    def is_unused(self) -> bool:
        return not self._allocated

    def collect(self, *, with_dead: bool = False) -> None:
        """Frees slots whose flag was cleared or, if asked, whose reader is dead."""
        if with_dead:
            dead = {reader for reader in set(self._readers.values()) if is_dead_reader(*reader)}
            for index in [i for i in self._allocated if self._readers[i] in dead]:
                self.release(index)
        flags = self._map[:PAGE]
        for index in [i for i in self._allocated if flags[i] == FREE]:
            self._ranges.free(*self._allocated.pop(index))
            del self._readers[index]

    def allocate(self, num_bytes: int, reader: tuple[int, int]) -> SharedSlot | None:
        length = _whole_pages(num_bytes)
        if len(self._allocated) == PAGE or (start := self._ranges.allocate(length)) is None:
            return None
        index = next(i for i in range(PAGE) if i not in self._allocated)
        self._allocated[index], self._readers[index] = (start, length), reader
        self._map[index] = IN_USE
        self.written = max(self.written, start + length)
        return SharedSlot(
            segment=self.number,
            pid=os.getpid(),
            fd=self._fd,
            inode=self._inode,
            size=self.size,
            index=index,
            offset=PAGE + start,
            num_bytes=num_bytes,
        )

    def bytes_of(self, slot: SharedSlot) -> torch.Tensor:
        return torch.from_numpy(_array(self._map, slot))

    def release(self, index: int) -> None:
        if index in self._allocated:
            self._map[index] = FREE

    def pin(self) -> None:
        if self._pinned is None:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._pinned = (
                int(runtime.cudaHostRegister(address_of_map(self._map), self.size, 0)) == 0
            )

    def close(self) -> None:
        if self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(address_of_map(self._map))
        os.close(self._fd)  # the mapping ends with its last tensor


class SegmentMaps:
    """Mappings of other processes' segments, one each; used by the client's thread only."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int, int], mmap.mmap] = {}  # worker, segment, inode

    def rows(self, worker: int, slot: SharedSlot) -> torch.Tensor:
        """Returns the bytes of a slot (uint8 ``[num_bytes]``); the slot is freed when the tensor is.

        Raises:
            OSError: the segment can't be opened from here.
            ProtocolError: the slot is not in the segment, or the file is not a segment.
        """
        _check(slot)
        key = (worker, slot.segment, slot.inode)
        if key not in self._maps:
            self._maps[key] = _open(slot)
        memory = self._maps[key]
        if len(memory) != slot.size or memory[slot.index] != IN_USE:
            raise _refusal(slot, "the slot is not allocated")
        array = _array(memory, slot)
        weakref.finalize(array, memory.__setitem__, slot.index, FREE).atexit = False
        return torch.from_numpy(array)

    def keep_only(self, worker: int, segments: tuple[int, ...]) -> None:
        """Unmaps segments of ``worker`` that are not among ``segments``."""
        for key in [k for k in self._maps if k[0] == worker and k[1] not in segments]:
            del self._maps[key]

    def close(self) -> None:
        """Drops all mappings; rows in use stay mapped."""
        self._maps.clear()


def _open(slot: SharedSlot) -> mmap.mmap:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    fd = os.open(f"/proc/{slot.pid}/fd/{slot.fd}", flags)
    try:
        found = os.fstat(fd)
        same = (found.st_ino, found.st_size) == (slot.inode, slot.size)
        if not (stat.S_ISREG(found.st_mode) and same and is_sealed(fd)):
            raise _refusal(slot, "it is another file")
        return mmap.mmap(fd, slot.size)
    finally:
        os.close(fd)


def _check(slot: SharedSlot) -> None:
    inside = slot.offset >= PAGE and slot.offset + slot.num_bytes <= slot.size
    if not (
        inside and slot.num_bytes > 0 and 0 <= slot.index < PAGE and min(slot.pid, slot.fd) >= 0
    ):
        raise _refusal(slot, "its numbers don't fit together")


def _refusal(slot: SharedSlot, why: str) -> ProtocolError:
    return mismatch_error(
        f"{slot.num_bytes} bytes at {slot.offset} of segment {slot.segment} ({slot.size} bytes): {why}",
        where=f"receiving tensors through /proc/{slot.pid}/fd/{slot.fd}",
    )


def _array(memory: mmap.mmap, slot: SharedSlot) -> np.ndarray:
    return np.frombuffer(memory, dtype=np.uint8, count=slot.num_bytes, offset=slot.offset)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


# ---- First-fit allocator of byte ranges in a memory segment (pure).
#
# The lowest free range is used first, because pages that were used before already exist.


class FreeRanges:
    """Free ranges of ``[0, size)``, in bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)] if size else []  # (start, end), ascending, never adjacent

    def allocate(self, num_bytes: int) -> int | None:
        """Allocates ``num_bytes`` (1 or more) and returns their start; None if no free range is
        large enough.
        """
        for i, (start, end) in enumerate(self._free):
            if end - start >= num_bytes:
                rest = (start + num_bytes, end)
                self._free[i : i + 1] = [rest] if rest[0] < end else []
                return start
        return None

    def free(self, start: int, num_bytes: int) -> None:
        """Frees a range that ``allocate`` allocated."""
        insort(self._free, (start, start + num_bytes))
        self._free = list(_joined(self._free))

    @property
    def all_free(self) -> bool:
        """True if nothing is allocated."""
        return self._free == [(0, self.size)]


def _joined(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    (start, end), *others = ranges
    for next_start, next_end in others:
        if next_start > end:
            yield start, end
            start = next_start
        end = next_end
    yield start, end
