"""Hears from the kernel that files came to a folder, left it or were written: inotify(7), by ctypes.

For file_store.py and, of what its own sruns write, the supervisor. It hears of every process on this host,
at no cost to the server of a shared file system; of changes made on other hosts it hears nothing, so
``hears_all`` says whether there can be any. Where it can't be had (a user's instances are used up, no such
call), whoever waits sleeps.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import struct
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

# File systems of one kernel: nobody changes them but through it.
OF_THIS_HOST = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay"})
_CREATED, _MOVED_TO, _DELETED, _SELF_DELETED = 0x100, 0x80, 0x200, 0x400  # linux/inotify.h
_NAMES, _WRITTEN = _CREATED | _MOVED_TO | _DELETED | _SELF_DELETED, 0x2
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # the values of IN_NONBLOCK and IN_CLOEXEC
_BUFFER = 64 * 1024
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, bytes of the name that follows


@dataclass(frozen=True)
class Changes:
    """What happened: the greatest name that came, "" for none, and whether anything else did: names
    left, or more happened than the kernel keeps."""

    newest: str = ""
    others: bool = False


class FolderChanges:
    """Changes of the names in the folder that ``folder_fd`` has open. ``wait`` is for any thread.

    Args:
        folder_fd: -1 hears nothing.
        file_system: its type, as commit_log.py's ``file_system_of`` names it.
    """

    def __init__(self, folder_fd: int, file_system: str) -> None:
        self._fd = _watch(f"/proc/self/fd/{folder_fd}", _NAMES) if folder_fd >= 0 else -1
        self.hears = self._fd >= 0
        self.hears_all = self.hears and file_system in OF_THIS_HOST

    def take(self) -> Changes:
        """What changed since the last call."""
        newest, others = "", False
        for mask, name in _events(self._fd):
            if mask & (_CREATED | _MOVED_TO):
                newest = max(newest, name)
            else:
                others = True
        return Changes(newest, others)

    def wait(self, longest_s: float) -> None:
        """Until there is something to take."""
        if self._fd < 0:
            return time.sleep(longest_s)
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.poll(longest_s * 1000)
        return None

    def close(self) -> None:
        """Ends it; whoever waits goes on at the end of his time."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Writes:
    """Which files of ``folder`` processes of this host have written to. For one thread."""

    def __init__(self, folder: Path) -> None:
        self._fd = _watch(str(folder), _WRITTEN)
        self.hears = self._fd >= 0
        if self.hears:
            weakref.finalize(self, os.close, self._fd)
        self._written: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether that one was written to since the last call that asked for it. Not if the kernel had more
        to tell than it keeps: look from time to time all the same."""
        self._written.update(written for _, written in _events(self._fd))
        is_written = name in self._written
        self._written.discard(name)
        return is_written


def _events(fd: int) -> Iterator[tuple[int, str]]:
    """What the kernel has to tell now: what happened, and to which name."""
    while fd >= 0:
        try:
            data, at = os.read(fd, _BUFFER), 0
        except BlockingIOError:
            break
        while at < len(data):
            _, mask, _, length = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            yield mask, os.fsdecode(name)


def _watch(path: str, mask: int) -> int:
    """The descriptor of a new watch; -1 when the kernel gives none."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        fd: int = libc.inotify_init1(_FLAGS)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if libc.inotify_add_watch(fd, path.encode(), mask) < 0:
            number = ctypes.get_errno()
            os.close(fd)
            raise OSError(number, os.strerror(number))
    except (OSError, AttributeError) as error:
        logger.info("no inotify, looking from time to time instead error=%s", error)
        return -1
    return fd
