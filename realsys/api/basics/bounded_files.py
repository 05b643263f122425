"""Reads files that a user names, without ever reading for ever: bounded in size, and in time.

For settings, site files, data sets and model folders. A path may be a folder, a pipe that nobody writes
to, /dev/zero, or a file of terabytes; each is an OSError with a reason, as a missing file is. Standard
library only. It knows no format (realsys.config and realsys.data do).
"""

from __future__ import annotations

import errno
import json
import os
import select
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_SETTINGS_BYTES = 512 << 10  # of a settings or site file: YAML takes seconds for each megabyte
MAX_TEXT_BYTES = 16 << 20  # of a model's small files
MAX_LINE_BYTES = 16 << 20  # of a data set's line
PIPE_S = 10.0  # for what `--config <(program)` writes
_CHUNK_BYTES = 1 << 20


def read_bounded_text(path: str | Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a file or pipe.

    Raises:
        OSError: it can't be read, is larger, or is a pipe that does not end within PIPE_S.
        UnicodeDecodeError: it is not UTF-8.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb", buffering=0) as file:
        data, until_s = bytearray(), time.monotonic() + PIPE_S
        while len(data) <= max_bytes:
            ready = select.select([file], [], [], max(0.0, until_s - time.monotonic()))[0]
            if not ready:
                raise _refused(errno.ETIMEDOUT, f"nothing came from it for {PIPE_S:g} s", path)
            if not (piece := file.read(_CHUNK_BYTES)):
                return data.decode("utf-8")
            data += piece
    raise _refused(errno.EFBIG, f"it is larger than {max_bytes:,} bytes", path)


def open_regular(path: str | Path) -> BinaryIO:
    """A regular file, open to be read; workers will read it again, so a pipe or device won't do.

    Raises:
        OSError: it can't be opened, or is none.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(handle, "rb")  # refuses folders
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return file
    file.close()
    raise _refused(errno.EINVAL, "it is no regular file", path)


def bounded_lines(file: Any, path: str | Path) -> Iterator[bytes]:
    """Lines of an open file, without their ends. Raises OSError at one over MAX_LINE_BYTES."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            what = f"line {number} is longer than {MAX_LINE_BYTES:,} bytes"
            raise _refused(errno.EFBIG, what, path)
        yield line.removesuffix(b"\n")


def parse_json(text: str | bytes) -> Any:
    """JSON as it was written: no nesting without end, no NaN, no infinity, no half of a character.

    Raises:
        ValueError: it is none such.
    """
    try:
        found = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if isinstance(text, bytes) or "\\u" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("values within values without end") from None
    except UnicodeEncodeError:
        raise ValueError("a text holds half of a surrogate pair") from None
    return found


def _finite(text: str) -> float:
    number = float(text)
    return _no_number(text) if number in (float("inf"), float("-inf")) else number


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no finite number")


def _refused(number: int, why: str, path: str | Path) -> OSError:
    return OSError(number, why, str(path))


def unreadable(error: OSError | ValueError) -> str:
    """Why a file gave no JSON, as the end of a sentence."""
    return (
        f"can't be read: {error.strerror}"
        if isinstance(error, OSError)
        else f"is not JSON: {error}"
    )
