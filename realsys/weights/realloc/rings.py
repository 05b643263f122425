"""Ring buffer in memory shared by two processes of one host; one fills slots, the other empties them.

The memory has no name in any file system: it is a memfd, which the reader opens through the writer's
``/proc`` entry. It disappears with the two processes, however they end, and is not limited by the size of
``/dev/shm`` (64 MiB in many containers). Filled and emptied slots are counted in the memory itself.
Counters
must become visible after the data that they count, which x86's memory order guarantees; no ring is made on
other architectures.
"""

from __future__ import annotations

import os
import platform
import secrets
import stat
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from realsys.runtime.linux import memfd_create

NUM_SLOTS = 4
SLOT_BYTES = 4 << 20  # copying dominates Python's overhead, and four slots fit in a cache
_HEADER_BYTES = 4096
_NONCE_BYTES = 32
_SIZE = _HEADER_BYTES + NUM_SLOTS * SLOT_BYTES
_FILLED, _EMPTIED, _MESSAGES = 8, 16, 24  # in 8-byte words, each counter in a cache line of its own
SPIN_S, SHORTEST_S, LONGEST_S = 1e-4, 20e-6, 1e-3


class RingRefused(Exception):
    """These two processes can't share memory; carries the reason."""


class Ring:
    """One direction of a pair. The writer makes it with ``create``, the reader opens it with ``open``."""

    def __init__(self, path: str, fd: int) -> None:
        memory = torch.from_file(path, shared=True, size=_SIZE, dtype=torch.uint8)
        self._fd = fd
        self._nonce = memoryview(memory[:_NONCE_BYTES].numpy())  # type: ignore[arg-type]
        self._words = memoryview(memory[:_HEADER_BYTES].numpy()).cast("Q")  # type: ignore[arg-type]
        self._slots = memory[_HEADER_BYTES:].view(NUM_SLOTS, SLOT_BYTES)
        self._reserved = self._read = 0

    @classmethod
    def create(cls) -> tuple[Ring, dict[str, Any]]:
        """Makes a ring, and the plain values that the reader needs to open it.

        Raises:
            RingRefused: the platform does not support it.
        """
        if platform.machine() not in ("x86_64", "AMD64"):
            raise RingRefused(f"processors of type {platform.machine()} reorder writes")
        try:
            fd = memfd_create("realsys-weights")
        except OSError as error:
            raise RingRefused(f"no memory to share: {error}") from error
        os.ftruncate(fd, _SIZE)
        ring = cls(f"/proc/self/fd/{fd}", fd)
        nonce = secrets.token_hex(_NONCE_BYTES // 2)
        ring._nonce[:] = nonce.encode()
        return ring, {**_process_world(), "pid": os.getpid(), "fd": fd, "nonce": nonce}

    @classmethod
    def open(cls, offer: dict[str, Any]) -> Ring:
        """Opens a ring that another process of this host made.

        Raises:
            RingRefused: it is on another host, or can't be opened.
        """
        world = _process_world()
        if other := {k: offer.get(k) for k in world if offer.get(k) != world[k]}:
            raise RingRefused(f"another host or container ({', '.join(other)} differ)")
        path = f"/proc/{int(offer['pid'])}/fd/{int(offer['fd'])}"
        try:
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode) or found.st_size != _SIZE:
                raise RingRefused(f"{path} is no ring")
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RingRefused(f"{path}: {error.strerror}") from error
        ring = cls(f"/proc/self/fd/{fd}", fd)
        ring.opened()
        if bytes(ring._nonce) != str(offer["nonce"]).encode():
            raise RingRefused(f"{path} belongs to another process")
        return ring

    def opened(self) -> None:
        """Closes the file after the reader has opened it or failed to; it can't be opened afterwards."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def reserve(self, num_bytes: int, timeout_s: float) -> Tensor | None:
        """Returns the next slot to fill as uint8 ``[num_bytes]``; None if no slot becomes free in time."""
        if not _wait(lambda: self._reserved - self._words[_EMPTIED] < NUM_SLOTS, timeout_s):
            return None
        return self._slots[self._reserved % NUM_SLOTS][:num_bytes]

    def publish(self, num_bytes: int, tag: int) -> None:
        """Marks the reserved slot as filled."""
        at = _MESSAGES + 2 * (self._reserved % NUM_SLOTS)
        self._words[at], self._words[at + 1] = num_bytes, tag
        self._reserved += 1
        self._words[_FILLED] = self._reserved

    def has_message(self) -> bool:
        """True if ``message`` would return at once."""
        return self._words[_FILLED] > self._read

    def message(self) -> tuple[Tensor, int]:
        """Returns the oldest message and its tag. The memory is valid until ``release``."""
        slot = self._read % NUM_SLOTS
        num_bytes, tag = self._words[_MESSAGES + 2 * slot], self._words[_MESSAGES + 2 * slot + 1]
        return self._slots[slot][:num_bytes], tag

    def release(self) -> None:
        """Frees the slot of the oldest message."""
        self._read += 1
        self._words[_EMPTIED] = self._read


def wait_any(conditions: dict[int, Callable[[], bool]], timeout_s: float) -> int | None:
    """Waits for any condition; returns its key, or None if none holds in time."""
    found: list[int] = []

    def look() -> bool:
        found.extend(key for key, holds in conditions.items() if holds())
        return bool(found)

    return found[0] if _wait(look, timeout_s) else None


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Polls, first without pause, then less and less often: the other side may need this core."""
    began_s = time.monotonic()
    pause_s = 0.0
    while not condition():
        waited_s = time.monotonic() - began_s
        if waited_s > timeout_s:
            return False
        if waited_s > SPIN_S:
            pause_s = min(max(SHORTEST_S, 1.5 * pause_s), LONGEST_S)
        time.sleep(pause_s)
    return True


def _process_world() -> dict[str, str]:
    """Scope in which a process id is unique: the running kernel and its PID namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return {"boot": file.read().strip(), "pid_namespace": os.readlink("/proc/self/ns/pid")}
    except OSError as error:
        raise RingRefused(f"this host can't be told from others: {error}") from error
