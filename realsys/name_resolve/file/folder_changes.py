"""Notifies of files created, removed or written in a folder: inotify(7) through ctypes.

For file_store.py and, for the files of its own sruns, the supervisor. inotify reports every process
on this host, at no cost to a shared file system's server, but no changes made on other hosts;
``reports_all`` is False if there can be any. Where inotify is unavailable (the user's instances are
used up, no such call), callers sleep instead.
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

# File systems that only this host's kernel can change.
OF_THIS_HOST = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay"})
_CREATED, _MOVED_TO, _DELETED, _SELF_DELETED = 0x100, 0x80, 0x200, 0x400  # linux/inotify.h
_NAMES, _WRITTEN = _CREATED | _MOVED_TO | _DELETED | _SELF_DELETED, 0x2
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # the values of IN_NONBLOCK and IN_CLOEXEC
_BUFFER = 64 * 1024
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, bytes of the name that follows


@dataclass(frozen=True)
class Changes:
    """Changes since the last call: the greatest name created ("" for none), and ``others`` if names
    were removed or events were dropped by the kernel."""

    newest: str
    others: bool


class FolderChanges:
    """Names created in and removed from the open folder ``folder_fd``. ``wait`` is for any thread.

    Args:
        folder_fd: -1 reports nothing.
        file_system: its type, as named by ``file_system_of`` in commit_log.py.
    """

    def __init__(self, folder_fd: int, file_system: str) -> None:
        self._fd = _watch(f"/proc/self/fd/{folder_fd}", _NAMES) if folder_fd >= 0 else -1
        self.is_active = self._fd >= 0
        self.reports_all = self.is_active and file_system in OF_THIS_HOST

    def take(self) -> Changes:
        """Returns the changes since the last call."""
        newest, others = "", False
        for mask, name in _events(self._fd):
            if mask & (_CREATED | _MOVED_TO):
                newest = max(newest, name)
            else:
                others = True
        return Changes(newest, others)

    def wait(self, longest_s: float) -> None:
        """Waits for a change, for at most ``longest_s``."""
        if self._fd < 0:
            return time.sleep(longest_s)
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.poll(longest_s * 1000)
        return None

    def close(self) -> None:
        """Closes the watch. A thread in ``wait`` returns at the end of its time."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class FileWrites:
    """Which files of ``folder`` were written to by processes of this host. For one thread."""

    def __init__(self, folder: Path) -> None:
        self._fd = _watch(str(folder), _WRITTEN)
        self.is_active = self._fd >= 0
        if self.is_active:
            weakref.finalize(self, os.close, self._fd)
        self._written: set[str] = set()

    def has(self, name: str) -> bool:
        """Returns whether the file was written to since the last call for it. Misses writes if the
        kernel's queue overflowed, so callers also check from time to time."""
        self._written.update(written for _, written in _events(self._fd))
        is_written = name in self._written
        self._written.discard(name)
        return is_written


def _events(fd: int) -> Iterator[tuple[int, str]]:
    """Yields the queued events: the mask and the name it is about."""
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
    """Returns the descriptor of a new watch; -1 if the kernel refuses."""
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
        logger.info("inotify unavailable fallback=polling error=%s", error)
        return -1
    return fd
