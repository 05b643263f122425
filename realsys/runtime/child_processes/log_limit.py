"""Keeps the log of a program, which writes it by itself, from growing without end.

The program has the file open to append, so what is cut out of the file's middle is gone, and the program
writes on behind the rest. The beginning stays, as it mostly says why a program went wrong, and the end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
KEPT_END_BYTES = 8 << 20  # little: what is written while the file is cut is lost
LOOK_S = 1.0
_NOTE = "\n[realsys: {} bytes left out here, as a log has at most {} MiB]\n"
_NOTED = re.compile(rb"\n\[realsys: (\d+) bytes left out here,[^\n]*\]\n")
_MOST_NOTE_BYTES = 200
_MOST_LINE_BYTES = 1 << 16  # that is left out for the end to begin with a whole one


def cut_log(path: Path, *, most_bytes: int = MOST_BYTES, end_bytes: int = KEPT_END_BYTES) -> int:
    """Cuts the middle out of a log that is longer than ``most_bytes``; returns how much is left out of it.

    Between the two parts stands a line that tells how much was left out, now and before. Returns 0 for a
    log that was not too long, or that is not there.
    """
    try:
        with path.open("r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size <= most_bytes:
                return 0
            head = most_bytes - 2 * end_bytes
            noted = _NOTED.match(os.pread(file.fileno(), _MOST_NOTE_BYTES, head))
            cut_before, skipped = (int(noted[1]), noted.end()) if noted else (0, 0)
            end = os.pread(file.fileno(), end_bytes, size - end_bytes)
            end = end[end.find(b"\n", 0, _MOST_LINE_BYTES) + 1 :]
            left_out = cut_before + size - head - skipped - len(end)
            rest = _NOTE.format(left_out, most_bytes >> 20).encode() + end
            os.pwrite(file.fileno(), rest, head)
            file.truncate(head + len(rest))
            return left_out
    except FileNotFoundError:
        return 0


@asynccontextmanager
async def limited_log(path: Path) -> AsyncIterator[None]:
    """Looks after the log of a program that runs meanwhile."""
    looking = asyncio.create_task(_keep_short(path), name=f"log {path.name}")
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await _cut(path)


async def _keep_short(path: Path) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        await _cut(path)


async def _cut(path: Path) -> None:
    try:
        if left_out := await asyncio.to_thread(cut_log, path):
            logger.info("log cut path=%s left_out_bytes=%d", path, left_out)
    except OSError as error:  # a full disk, a file system that is away: the program goes on
        logger.warning("log can't be cut path=%s error=%s", path, error)
