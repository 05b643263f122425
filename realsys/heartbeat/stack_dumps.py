"""Dumps the stacks of all threads of a worker without its cooperation.

faulthandler writes them on SIGUSR1 in the signal handler itself, so they arrive while the GIL is
held, and into memory, so a hung file system does not matter; the heartbeat process sends the signal
and copies the dump to ``stacks/<type>-<index>.txt``. A manual kill -USR1 does the same.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
from pathlib import Path

from realsys.runtime.linux import memfd_create

DUMP_SIGNAL = signal.SIGUSR1
INNERMOST = 3  # frames in the short text
WRITTEN_IN_S = 2.0
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)


def arm() -> int:
    """Makes this process write its stacks on the signal; returns the memory's descriptor."""
    fd = memfd_create("realsys-stacks")
    faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True, chain=False)
    return fd


class StackDumps:
    """Reads the dumps, in the heartbeat process.

    Args:
        fd: from ``arm``, in the worker.
        path: file for the dumps; created with the first one.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self.path, self._read = fd, path, 0
        self._reading = threading.RLock()

    @property
    def has_new(self) -> bool:
        """True if something was dumped that has not been copied to the file."""
        return os.fstat(self._fd).st_size > self._read

    def ask(self, pid: int, why: str) -> str:
        """Makes process ``pid`` dump its stacks; returns them, "" if none arrived in two seconds.

        Raises:
            OSError: the file can't be written.
        """
        with self._reading:
            self.collect()
            os.kill(pid, DUMP_SIGNAL)
            deadline_s, size = time.monotonic() + WRITTEN_IN_S, -1
            while time.monotonic() < deadline_s:
                time.sleep(0.05)
                before, size = size, os.fstat(self._fd).st_size
                if before == size > self._read:  # it has ended
                    return self.collect(why)
        return ""

    def collect(self, why: str = "SIGUSR1 from outside") -> str:
        """Appends new dumps to the file, and returns them."""
        with self._reading:
            size = os.fstat(self._fd).st_size
            if size == self._read:
                return ""
            text = os.pread(self._fd, size - self._read, self._read).decode(errors="replace")
            self._read = size
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"==== {time.strftime('%Y-%m-%dT%H:%M:%S')} {why}\n{text}\n")
        return text


def innermost(dump: str) -> str:
    """Returns the main thread's innermost frames in one line, innermost first. Pure."""
    # faulthandler lists threads newest first: the main thread, the oldest, is last.
    blocks = re.split(r"^(?=(?:Current thread|Thread) 0x)", dump, flags=re.MULTILINE)
    frames = [
        f"{match['name']} ({Path(match['file']).name}:{match['line']})"
        for match in _FRAME.finditer(blocks[-1])
    ]
    return " < ".join(frames[:INNERMOST])


def state_letter(pid: int) -> str:
    """Returns the process's state from proc(5): T is stopped, D waits for a device; "" if it has
    ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]
