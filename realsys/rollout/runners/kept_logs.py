"""Logs of episodes that failed: the ends of a worker's newest ones, however many fail in a run."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path

MOST_LOGS = 200
END_BYTES = 64 << 10
_MOST_LINE_BYTES = 1 << 12  # that is left out for the end to begin with a whole one


class KeptLogs:
    """The logs in a worker's folder, the oldest first. Its methods block."""

    def __init__(self, folder: Path) -> None:
        """Takes over what another worker has left in the folder, which need not be there."""
        left = [(path.stat().st_mtime, path) for path in folder.glob("*.log")]
        self._paths = deque(path for _, path in sorted(left))

    def add(self, path: Path) -> None:
        """Keeps the end of a log that nobody writes any more; removes the oldest if there are too many.

        What the file system refuses is left as it is: a log is no reason to fail an episode.
        """
        self._paths.append(path)
        with suppress(OSError):
            _cut_to_end(path)
        while len(self._paths) > MOST_LOGS:
            with suppress(OSError):
                self._paths.popleft().unlink()


def _cut_to_end(path: Path) -> None:
    with path.open("r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size <= END_BYTES:
            return
        note = f"[realsys: {size - END_BYTES} bytes left out before]\n".encode()
        rest = os.pread(file.fileno(), END_BYTES - len(note), size - END_BYTES + len(note))
        kept = note + rest[rest.find(b"\n", 0, _MOST_LINE_BYTES) + 1 :]  # from a whole line on
        os.pwrite(file.fileno(), kept, 0)
        file.truncate(len(kept))
