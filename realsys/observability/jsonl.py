"""Files of one JSON object per line: append whole lines, read them after a crash, truncate them.

For metrics, events, ledger and samples of a phase. A process that dies may leave its last line torn;
every reader here skips that line, and the next writer removes it. A damaged line anywhere else was not
written by realsys and is an error that names it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.api.errors import ClusterError, DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Jsonl:
    """The contents of a file. ``lines`` are the bytes of each row, without the line end."""

    rows: tuple[dict[str, Any], ...] = ()
    lines: tuple[bytes, ...] = ()
    damaged: tuple[int, ...] = ()  # line numbers from 1
    torn: bool = False


def parse_jsonl(data: bytes) -> Jsonl:
    """Parses the rows of ``data``. Damaged lines are counted, a torn last one is skipped."""
    pieces = data.split(b"\n")
    rows: list[dict[str, Any]] = []
    lines: list[bytes] = []
    damaged: list[int] = []
    for number, piece in enumerate(pieces, 1):
        if not piece.strip():
            continue
        row = _object(piece)
        if row is not None:
            rows.append(row)
            lines.append(piece)
        elif number == len(pieces):
            return Jsonl(tuple(rows), tuple(lines), tuple(damaged), torn=True)
        else:
            damaged.append(number)
    return Jsonl(tuple(rows), tuple(lines), tuple(damaged))


def _object(piece: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(piece)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a file; none if there is no file.

    Raises:
        DataError: a line other than a torn last one is damaged; names the lines.
    """
    return list(_read_whole(path).rows)


def _read_whole(path: Path) -> Jsonl:
    try:
        content = parse_jsonl(path.read_bytes())
    except FileNotFoundError:
        return Jsonl()
    if content.damaged:
        shown = ", ".join(map(str, content.damaged[:10]))
        raise DataError(
            f"{len(content.damaged)} damaged lines: {shown}",
            where=f"{path}:{content.damaged[0]}",
            fix="remove those lines, or restore the file",
        )
    return content


def copy_rows(source: Path, target: Path, *, last_step: int) -> int:
    """Copies the lines of ``source`` with ``step <= last_step`` to ``target``, byte for byte; returns how
    many.

    Atomic: temporary file beside it, fsync, rename. Without a source the target is empty.

    Raises:
        DataError: a damaged line, or one without a step.
        ClusterError: no space or no permission.
    """
    content = _read_whole(source)
    kept = []
    for number, (row, line) in enumerate(zip(content.rows, content.lines, strict=True), 1):
        step = row.get("step")
        if not isinstance(step, int):
            raise DataError(
                f"row {number} has no step",
                where=str(source),
                fix='each line needs "step": remove that line, or restore the file',
            )
        if step <= last_step:
            kept.append(line)
    _replace(target, b"".join(line + b"\n" for line in kept))
    dropped = len(content.lines) - len(kept)
    if dropped or content.torn:
        logger.info(
            "rows taken over path=%s last_step=%d kept=%d dropped=%d torn=%s",
            source,
            last_step,
            len(kept),
            dropped,
            content.torn,
        )
    return len(kept)


def _replace(path: Path, data: bytes) -> None:
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, durable=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def replace_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Writes a file that others may read, whole or not at all; ``durable``: it outlives a crash."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


_TAIL_BYTES = 1 << 16  # that are read at a time, from a file's end


class JsonlAppender:
    """Appends rows, each in one write: a reader never sees part of a finished line.

    Opening removes a torn last line of an earlier process. One writer per file.

    Raises:
        ClusterError: no space (the file is left as it was before the row) or no permission.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                self._mend_end()
            except BaseException:
                self.close()
                raise

    def _mend_end(self) -> None:
        last = self._after_last_newline()
        if not last:
            return
        if _object(last) is not None:
            os.write(self._handle, b"\n")
            return
        os.ftruncate(self._handle, os.fstat(self._handle).st_size - len(last))
        logger.warning("torn last line removed path=%s bytes=%d", self.path, len(last))

    def _after_last_newline(self) -> bytes:
        """Reads the file from its end: its lines may be gigabytes."""
        start, pieces = os.fstat(self._handle).st_size, [b""]
        while start > 0 and b"\n" not in pieces[-1]:
            end, start = start, max(0, start - _TAIL_BYTES)
            pieces.append(os.pread(self._handle, end - start, start))
        return b"".join(reversed(pieces)).rpartition(b"\n")[2]

    def append(self, row: Mapping[str, Any], *, sort_keys: bool = False) -> None:
        """Writes one row. NaN and infinities are refused: they are not JSON."""
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
        line, written = text.encode("utf-8", "backslashreplace") + b"\n", 0
        with write_errors(self.path):
            try:
                written = os.write(self._handle, line)
                if written < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):  # the next opening would mend it as well
                    if written:
                        os.ftruncate(self._handle, os.lseek(self._handle, 0, os.SEEK_CUR) - written)
                raise

    def sync(self) -> None:
        """Syncs the rows so far to the disk. Raises ClusterError."""
        with write_errors(self.path):
            os.fsync(self._handle)

    def close(self) -> None:
        """Closes the file; may be called again."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __enter__(self) -> JsonlAppender:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turns an error of the system while ``path`` is written into one that tells what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"no space left for {path.name}"
            fix = "free space or raise the quota, then resume the trial"
        else:
            what = f"{path.name} can't be written: {error.strerror or error}"
            fix = "check the folder's permissions and its file system, then resume the trial"
        raise ClusterError(what, where=str(path), fix=fix) from error
