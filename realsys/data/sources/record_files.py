"""Opens a user's records: JSONL, CSV, Parquet, Arrow, a ``save_to_disk`` folder, shards of any. No torch.

``open_records(path)`` is the entrance: a file, a folder of shards, or a glob pattern (``part-*.jsonl.gz``),
whose files are read in the order of their names. No more than an index is held (text_records.py,
arrow_records.py).

A gzip-compressed file can be read from its beginning only. It is unpacked into a temporary file, without a
name and gone with the process; TMPDIR says on which disk.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from realsys.api.basics.bounded_files import MAX_LINE_BYTES, open_regular
from realsys.api.basics.record_names import RECORD_SUFFIXES, is_record_name
from realsys.api.errors import DataError
from realsys.data.sources.arrow_records import (
    ArrowRows,
    ParquetRows,
    files_of_saved_dataset,
    is_saved_dataset,
)
from realsys.data.sources.record_parts import JoinedRecords, RecordSource
from realsys.data.sources.text_records import (
    CsvRows,
    JsonLines,
    PlainBytes,
    Spool,
    SpooledBytes,
)
from realsys.runtime.progress import tick

MAX_UNPACKED_BYTES = 64 << 30  # of all compressed files of a data set
MAX_FILES = 100_000
_GZIP, _PARQUET, _ARROW = b"\x1f\x8b", b"PAR1", b"ARROW1"
_CHUNK_BYTES = 1 << 20


def open_records(path: str | Path) -> RecordSource:
    """Opens all records under ``path``.

    Raises:
        DataError: nothing is there, a file can't be read, or there are no records.
        ConfigError: a Parquet or Arrow file, and pyarrow is not installed.
    """
    files, spool = record_paths(path), Spool()
    parts = [_open(file, spool) for file in files]
    found = parts[0] if len(parts) == 1 else JoinedRecords(parts)
    if not len(found):
        raise DataError(
            "the data set is empty", where=str(path), fix='add lines of {"prompt": …, "answer": …}'
        )
    return found


def record_paths(path: str | Path) -> list[Path]:
    """Lists the files that a path, folder or pattern means, in the order in which they are read.

    Raises:
        DataError: there are none.
    """
    given = Path(path).expanduser()
    if given.is_dir():
        if is_saved_dataset(given):
            return files_of_saved_dataset(given)
        found = sorted(f for f in given.iterdir() if is_record_name(f.name) and f.is_file())
        fix = f"give a folder with files that end in {', '.join(RECORD_SUFFIXES)} (.gz)"
    elif not given.exists() and any(char in str(given) for char in "*?["):
        pattern = given.relative_to(given.anchor) if given.is_absolute() else given
        found = sorted(Path(given.anchor or ".").glob(str(pattern)))
        fix = "correct the pattern; * stands for any part of a name"
        if "[" in str(given):
            fix += ", [ ] for one of the characters between them: write [[] for a [ of a name"
    else:
        return [given]
    if not found or len(found) > MAX_FILES:
        what = f"{len(found):,} files, more than {MAX_FILES:,}" if found else "no files of records"
        raise DataError(what, where=str(path), fix=fix)
    return found


def _open(path: Path, spool: Spool) -> RecordSource:
    """Opens one file, by what it begins with and the end of its name."""
    try:
        with open_regular(path) as file:
            start = file.read(len(_ARROW))
        if start.startswith(_PARQUET):
            return ParquetRows(path)
        if start == _ARROW or path.suffix == ".arrow":
            return ArrowRows(path)
        is_packed = start.startswith(_GZIP)
        source = _unpacked(path, spool) if is_packed else PlainBytes(path)
        return (CsvRows if is_csv(path) else JsonLines)(source)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(
            f"the data set can't be read: {error}",
            where=str(path),
            fix="give a readable JSONL or CSV file in UTF-8, plain or gzip-compressed, or a Parquet file",
        ) from error


def is_csv(path: Path) -> bool:
    """True for names that end in ``.csv`` or ``.tsv``, compressed or not."""
    return path.name.removesuffix(".gz").endswith((".csv", ".tsv"))


def unpacked_chunks(path: Path) -> Iterator[bytes]:
    """Yields the unpacked bytes of a gzip-compressed file."""
    with open_regular(path) as packed, gzip.GzipFile(fileobj=packed) as file:
        while chunk := file.read(_CHUNK_BYTES):
            tick()
            yield chunk


def _unpacked(path: Path, spool: Spool) -> SpooledBytes:
    """Unpacks a file. Raises OSError: the disk is full, or the file is no whole gzip."""
    start, since_newline, num_lines = spool.size, 0, 1
    for chunk in unpacked_chunks(path):
        spool.append(chunk)
        end = chunk.rfind(b"\n")
        since_newline = len(chunk) - end - 1 if end >= 0 else since_newline + len(chunk)
        num_lines += chunk.count(b"\n")
        if since_newline > MAX_LINE_BYTES:
            raise OSError(f"line {num_lines} is longer than {MAX_LINE_BYTES:,} bytes")
        if spool.size > MAX_UNPACKED_BYTES:
            raise DataError(
                f"the compressed files have more than {MAX_UNPACKED_BYTES >> 30} GiB unpacked",
                where=str(path),
                fix="unpack them (gunzip), so that they are read where they lie",
            )
    return SpooledBytes(path, spool, start, spool.size - start)
